"""KV that was evicted from GPU memory is loaded from CPU memory, and only its job waits."""

from typing import Any

from parrot.engine.config import SimConfig
from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.stores import HostStores
from parrot.engine.core.host.tier import HostTier
from parrot.engine.core.steps import BlockCopy, RunnerInfo, Transfer, WindowInfo
from parrot.engine.sim import VOCAB_SIZE
from parrot.protocol.engine_api import StepCosts
from tests.support.core_harness import LANGUAGE, Harness, next_letter, piece
from tests.support.tiered_runner import TieredRunner

COSTS = StepCosts(step_s=1e-3, sequence_s=0, token_s=0, prefill_s=1.0)


class Tiered(Harness):
    """A `Harness` with a host tier of `num_host_blocks`.

    Computing a token takes `prefill_s`, and a transfer takes 1 ms."""

    runner: TieredRunner

    def __init__(
        self,
        num_blocks: int = 8,
        num_host_blocks: int = 32,
        prefill_s: float = 1.0,
        block_bytes: int = 0,
        window: WindowInfo | None = None,
        **config: Any,
    ) -> None:
        super().__init__(num_blocks=num_blocks, **config)
        costs = COSTS.model_copy(update={"prefill_s": prefill_s})
        info = RunnerInfo(
            num_blocks,
            block_size=4,
            max_seq_len=64,
            vocab_size=VOCAB_SIZE,
            model_mem=1.0,
            cache_mem=2.0,
            costs=costs,
            num_host_blocks=num_host_blocks,
            block_bytes=block_bytes,
            window=window,
        )
        self.runner = TieredRunner(info, self.tokens_of, next_letter)
        self.core = EngineCore(SimConfig(**config), self.runner, LANGUAGE, self.clock)

    def started(self, *, to_host: bool) -> list[Transfer]:
        return [t for t in self.runner.started if t.to_host == to_host]

    def num_copied(self, *, to_host: bool) -> int:
        return sum(len(t.blocks) for t in self.started(to_host=to_host))

    @property
    def tier(self) -> HostTier:
        assert self.core.host is not None
        return self.core.host.tier

    @property
    def num_computed(self) -> int:
        return sum(plan.num_tokens for plan in self.runner.plans)


def fill_the_device(harness: Tiered, first_id: int = 90) -> None:
    """Fill all blocks, so that all earlier KV is evicted."""
    text = chr(first_id) * (4 * harness.core.info.num_blocks)
    harness.fill(piece(first_id, text))
    harness.run()
    harness.free(first_id)


def test_published_blocks_are_copied_while_idle():
    harness = Tiered()
    harness.fill(piece(1, "abcdefghij"))
    harness.run()
    assert harness.num_copied(to_host=True) == 2  # The third block is not full.
    assert not harness.core.has_work


def test_nothing_is_copied_next_to_steps_while_gpu_blocks_are_free():
    harness = Tiered(num_blocks=64, num_host_blocks=64)
    answer = harness.generate(piece(1, "abcdefghijkl"), length=8)
    while answer.response is None:
        harness.step()
        assert answer.response is not None or not harness.runner.started
    harness.run()
    assert harness.num_copied(to_host=True) == 4


def test_evicted_kv_is_loaded_instead_of_computed():
    harness = Tiered()
    harness.fill(piece(1, "abcdefghij"))
    harness.run()
    fill_the_device(harness)
    before = harness.num_computed
    answer = harness.generate(piece(1, "kl"), length=3)
    harness.run()
    assert answer.text == "mno"
    assert harness.num_copied(to_host=False) == 2
    assert harness.num_computed - before == 4 + 2  # "ijkl" and two output tokens.
    assert answer.response.usage.cached_tokens == 8


def test_public_kv_is_loaded_for_any_salt():
    harness = Tiered()
    harness.fill(piece(1, "abcdefghijkl", public=8), cache_salt="me")
    harness.run()
    harness.free(1)
    fill_the_device(harness)
    answer = harness.fill(piece(2, "abcdefghijklm", public=8), cache_salt="you")
    harness.run()
    assert harness.num_copied(to_host=False) == 2
    assert (answer.response.cached_tokens, answer.response.computed_tokens) == (8, 5)


def test_kv_of_a_freed_context_is_loaded_for_its_salt_only():
    harness = Tiered()
    harness.fill(piece(1, "abcdefgh"), cache_salt="me")
    harness.run()
    harness.free(1)
    fill_the_device(harness)
    harness.fill(piece(2, "abcdefghi"), cache_salt="you")
    harness.run()
    assert harness.num_copied(to_host=False) == 0
    fill_the_device(harness, 91)
    harness.fill(piece(3, "abcdefghi"), cache_salt="me")
    harness.run()
    assert harness.num_copied(to_host=False) == 2


def test_copies_survive_a_registration_also_in_flight():
    harness = Tiered(num_host_blocks=512)
    for turn in range(100):
        harness.runner.max_polls = turn % 5
        answer = harness.fill(piece(1, "abcdefghi"), cache_salt="me")
        stranger = harness.fill(piece(2, "abcdefghi"), cache_salt=f"stranger {turn}")
        if turn % 2:
            harness.run()
            assert stranger.response.cached_tokens == 0
            assert answer.response.cached_tokens == (8 if turn > 1 else 0)
        for _ in range(turn % 4):
            harness.core.step()
        harness.core.requests.reset()
        harness.deliver()
        harness.core.check_integrity()
        fill_the_device(harness)
        assert harness.num_free == harness.core.info.num_blocks
    assert harness.num_copied(to_host=False) >= 50


def test_other_jobs_run_while_one_waits_for_a_load():
    harness = Tiered(num_blocks=12)
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    fill_the_device(harness)
    harness.runner.min_polls = 8
    waiting = harness.generate(piece(1, "x"), length=2)
    other = harness.generate(piece(2, "abc"), length=2)
    harness.step()
    assert harness.started(to_host=False)
    while other.response is None:
        harness.step()
    assert waiting.response is None
    harness.run()
    assert waiting.text == "yz"
    assert waiting.response.usage.cached_tokens == 8


def test_kv_that_is_computed_faster_is_not_loaded():
    harness = Tiered(prefill_s=1e-6)
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    for _ in range(2):  # The cost of a load is known after the first one.
        fill_the_device(harness)
        harness.generate(piece(1), length=1)
        harness.run()
    assert harness.num_copied(to_host=False) == 2


def test_kv_of_a_failed_copy_is_computed():
    harness = Tiered()
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    fill_the_device(harness)
    harness.runner.fail_every = 1
    answer = harness.generate(piece(1, "i"), length=2)
    harness.run()
    assert answer.text == "jk"
    assert harness.tier.totals.num_failed > 0


def test_a_copy_that_cannot_be_started_fails_no_request(monkeypatch):
    harness = Tiered()
    monkeypatch.setattr(harness.runner, "transfer", lambda transfers: 1 / 0)
    answer = harness.generate(piece(1, "abcdefgh"), length=2)
    harness.run()
    assert answer.text == "ij"
    assert harness.tier.info().num_free_blocks == harness.tier.num_slots


def test_a_job_that_ends_while_its_kv_is_loading():
    harness = Tiered()
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    fill_the_device(harness)
    harness.runner.max_polls = 4
    harness.generate(piece(1, "x"), length=2)
    harness.step()
    harness.free(1)
    harness.run()
    assert harness.num_free == harness.core.info.num_blocks
    before = harness.num_copied(to_host=False)
    harness.generate(piece(2, "abcdefghi"), length=1)
    harness.run()
    assert harness.num_copied(to_host=False) == before  # The KV is still in GPU memory.


def test_two_jobs_wait_for_the_same_load():
    harness = Tiered(num_blocks=12)
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    harness.free(1)
    fill_the_device(harness)
    answers = [harness.generate(piece(n, "abcdefgh" + chr(105 + n)), length=1) for n in (2, 3)]
    harness.run()
    assert [a.text for a in answers] == ["l", "m"]
    assert harness.num_copied(to_host=False) == 2
    assert [a.response.usage.cached_tokens for a in answers] == [8, 8]


def test_both_tiers_together_hold_more_than_one_tier():
    """Full CPU memory holds the KV that the GPU is about to evict, not the KV that it keeps."""
    harness = Tiered(num_blocks=8, num_host_blocks=9)
    texts = ["a" * 16, "b" * 16, "c" * 16]
    for _ in range(3):
        for number, text in enumerate(texts):
            harness.fill(piece(number, text))
            harness.run()
            harness.free(number)
        device, host = harness.core._tree.pool, harness.tier.host
        assert len({*device._by_key, *host._by_key}) >= 11


def test_copies_of_blocks_in_use_are_evicted_first():
    pool, host = BlockPool(8, 4), HostPool(8)
    stores = HostStores(pool, host, lambda key: None)
    blocks = pool.allocate(2)
    for block, key in zip(blocks, (b"first", b"second"), strict=True):
        pool.publish(block, key)
    for store in stores.choose_stores(8, is_idle=True):
        stores.finish_store(store.key, store.slot, True)
    pool.release(blocks)
    assert [host._held[slot] for slot in host._queue] == [b"first", b"second"]
    pool.share(blocks[1:])
    assert [host._held[slot] for slot in host._queue] == [b"second", b"first"]
    stores.check_integrity({})


def test_a_block_that_is_evicted_without_a_copy_is_copied_before_it_is_written():
    # Two transfers of this size may be in flight.
    harness = Tiered(num_blocks=8, block_bytes=256 << 20)
    harness.runner.min_polls = 5
    harness.fill(piece(1, "abcdefghijklmnopqrstuvwxyzabcdef"))
    harness.step()
    harness.free(1)
    harness.fill(piece(2, "z" * 32))
    harness.run()
    answer = harness.fill(piece(3, "abcdefghijklmnopqrstuvwxyzabcdef"))
    harness.run()
    assert answer.response.computed_tokens <= 4
    assert harness.num_copied(to_host=False) >= 7
    assert not harness.runner.violations


def test_a_block_that_a_step_copies_delays_no_store_of_another():
    """Both blocks were evicted, and the step will write to the other one."""
    pool = BlockPool(2, 4)
    tier: HostTier[str] = HostTier(pool, 4, 1, lambda: None)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert pool.allocate(2) is not None
    (transfer,) = tier.take_transfers([BlockCopy(blocks[0], 9, 1)], is_idle=True)
    assert transfer.to_host
    assert {*transfer.blocks} == {*blocks}


def test_copies_of_a_freed_context_are_evicted_first():
    """The end of the prefix is evicted before its start."""
    harness = Tiered(num_blocks=8, num_host_blocks=20)
    for number, letter in ((1, "a"), (2, "b")):
        harness.fill(piece(number, letter * 12))
        harness.run()
    fill_the_device(harness)
    keys = list(harness.context(2).keys)
    harness.free(2)
    host = harness.tier.host
    assert [host._held[slot] for slot in host._queue][:3] == keys[::-1]


def test_kv_that_may_be_wrong_is_dropped_from_cpu_memory():
    harness = Tiered()
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    harness.runner._nan_token = 98
    assert harness.tier.info().num_free_blocks == harness.tier.num_slots - 2
    failed = harness.generate(piece(1, "i"), length=1)
    harness.run()
    assert failed.error is not None
    assert harness.tier.info().num_free_blocks == harness.tier.num_slots


def test_kv_that_may_be_wrong_is_not_used_after_its_load():
    """The key is dropped while the KV is loaded."""
    harness = Tiered(num_blocks=10)
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    keys = list(harness.context(1).keys)
    harness.free(1)
    fill_the_device(harness)
    harness.runner.min_polls = 3
    # The core does not wait for the load while this request runs.
    harness.generate(piece(3, "xyz"), length=8)
    answer = harness.generate(piece(2, "abcdefghi"), length=1)
    harness.step()
    assert harness.tier.is_waiting
    assert harness.num_copied(to_host=False) == 2
    harness.core._tree.drop_blocks(set(), keys)
    harness.run()
    assert answer.text == "j"
    assert answer.response.usage.computed_tokens == 9
    harness.core.check_integrity()


def test_kv_on_the_gpu_is_not_loaded():
    harness = Tiered()
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    keys = list(harness.context(1).keys)
    assert harness.num_copied(to_host=True) == 2
    assert not harness.tier.is_worth_loading(keys)
    assert harness.tier.load(keys, None) is None
    harness.free(1)
    fill_the_device(harness)
    assert harness.tier.is_worth_loading(keys)


def test_the_bytes_in_flight_are_bounded():
    harness = Tiered(block_bytes=256 << 20)
    harness.runner.max_polls = 3
    harness.fill(piece(1, "abcdefghijklmnopqrstuvwxyz"))
    while harness.step():
        on_their_way = [f for f in harness.runner.flights if f.transfer.to_host]
        assert len(on_their_way) <= 2
    assert harness.num_copied(to_host=True) == 6


def test_without_prefix_caching_there_is_no_host_tier():
    harness = Tiered(scheduler={"prefix_caching": False})
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    assert not harness.runner.started


def test_a_copy_of_wrong_kv_is_dropped_although_its_block_was_reused():
    engine = Tiered(num_blocks=4)
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    keys, blocks = list(engine.context(1).keys), set(engine.context(1).block_ids)
    engine.core.requests.free([1])
    engine.fill(piece(2, "nopqrstuvwxyz"))  # Context 2 reuses the blocks after they are copied.
    engine.run()
    assert engine.tier.is_worth_loading(keys)
    # As after the failure of the step that wrote the blocks.
    engine.core._tree.drop_blocks(blocks, keys)
    assert not engine.tier.is_worth_loading(keys)
    engine.core.check_integrity()
