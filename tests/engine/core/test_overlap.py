"""The core launches steps ahead, and its answers equal the answers of sequential steps."""

import asyncio
import inspect
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.steps import DeviceLost, LaunchedStep, StepPlan, StepResult
from parrot.engine.service import ThreadDriver, ask
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.errors import ParrotError
from tests.support.checking_runner import Launched, LaunchingRunner
from tests.support.core_harness import LANGUAGE, Harness, piece


class Overlapping(Harness):
    """A `Harness` that launches steps ahead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = {
            k: v for k, v in options.items() if k not in inspect.signature(Harness).parameters
        }
        plain = self.runner
        self.launching = LaunchingRunner(plain.info, self.tokens_of, plain._next_token)
        self.runner = self.launching
        self.core = EngineCore(SimConfig(**config), self.runner, LANGUAGE, self.clock)

    def parts(self) -> list[list[tuple[int, int, int]]]:
        """The sequences of each step: (context, start, end)."""
        plans = self.runner.plans
        return [[(s.context_id, s.start, s.end) for s in plan.sequences] for plan in plans]


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


def test_no_token_is_computed_after_a_known_end():
    harness = Overlapping(num_blocks=40)
    harness.generate(piece(1, "a"), length=4)
    harness.run()
    assert [s.start for plan in harness.runner.plans for s in plan.sequences] == [0, 1, 2, 3]


def test_chunks_of_prompts_are_launched_ahead():
    harness = Overlapping(num_blocks=40, fill_chunk_size=8)
    answer = harness.generate(piece(1, "a" * 20), length=3)
    harness.run()
    assert harness.parts() == [
        [(1, 0, 8)],
        [(1, 8, 16)],
        [(1, 16, 20)],
        [(1, 20, 21)],
        [(1, 21, 22)],
    ]
    assert (harness.launching.num_ahead, harness.launching.num_fills_ahead) == (4, 2)
    assert answer.text == "bcd"


def test_an_arrival_joins_the_next_step():
    harness = Overlapping(num_blocks=40)
    harness.generate(piece(1, "a"), length=4)
    harness.step()  # The first step is in flight.
    harness.generate(piece(2, "xyz"), length=2)
    harness.run()
    assert harness.parts()[1] == [(1, 1, 2), (2, 0, 3)]


def test_a_fill_is_answered_and_forked_once_it_is_launched():
    harness = Overlapping(num_blocks=40)
    fill = harness.fill(piece(1, "abcdef"))
    fork = harness.generate(piece(2, "g", parent=1), length=2)
    harness.step()
    assert fill.response.filled_len == 6
    assert not harness.runner.plans  # The step is still in flight.
    harness.run()
    assert harness.parts() == [[(1, 0, 6)], [(2, 6, 7)], [(2, 7, 8)]]
    assert fork.text == "hi"


def test_kv_of_a_step_in_flight_is_not_computed_again():
    harness = Overlapping(num_blocks=40)
    first = harness.generate(piece(1, "abcdefgh"), length=3)
    harness.step()
    second = harness.generate(piece(2, "abcdefghx"), length=3)
    harness.run()
    assert harness.parts()[1] == [(1, 8, 9), (2, 8, 9)]
    assert (first.text, second.text) == ("ijk", "yza")


def test_blocks_of_a_step_in_flight_are_reused():
    harness = Overlapping(num_blocks=4)
    harness.generate(piece(1, "abcdefghijklmno"), length=1)
    harness.step()
    assert harness.num_free == 0
    harness.free(1)
    assert harness.num_free == 4
    answer = harness.generate(piece(2, "bcdefghijklmnop"), length=1)
    harness.run()
    assert answer.text == "q"
    assert not harness.launching.violations


def test_a_job_that_awaits_a_token_can_be_preempted():
    harness = Overlapping(num_blocks=4)
    late = harness.generate(piece(1, "abcdef"), length=6, priority=1)
    for _ in range(2):
        harness.step()
    urgent = harness.generate(piece(2, "bcdefghijk"), length=3)
    harness.run()
    assert harness.parts()[2] == [(2, 0, 10)]
    assert (late.text, urgent.text) == ("ghijkl", "lmn")
    assert not harness.launching.violations


def test_a_step_that_cannot_be_launched_is_run_with_known_tokens():
    harness = Overlapping(num_blocks=40)
    harness.launching.refuses = lambda plan: len(plan.sequences) == 2
    answers = [
        harness.generate(piece(1, "a" * 8), length=6),
        harness.generate(piece(2, "b" * 5), length=2, presence_penalty=1.0),
    ]
    harness.run()
    assert [a.text for a in answers] == ["bcdefg", "ce"]
    # The long request is launched ahead when it runs alone.
    assert harness.launching.num_ahead == 3


def test_penalties_are_launched_ahead():
    """The runner receives all tokens except the pending one."""
    harness = Overlapping(num_blocks=40)
    answers = [
        harness.generate(piece(1, "a" * 8), length=6, repetition_penalty=1.5),
        harness.generate(piece(2, "b" * 5), length=4, presence_penalty=1.0),
    ]
    harness.run()
    assert [a.text for a in answers] == ["bdgkpv", "cehl"]
    assert harness.launching.num_ahead == 5
    assert harness.launching.num_penalized_ahead == 5 + 3


OPTIONS = {
    "num_blocks": [36, 60],
    "block_size": [1, 2],
    "fill_chunk_size": [None, 1, 5],
    "scheduler": [{}, {"max_num_batched_tokens": 6}, {"max_batch_size": 2, "mixed_fill_tokens": 3}],
}


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_a_random_load_gets_the_answers_of_sequential_steps(seed: int):
    rng = random.Random(seed)
    options = {name: rng.choice(choices) for name, choices in OPTIONS.items()}
    orders = []
    for number in range(rng.randint(1, 8)):
        parent = rng.choice([-1, 0]) if number else -1
        orders.append(
            {
                "after": rng.randint(0, 4),
                "piece": piece(number, "".join(rng.choices("abc", k=rng.randint(1, 9))), parent),
                "length": rng.randint(1, 7),
                "stop_str": rng.choice([None, None, "ca", "bb"]),
                "priority": rng.randint(0, 2),
                "presence_penalty": rng.choice([0.0, 1.0]),
            }
        )

    def answers(harness: Harness) -> list[str | type[ParrotError]]:
        found = []
        for order in orders:
            rest = dict(order)
            for _ in range(rest.pop("after")):
                harness.step()
            found.append(harness.generate(rest.pop("piece"), **rest))
        harness.run()
        return [a.text if a.response is not None else type(a.error) for a in found]

    def model(context_ids):
        return 97 + hash(tuple(context_ids)) % 3

    launching = Overlapping(model=model, **options)
    share_refused = rng.choice([0.0, 0.0, 0.2])
    launching.launching.refuses = lambda plan: rng.random() < share_refused
    assert answers(launching) == answers(Harness(model=model, **options))
    assert not launching.launching.violations


def test_all_requests_finish_with_a_full_pool():
    harness = Overlapping(num_blocks=5)
    answers = [harness.generate(piece(i, "abc"), length=6) for i in range(3)]
    harness.run()
    assert all(len(a.response.generated_ids) == 6 for a in answers)
    assert not harness.launching.violations


def test_an_abort_during_a_step_in_flight():
    harness = Overlapping(num_blocks=40)
    first = harness.generate(piece(1, "a"), length=30)
    second = harness.generate(piece(2, "b"), length=6)
    for _ in range(3):
        harness.step()
    harness.core.requests.abort(1)
    harness.free(1)
    third = harness.generate(piece(3, "c"), length=3)
    harness.run()
    assert first.error is not None
    assert bytes(second.response.generated_ids) == b"cdefgh"
    assert bytes(third.response.generated_ids) == b"def"


def test_a_failed_launch_is_run_again(monkeypatch: pytest.MonkeyPatch):
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
    """The next step, which was launched without this step's tokens, is run again too."""
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


def test_kv_of_a_failed_step_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """The fill was answered, and its context forked, before the failure was known."""
    harness = Overlapping(num_blocks=40)
    harness.fill(piece(1, "abcdef"))
    harness.run()
    run = harness.launching.run_texts

    def fail(plan: StepPlan, texts: list[list[int]]) -> StepResult:
        monkeypatch.setattr(harness.launching, "run_texts", run)
        raise RuntimeError("lost")

    monkeypatch.setattr(harness.launching, "run_texts", fail)
    fill = harness.fill(piece(2, "ghi", parent=1))  # The fork copies a block.
    harness.step()
    assert fill.response is not None
    fork = harness.generate(piece(3, "j", parent=2, length=9), length=3)
    harness.run()
    assert fork.text == "klm"
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


async def test_a_request_that_arrives_before_a_step_is_due_joins_it(
    monkeypatch: pytest.MonkeyPatch,
):
    harness = Overlapping(num_blocks=40)
    waits, is_due = threading.Event(), threading.Event()

    def wait_until_due(step: Launched) -> None:
        waits.set()
        assert is_due.wait(10)

    monkeypatch.setattr(Launched, "wait_until_due", wait_until_due)
    driver = ThreadDriver(lambda: harness.core)
    await driver.start()
    driver.post(lambda core: harness.generate(piece(1, "a"), length=2))
    await asyncio.to_thread(waits.wait, 10)
    driver.post(lambda core: harness.generate(piece(2, "xyz"), length=1))
    is_due.set()
    while await ask(driver, lambda core: core.has_work):
        pass
    await driver.close()
    assert harness.parts() == [[(1, 0, 1)], [(1, 1, 2), (2, 0, 3)]]
