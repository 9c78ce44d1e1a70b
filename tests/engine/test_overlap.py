"""The engine core launches steps ahead, and its answers are those of one step after the other."""

from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.core import EngineCore
from parrot.engine.plan import DeviceLost, LaunchedStep, StepPlan, StepResult
from parrot.protocol.internal import GenerateResponse
from parrot.testing.checking_runner import LaunchingRunner
from parrot.testing.core_harness import LANGUAGE, Harness, piece


class Overlapping(Harness):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        plain = self.runner
        self.launching = LaunchingRunner(plain.info, self.tokens_of, plain._next_token)
        self.runner = self.launching
        self.core = EngineCore(SimConfig(), self.runner, LANGUAGE, self.clock)


def outputs(harness: Harness) -> list[list[int]]:
    answers = [
        harness.generate(piece(1, "aaa"), length=9),
        harness.generate(piece(2, "bcd"), length=5),
        harness.generate(piece(3, "x"), length=20, stop_str="z"),
    ]
    harness.run()
    assert all(isinstance(a.response, GenerateResponse) for a in answers)
    return [a.response.generated_ids for a in answers]


def test_answers_are_the_same_and_steps_are_launched_ahead():
    overlapping = Overlapping(num_blocks=40)
    assert outputs(overlapping) == outputs(Harness(num_blocks=40))
    assert overlapping.launching.num_ahead >= 7
    assert not overlapping.launching.violations


def test_no_row_is_computed_after_a_foreseeable_end():
    harness = Overlapping(num_blocks=40)
    harness.generate(piece(1, "a"), length=4)
    harness.run()
    assert [s.start for plan in harness.runner.plans for s in plan.sequences] == [0, 1, 2, 3]


def test_a_full_pool_is_worked_through_one_step_after_the_other():
    harness = Overlapping(num_blocks=5)
    answers = [harness.generate(piece(i, "abc"), length=6) for i in range(3)]
    harness.run()
    assert all(len(a.response.generated_ids) == 6 for a in answers)
    assert not harness.launching.violations


def test_an_abort_meets_a_step_on_its_way():
    harness = Overlapping(num_blocks=40)
    first = harness.generate(piece(1, "a"), length=30)
    second = harness.generate(piece(2, "b"), length=6)
    for _ in range(3):
        harness.step()
    harness.core.abort(1)
    harness.free(1)
    third = harness.generate(piece(3, "c"), length=3)
    harness.run()
    assert first.error is not None
    assert bytes(second.response.generated_ids) == b"cdefgh"
    assert bytes(third.response.generated_ids) == b"def"


def test_a_launch_that_fails_is_made_good(monkeypatch: pytest.MonkeyPatch):
    harness = Overlapping(num_blocks=40)
    launch, calls = harness.launching.launch, 0

    def fail_twice(plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        nonlocal calls
        calls += 1
        if calls in (2, 4):
            raise RuntimeError("no room")
        return launch(plan, previous)

    monkeypatch.setattr(harness.launching, "launch", fail_twice)
    answer = harness.generate(piece(1, "a"), length=8)
    harness.run()
    assert bytes(answer.response.generated_ids) == b"bcdefghi"


@pytest.mark.parametrize("number", [1, 3])
def test_a_launched_step_that_fails_is_run_again(monkeypatch: pytest.MonkeyPatch, number: int):
    """And the one that was launched behind it, with tokens that have never been."""
    harness = Overlapping(num_blocks=40)
    short, long = (harness.generate(piece(i, "a"), length=n) for i, n in ((1, 3), (2, 8)))
    run, calls = harness.launching.run_texts, 0

    def fail(plan: StepPlan, texts: list[list[int]]) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError("lost")
        return run(plan, texts)

    monkeypatch.setattr(harness.launching, "run_texts", fail)
    harness.run()
    assert calls > number
    assert bytes(short.response.generated_ids) == b"bcd"
    assert bytes(long.response.generated_ids) == b"bcdefghi"
    assert not harness.launching.violations


def test_a_lost_device_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    harness = Overlapping(num_blocks=40)
    harness.generate(piece(1, "a"), length=8)
    harness.step()
    harness.step()

    def fail(plan: StepPlan, texts: list[list[int]]) -> StepResult:
        raise DeviceLost("gone")

    monkeypatch.setattr(harness.launching, "run_texts", fail)
    with pytest.raises(DeviceLost):
        harness.step()
