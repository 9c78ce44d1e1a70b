"""If one rank stops or exits during the start, the start fails. The error names the rank and its
activity, and no process stays."""

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import DeviceLost
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.ranks import group, processes, unit
from parrot.engine.runner.ranks.group import Link, RankGroup
from parrot.engine.runner.ranks.unit import Unit
from tests.support import forked_modules, stopped_rank
from tests.support.processes import needs_proc
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(120), needs_proc]
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
PATIENCE = timedelta(seconds=5)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinConfig:
    """An engine whose other rank halts during the start. Ranks wait 5 s for each other."""
    monkeypatch.setattr(processes, "_MODULE", stopped_rank.__name__)
    monkeypatch.setattr(processes, "subprocess", forked_modules.instead_of_subprocess())
    monkeypatch.setattr(unit, "START_PATIENCE", PATIENCE)
    monkeypatch.setattr(group, "BACKEND_TIMEOUT", 2 * PATIENCE)
    folder = make_tiny_model(tmp_path / "model", overrides=SIZES)
    instance = {"num_threads": 1, "tensor_parallel": 2}
    return BuiltinConfig.model_validate(
        {"model": str(folder), "dtype": "float32", "device": "cpu", "instance": instance}
    )


def start(config: BuiltinConfig, monkeypatch: pytest.MonkeyPatch, at: str, by: str) -> str:
    """The error of a start in which the other rank halts."""
    monkeypatch.setenv(stopped_rank.HALTS_AT, at)
    monkeypatch.setenv(stopped_rank.HALTS_BY, by)
    with pytest.raises(DeviceLost) as caught:
        load_runner(config)
    assert not forked_modules.running()
    return str(caught.value)


@pytest.mark.parametrize("doing", ["connecting to the other ranks", "measuring free memory"])
def test_a_rank_that_stops_is_named(
    config: BuiltinConfig, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    reason = start(config, monkeypatch, doing, "SIGSTOP")
    assert reason == f"rank 1 hangs: it has been {doing} for 5 s"


def test_a_rank_that_is_killed_is_named(
    config: BuiltinConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = start(config, monkeypatch, "measuring free memory", "SIGKILL")
    assert reason == "rank 1 has ended while it was measuring free memory"


def test_a_rank_that_stops_while_it_loads_is_named(
    config: BuiltinConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOAD_PATIENCE", PATIENCE)
    reason = start(config, monkeypatch, stopped_rank.LOADING, "SIGSTOP")
    want = "rank 1 hangs: it has not loaded its part of the model 5 s after rank 0 had"
    assert reason == want


class Alone(RankGroup):
    """Rank 0 of two ranks. The test plays the other rank."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.is_given_up = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.is_given_up.set()


def started(monkeypatch: pytest.MonkeyPatch, reports: list[str]) -> tuple[Unit, Link]:
    """A unit whose other rank has reported these activities, and the other end of its link."""
    monkeypatch.setattr(unit, "START_PATIENCE", timedelta(seconds=0.2))
    link, other = Link.pair()
    theirs = Link(other)
    for doing in reports:
        theirs.send(b'{"doing": "%s"}' % doing.encode())
    return Unit(Alone(), [link], with_tables=True), theirs


@pytest.mark.parametrize(
    ("reports", "want"),
    [
        ([], "rank 1 hangs: it has been joining for 0.2 s"),
        (["one"], "rank 1 hangs: it has been one for 0.2 s"),
        (["one", "two"], "rank 1 hangs: it has been two for 0.2 s"),
        (["one", "two", "three"], "rank 0 hangs: it has been two for 0.2 s"),
    ],
)
def test_the_rank_with_the_least_progress_is_reported_as_hanging(
    monkeypatch: pytest.MonkeyPatch, reports: list[str], want: str
) -> None:
    own, theirs = started(monkeypatch, reports)
    own.report("one")
    own.report("two")
    assert own.why_lost(60) == want
    with pytest.raises(DeviceLost, match=want):
        own.report("three")
    own.close()
    theirs.close()


def test_ranks_that_have_started_may_wait_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = started(monkeypatch, ["one"])
    own.report("one")
    own.report(None)
    assert own.why_lost(1) is None
    own.close()
    theirs.close()


def test_kernels_that_wait_during_the_start_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from parrot.engine.kernels.ranks.memory import MemoryLayout
    from tests.support.mapped_memory import lonely_exchanges

    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs these on the device")
    own, theirs = started(monkeypatch, ["capturing graphs of 8 rows"])
    exchanges = lonely_exchanges(MemoryLayout(2, 64, 64 * 128), torch.device("cpu"))
    own._group.exchanges = exchanges
    own.report("capturing graphs of 8 rows")
    exchanges.broadcast(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(DeviceLost, match="rank 1 hangs: it has been capturing graphs of 8 rows"):
        own.report("capturing graphs of 4 rows")
    own.close()
    theirs.close()


def test_the_process_exits_if_its_rank_cannot_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    has_ended = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        has_ended.set()

    monkeypatch.setattr(unit, "_EXIT_DEADLINE_S", 0.1)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    own, theirs = started(monkeypatch, [])
    own.report("connecting")
    assert has_ended.wait(60)
    assert statuses == [1]
    own.close()
    theirs.close()
