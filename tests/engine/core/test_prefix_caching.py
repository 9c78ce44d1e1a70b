"""Contexts share the KV of a common prefix without a fork."""

from array import array

import pytest

from parrot.engine.attention.work_list import SplitConfig, plan_work
from parrot.engine.core.block_pool import BlockHasher
from parrot.engine.core.contexts import drop_kv
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.inputs import InputBuilder
from parrot.protocol.errors import ModelNumerics
from parrot.protocol.sampling import SamplingConfig
from tests.support.core_harness import Harness, piece
from tests.support.kernel_cases import SHARE_ALL

PROMPT = "abcdefghijklmnopqrstu"  # 21 tokens: five full blocks of 4, and one token.


def usage(answer) -> tuple[int, int]:
    return (answer.response.usage.cached_tokens, answer.response.usage.computed_tokens)


def test_a_second_prompt_computes_only_tokens_that_are_not_cached():
    engine = Harness()
    first = engine.generate(piece(1, PROMPT), length=3)
    engine.run()
    second = engine.generate(piece(2, PROMPT), length=3)
    engine.run()
    assert usage(first) == (0, 21)
    assert usage(second) == (20, 1)
    assert first.text == second.text
    assert engine.context(1).block_ids[:5] == engine.context(2).block_ids[:5]
    assert engine.core.runtime_info().num_free_blocks == 16 - 5 - 2


def test_attention_reads_a_shared_prefix_once():
    engine = Harness()
    for context_id, end in ((1, "x"), (2, "y")):
        engine.generate(piece(context_id, PROMPT + end), length=4)
    while not (engine.step() and len(engine.last_plan.sequences) == 2):
        pass
    engine.step()
    step = InputBuilder(2, 16, 4).build(engine.last_plan).step
    work = plan_work(step, AttentionShape(1, 1, 16, 4), SHARE_ALL, SplitConfig())
    assert work.num_shared_tokens == 20


def test_freed_contexts_stay_as_cache_and_count_as_free():
    engine = Harness()
    engine.generate(piece(1, PROMPT), length=3)
    engine.run()
    assert engine.free(1) == 24
    assert engine.num_free == 16
    again = engine.generate(piece(1, PROMPT), length=3)
    engine.run()
    assert usage(again) == (20, 1)


def test_generated_tokens_are_cached_too():
    engine = Harness()
    first = engine.generate(piece(1, PROMPT), length=8)
    engine.run()
    engine.free(1)
    second = engine.fill(piece(2, PROMPT + first.text + "?"))
    engine.run()
    assert second.response.cached_tokens == 28
    assert second.response.computed_tokens == 2


def test_a_fully_cached_prompt_computes_one_token_and_changes_no_shared_block():
    engine = Harness()
    first = engine.generate(piece(1, PROMPT[:16]), length=3)
    engine.run()
    second = engine.generate(piece(2, PROMPT[:16]), length=3)
    third = engine.fill(piece(3, PROMPT[:16]))
    engine.run()
    assert second.text == first.text
    assert usage(second) == (16, 0)
    assert third.response.cached_tokens == 16
    assert all(len(s.token_ids) == 1 for plan in engine.runner.plans[3:] for s in plan.sequences)


def test_equal_concurrent_prompts_are_computed_once():
    engine = Harness(num_blocks=64)
    answers = [engine.generate(piece(i, PROMPT), length=2) for i in range(8)]
    engine.run()
    computed = sum(answer.response.usage.computed_tokens for answer in answers)
    assert computed == 21 + 7
    assert len({answer.text for answer in answers}) == 1
    used = {block for i in range(8) for block in engine.context(i).block_ids}
    assert len(used) == 5 + 8


def test_a_fork_finds_cached_blocks_after_its_parent():
    engine = Harness()
    engine.fill(piece(1, PROMPT))
    engine.run()
    engine.fill(piece(2, PROMPT[:6]))
    fork = engine.fill(piece(3, PROMPT[6:] + "!", parent=2))
    engine.run()
    assert fork.response.computed_tokens == 2
    assert engine.bytes_of(3) == (PROMPT + "!").encode()


def test_another_salt_shares_nothing():
    engine = Harness()
    engine.fill(piece(1, PROMPT), cache_salt="one")
    engine.run()
    other = engine.fill(piece(2, PROMPT), cache_salt="other")
    same = engine.fill(piece(3, PROMPT), cache_salt="one")
    engine.run()
    assert other.response.computed_tokens == 21
    assert same.response.computed_tokens == 1


@pytest.mark.parametrize(("text", "computed"), [("abcdefghijklm", 9), ("mnopqrstuvwxy", 1)])
def test_least_recently_used_prefixes_are_evicted_from_their_ends(text, computed):
    engine = Harness(num_blocks=10)
    for context_id, prompt in ((1, "abcdefghijkl"), (2, "mnopqrstuvwx"), (3, "x" * 24)):
        engine.fill(piece(context_id, prompt))  # The prompts take 3, 3 and 6 of 10 blocks.
        engine.run()
        engine.free(context_id)
    answer = engine.fill(piece(4, text))
    engine.run()
    assert answer.response.computed_tokens == computed


def test_a_preempted_job_finds_the_rest_of_its_kv():
    engine = Harness(num_blocks=8, max_seq_len=40)
    slow = engine.generate(piece(1, PROMPT), length=6, priority=1)
    engine.step()
    engine.step()
    engine.generate(piece(2, "zyxwvutsrqp"), length=2, priority=0)
    engine.run()
    assert slow.response.usage.computed_tokens == 21
    assert sum(plan.num_tokens for plan in engine.runner.plans) < 21 + 6 + 21 + 13


def test_kv_of_a_failed_request_is_not_reused():
    engine = Harness(faults={"nan_token": ord("x")}, fill_chunk_size=4)
    failed = engine.generate(piece(1, "abcdefgx"), length=2)
    engine.run()
    assert isinstance(failed.error, ModelNumerics)
    again = engine.fill(piece(2, "abcdefgh"))
    engine.run()
    assert again.response.cached_tokens == 0


def test_nothing_is_shared_without_prefix_caching():
    engine = Harness(scheduler={"prefix_caching": False})
    for context_id in (1, 2):
        answer = engine.fill(piece(context_id, PROMPT))
        engine.run()
        assert answer.response.computed_tokens == 21
    assert engine.num_free == 4


@pytest.mark.parametrize("salt", ["", "tenant", "\ud800"])
def test_a_key_depends_on_all_tokens_up_to_its_block(salt):
    hasher = BlockHasher(2, secret=b"s")
    keys: list[bytes] = []
    hasher.extend(keys, hasher.root(salt), array("i", [1, 2, 3, 4, 5]), 2)
    longer: list[bytes] = keys[:1]
    hasher.extend(longer, hasher.root(salt), array("i", [1, 2, 3, 4, 5]), 2)
    assert longer == keys
    other: list[bytes] = []
    hasher.extend(other, hasher.root(salt), array("i", [0, 2, 3, 4]), 2)
    assert len({*keys, *other}) == 4
    assert hasher.root("x") != hasher.root(salt)


def test_kv_that_was_computed_twice_is_kept_once():
    """Otherwise a context could have a block of its own before shared blocks. Two waiting contexts
    of this kind could not free their blocks."""
    engine = Harness(block_size=1, fill_chunk_size=1)
    for context_id in (1, 2):
        engine.fill(piece(context_id, "abcd"))
    engine.run()
    assert engine.runner.plans[0].num_tokens == 2
    assert engine.context(1).block_ids == engine.context(2).block_ids
    assert engine.num_free == 12


def test_an_overwritten_block_is_not_found_by_its_old_key():
    """A fork inside a full block becomes the block's only holder and writes to it."""
    engine = Harness()
    engine.fill(piece(1, PROMPT[:12]))
    engine.run()
    engine.fill(piece(2, "XY", 1, 10))
    engine.free(1)
    engine.run()
    third = engine.fill(piece(3, PROMPT[:12] + "z"))
    engine.run()
    assert third.response.cached_tokens == 8


def test_reuse_ends_at_the_first_missing_block():
    """While the last token of a cached prompt is computed again, its last block has no key. A later
    block still has one."""
    engine = Harness()
    first = engine.generate(piece(1, PROMPT), length=3)
    engine.run()
    engine.free(1)
    short = engine.generate(piece(2, PROMPT[:16]), length=3)
    whole = engine.generate(piece(3, PROMPT), length=3)
    engine.run()
    assert usage(short) == (16, 0)
    assert whole.text == first.text


def test_kv_that_is_evicted_and_found_again_before_a_prompt_begins_counts_once():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    engine.generate(piece(9, "z"), length=4)
    engine.step()
    answer = engine.fill(piece(2, "abcdefghijklm"))
    for _ in range(2):
        engine.step()
        # The KV is found, but the step has no slot for the job.
        assert engine.context(2).num_computed == 12
        drop_kv(engine.core._tree, [engine.context(2), engine.context(1)], 16)
    engine.run()
    assert answer.response.filled_len == 13
    assert answer.response.cached_tokens + answer.response.computed_tokens == 13
    assert answer.response.computed_tokens in (1, 13)


def test_a_copied_block_is_replaced_by_the_published_one():
    engine = Harness()
    for context_id in (1, 2):  # The second request copies the last block that it finds.
        engine.generate(piece(context_id, "abcdefgh"), length=6)
        engine.run()
    assert engine.context(2).block_ids[:3] == engine.context(1).block_ids[:3]


def test_cached_kv_survives_a_hundred_registrations_and_is_found_by_its_salt_only():
    """Each registration finds the KV of the previous one, and leaks nothing."""
    engine = Harness(num_blocks=32)
    for turn in range(100):
        salt = "us" if turn % 3 else "them"
        nine = SamplingConfig(max_gen_length=9)
        answer = engine.submit(piece(7, PROMPT), sampling=nine, cache_salt=salt)
        fork = engine.fill(piece(8, "more of it", 7, 20), cache_salt=salt)
        for _ in range(2 + turn % 9):
            engine.step()
        stranger = engine.fill(piece(9, PROMPT), cache_salt=f"stranger {turn}")
        for _ in range(turn % 4):
            engine.step()
        engine.clock.pass_time(39.0)  # Other groups become inactive; these do not.
        engine.core.requests.reset()
        engine.deliver()
        engine.core.check_integrity()
        assert engine.num_free == 32
        assert not engine.core.has_work
        for one in (answer, fork, stranger):
            assert one.response or one.error
        if answer.response and turn > 1:
            assert usage(answer) == (20, 1)
        if stranger.response:
            assert stranger.response.cached_tokens == 0
