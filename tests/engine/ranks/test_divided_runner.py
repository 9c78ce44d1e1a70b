"""A runner that is divided among ranks gives the same tokens as a runner on one rank."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parrot.engine.core.steps import DeviceLost, PoolSpec, ScoreSpec
from parrot.engine.models.checkpoint import Checkpoint, load_decoder, open_checkpoint
from parrot.engine.models.parallel import Partition
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.runner.ranks.group import Link, RankGroup
from parrot.engine.runner.ranks.steps import StepReader
from parrot.engine.runner.ranks.unit import Unit, _Task
from parrot.protocol.sampling import ResolvedSampling
from tests.support.kernel_cases import SHARE_ALL
from tests.support.rank_threads import PATIENCE, start_rank
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
BLOCKS, SIZE = 128, 4
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "opt": {"num_attention_heads": 4},
}
Outcome = list[Any]


@contextmanager
def divided(checkpoint: Checkpoint, size: int, **options: Any) -> Iterator[ModelRunner]:
    """Rank 0's runner. The other ranks are threads."""
    store = dist.HashStore()
    links = [Link.pair() for _ in range(1, size)]

    def runner(ranks: RankGroup, unit: Unit | None = None) -> ModelRunner:
        model = load_decoder(
            checkpoint, torch.float32, CPU, shard=Partition(checkpoint.spec, ranks)
        )
        return ModelRunner(model, BLOCKS, SIZE, CpuOptions(**options), unit=unit)

    def follow(ranks: RankGroup) -> None:
        own, reader = runner(ranks), StepReader()
        link = Link(links[ranks.rank - 1][1])
        try:
            while True:
                own.compute(reader.step(np.frombuffer(link.receive(), dtype=np.int32)))
        except EOFError:
            link.close()

    def lead(ranks: RankGroup) -> ModelRunner:
        unit = Unit(ranks, [link for link, _ in links], with_tables=True)
        return runner(ranks, unit)

    leading = start_rank(store, 0, size, lead)
    following = [start_rank(store, rank, size, follow) for rank in range(1, size)]
    leader = leading.result(PATIENCE.total_seconds())
    assert leader._unit is not None
    try:
        yield leader
    finally:
        leader._unit.close()
        for one in following:
            one.result(PATIENCE.total_seconds())


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    def make(family: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp(family) / "model"
        return open_checkpoint(str(make_tiny_model(folder, family, overrides=FAMILIES[family])))

    return make


def alone(checkpoint: Checkpoint, **options: Any) -> ModelRunner:
    return ModelRunner(
        load_decoder(checkpoint, torch.float32, CPU), BLOCKS, SIZE, CpuOptions(**options)
    )


def outputs(runner: ModelRunner) -> Outcome:
    """Tokens of prompts in chunks, of forks inside a block and at a block boundary, and of several
    samplings."""
    driver = Driver(runner)
    prompts = [[1, 2, 3], [250, 4], [7] * 21]
    found: Outcome = [driver.generate([driver.context(p) for p in prompts], 5, chunk=5)]
    parent = driver.context([i * 7 % 250 for i in range(22)])
    driver.step([(parent, 22)])
    children = [driver.fork(parent, length) for length in (22, 20, 9)]
    for i, child in enumerate(children):
        child.tokens += [100 + i]
    found.append(driver.generate(children, 4))
    for sampling in (
        ResolvedSampling(temperature=1.3, seed=5),
        ResolvedSampling(temperature=0.9, top_p=0.8, top_k=40),
        ResolvedSampling(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.3),
        ResolvedSampling(temperature=0.0, logit_bias={17: 3.0, 258: -100.0}),
    ):
        found.append(driver.generate([driver.context(p) for p in prompts], 3, sampling=sampling))
    return found


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), ("llama", 4), ("qwen2", 4), ("qwen3", 2), ("opt", 2)]
)
def test_tokens_equal_those_of_one_rank(
    checkpoint_of: Callable[[str], Checkpoint], family: str, size: int
) -> None:
    checkpoint = checkpoint_of(family)
    want = outputs(alone(checkpoint, gate=SHARE_ALL))
    with divided(checkpoint, size, gate=SHARE_ALL) as runner:
        assert outputs(runner) == want


def test_logits_are_gathered_only_for_rows_that_need_more_than_the_largest(
    checkpoint_of: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    all_gather = RankGroup.all_gather

    def gather(ranks: RankGroup, x: torch.Tensor) -> torch.Tensor:
        if ranks.rank == 0:
            widths.append(x.shape[1])
        return all_gather(ranks, x)

    monkeypatch.setattr(RankGroup, "all_gather", gather)
    wanted = [
        ResolvedSampling(temperature=0.0),
        ResolvedSampling(temperature=0.0, logprobs=1),
        ResolvedSampling(temperature=0.0, frequency_penalty=1.0),
        ResolvedSampling(temperature=1.0),
        ResolvedSampling(temperature=1.0, top_k=1),
    ]
    checkpoint = checkpoint_of("llama")
    share = checkpoint.spec.vocab_size // 2 + checkpoint.spec.vocab_size % 2
    with divided(checkpoint, 2) as runner:
        driver = Driver(runner)
        for sampling in wanted:
            driver.generate([driver.context([1, 2, 3])], 1, sampling=sampling)
    assert widths == [2, share, share, share, 2]


def test_log_probabilities_and_states_equal_those_of_one_rank(
    checkpoint_of: Callable[[str], Checkpoint],
) -> None:
    checkpoint = checkpoint_of("llama")
    scored = ResolvedSampling(temperature=0.7, logprobs=5, seed=3)

    def read(runner: ModelRunner) -> Outcome:
        driver = Driver(runner)
        contexts = [driver.context([9, 8, 7, 6, 5, 4]) for _ in range(3)]
        pool, score = PoolSpec(1, 0, 6), ScoreSpec(2, 1, (8, 7, 6), 3)
        result = driver.step([(c, 6) for c in contexts], scored, {1: pool, 2: score})
        likely = result.scores[3]
        unit = result.read[1].unit()  # type: ignore[union-attr]
        assert unit is not None
        logprobs = result.read[2]
        ids = [result.tokens, list(likely.ids), list(logprobs.ids)]  # type: ignore[union-attr]
        values = [*likely.values, *logprobs.values, *np.frombuffer(unit, "<f4")]  # type: ignore[union-attr]
        return [ids, values]

    ids, values = read(alone(checkpoint))
    with divided(checkpoint, 2) as runner:
        found_ids, found_values = read(runner)
    assert found_ids == ids
    np.testing.assert_allclose(found_values, values, rtol=1e-3, atol=1e-4)


def test_quantised_kv_is_divided_too(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    want = outputs(alone(checkpoint, quantised=True))
    with divided(checkpoint, 2, quantised=True) as runner:
        assert outputs(runner) == want
        whole = alone(checkpoint, quantised=True).info
        assert runner.info.cache_mem == whole.cache_mem / 2


def test_a_rank_that_exits_ends_the_unit(
    checkpoint_of: Callable[[str], Checkpoint],
) -> None:
    lost = threading.Event()
    with divided(checkpoint_of("llama"), 2) as runner:
        driver, unit = Driver(runner), runner._unit
        assert unit is not None
        driver.generate([driver.context([1, 2])], 2)
        unit.on_lost(lost.set)
        unit._links[0].end()  # The kernel does this for a process that is killed.
        assert lost.wait(30)
        with pytest.raises(DeviceLost, match="rank 1 has ended"):
            driver.generate([driver.context([1, 2])], 1)


class Hung(RankGroup):
    """A group whose other rank is alive and does nothing until the group is aborted."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.given_up = threading.Event()

    def abort(self) -> None:
        self.given_up.set()


def test_a_rank_that_hangs_ends_the_unit() -> None:
    group, (link, other) = Hung(), Link.pair()
    unit = Unit(group, [link], with_tables=True, patience=timedelta(seconds=0.02))
    with other:
        with pytest.raises(DeviceLost, match="a step has not ended"), unit.together():
            assert group.given_up.wait(60)
        with pytest.raises(DeviceLost), unit.together():
            pytest.fail("a lost unit must run no further step")
    unit.close()


@pytest.mark.parametrize(
    ("has_ended", "reason"),
    [(True, "rank 1 has ended"), (False, "a step failed on rank 0: connection closed")],
)
def test_a_rank_that_has_exited_is_named_even_if_a_collective_fails_first(
    has_ended: bool, reason: str
) -> None:
    link, other = Link.pair()
    unit = Unit(Hung(), [link], with_tables=True)
    with other:
        with pytest.raises(DeviceLost, match=reason), unit.together():
            fail(other if has_ended else None)
        unit.close()


def fail(other: socket.socket | None) -> None:
    if other is not None:
        threading.Timer(0.1, other.shutdown, (socket.SHUT_RDWR,)).start()
    raise RuntimeError("connection closed")


class ChangingTask(Unit):
    """A unit for which a step has just begun at every odd check, and no step runs at every even
    check."""

    checks = 0

    @property  # type: ignore[override]
    def _task(self) -> _Task | None:
        self.checks += 1
        return _Task(time.monotonic(), 60) if self.checks % 2 else None

    @_task.setter
    def _task(self, task: _Task | None) -> None:
        pass


def test_ranks_are_still_watched_after_a_step_ends_during_a_check() -> None:
    lost, (link, other) = threading.Event(), Link.pair()
    unit = ChangingTask(Hung(), [link], with_tables=True, patience=timedelta(seconds=0.01))
    unit.on_lost(lost.set)
    with other:
        while unit.checks < 4:
            time.sleep(0.01)
    assert lost.wait(60), "the unit did not notice that the other rank exited"
    unit.close()


def test_sending_to_a_rank_that_hangs_fails_before_the_communicator_is_aborted() -> None:
    """Aborting the communicator waits for CUDA graphs. The sending thread may own these graphs, so
    it must not wait for the abort."""
    group, (link, other) = Hung(), Link.pair()
    group.abort = lambda: group.given_up.wait(60)  # type: ignore[method-assign,assignment,return-value]
    unit = Unit(group, [link], with_tables=True, patience=timedelta(seconds=0.02))
    with other, pytest.raises(DeviceLost, match="a step has not ended"), unit.together():
        link.send(bytes(1 << 24))  # The message is larger than the socket's buffer.
    assert not group.given_up.is_set()
    group.given_up.set()


def test_a_rank_that_hangs_is_noticed_while_the_next_step_is_awaited() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from parrot.engine.runner.cuda import Launched

    group, (link, other) = Hung(), Link.pair()
    unit = Unit(group, [link], with_tables=True, patience=timedelta(seconds=0.02))
    tokens: Future[torch.Tensor] = Future()
    tokens.set_result(torch.empty(0))
    due, none = Mock(), Mock()
    due.wait.side_effect = lambda: group.given_up.wait(10)
    launched = Launched(none, none, tokens, none, due, CPU, None, unit)
    with other, pytest.raises(DeviceLost, match="a step has not ended"):
        launched.wait_until_due()
    unit.close()
