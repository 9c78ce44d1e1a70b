"""The start of ranks of which one does not come on: it ends, tells which and where, and leaves
nothing."""

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
    """Of an engine whose other rank halts, and is waited for for some seconds."""
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
    """Why it could not be started."""
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
    """Of two ranks, in front of the other's end."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.is_given_up = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.is_given_up.set()


def started(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> tuple[Unit, Link]:
    """A unit whose other rank has said this, and its link."""
    monkeypatch.setattr(unit, "START_PATIENCE", timedelta(seconds=0.2))
    link, other = Link.pair()
    theirs = Link(other)
    for doing in said:
        theirs.send(b'{"doing": "%s"}' % doing.encode())
    return Unit(Alone(), [link], with_tables=True), theirs


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ([], "rank 1 hangs: it has been joining for 0.2 s"),
        (["one"], "rank 1 hangs: it has been one for 0.2 s"),
        (["one", "two"], "rank 1 hangs: it has been two for 0.2 s"),
        (["one", "two", "three"], "rank 0 hangs: it has been two for 0.2 s"),
    ],
)
def test_the_rank_that_has_come_least_far_hangs(
    monkeypatch: pytest.MonkeyPatch, said: list[str], want: str
) -> None:
    own, theirs = started(monkeypatch, said)
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


def test_kernels_that_wait_in_a_start_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_process_ends_whose_rank_cannot_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
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
