"""Short fuzzing runs, and all findings of long ones (`python -m tests.fuzz`)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parrot.engine.core.contexts import Context, ContextTree
from tests.fuzz.__main__ import Hunt
from tests.fuzz.drawing import draw_trace
from tests.fuzz.hunting import shrink, try_trace
from tests.fuzz.over_http import try_over_http
from tests.fuzz.stories import try_story
from tests.fuzz.traces import Trace

FOUND = json.loads((Path(__file__).parent / "found.json").read_text())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because steps with few tokens are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_earlier_findings_stay_fixed():
    for finding in FOUND:
        failure = try_trace(Trace.from_json(finding["trace"])).failure
        assert failure is None, f"{finding['what']}:\n{failure}"


def test_requests_get_the_same_answers_as_alone():
    hunt = Hunt()
    for seed in (8, 18, 19, 22, 23, 26):
        hunt.engine(seed)
    assert not hunt.findings
    for tried in ("launched", "accepted", "from_host", "cached", "failed"):
        assert hunt.counts[tried], f"these traces cover nothing {tried}"
    assert hunt.counts["compared"] > hunt.counts["requests"] / 4


async def test_over_http():
    tried = await try_over_http(draw_trace(1))
    assert tried.failure is None, tried.failure
    assert tried.num_compared


def test_stories():
    for seed in (1, 1186):
        assert try_story(seed) is None


def test_a_trace_can_be_stored_as_json():
    for seed in range(20):
        trace = draw_trace(seed)
        assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_a_defect_is_found_and_its_trace_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this bug, forks write to blocks that they share with their parents."""

    def must_copy(tree: ContextTree, context: Context) -> bool:
        return False

    monkeypatch.setattr(ContextTree, "must_copy", must_copy)
    failing = next(t for t in map(draw_trace, range(100)) if try_trace(t).failure)
    short = shrink(failing, lambda trace: try_trace(trace).failure is not None)
    assert try_trace(short).failure is not None
    assert len(short.ops) < min(6, len(failing.ops))
    monkeypatch.undo()
    assert try_trace(short).failure is None
