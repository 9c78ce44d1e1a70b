"""The checker finds each broken promise in histories that are written by hand, and finds nothing in
histories without a broken promise."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.nemesis.checker import check
from tests.nemesis.history import (
    CLOCK_STEP,
    DISK_FULL,
    Account,
    AnsweredCall,
    Cancel,
    Close,
    Disturbance,
    History,
    Life,
    Read,
    Seen,
    SeenCall,
    SetValue,
    Submit,
    digest_of,
)


def life(program: int = 1, tenant: str = "a", **changes: Any) -> Life:
    fields: dict[str, Any] = {"began": 0.0, "ended": 10.0, "limit_s": 60.0}
    fields |= {"kind": "chain", "expected": "two", "result": "two"}
    return Life(**fields | {"program": program, "tenant": tenant} | changes)


def submit(key: str, at: float = 1.0, program: int = 1, **changes: Any) -> Submit:
    fields = {"answered": at + 0.1, "outputs": (f"v-{key}",)} | changes
    return Submit(program=program, key=key, invoked=at, **fields)


def read(var: str, text: str | None = None, at: float = 2.0, **changes: Any) -> Read:
    fields: dict[str, Any] = {"program": 1, "answered": at + 1, "limit_s": 5.0} | changes
    return Read(var=var, text=text, invoked=at, **fields)


def call(
    output: str, started_s: float | None, finished_s: float | None, **changes: Any
) -> SeenCall:
    fields = {"state": "done", "attempts": 1} | changes
    return SeenCall(outputs=(output,), started_s=started_s, finished_s=finished_s, **fields)


def fault(began: float, ended: float, name: str = "kill-engine", **changes: Any) -> Disturbance:
    fields = {"target": "engine-0", "loses_engine": True} | changes
    return Disturbance(fault=name, began=began, ended=ended, **fields)


def chain() -> History:
    """Two calls without a violation. The second call reads the output of the first."""
    return History(
        lives=[life()],
        submits=[submit("one"), submit("two", 1.2, inputs=("v-one",))],
        reads=[read("v-one", "one"), read("v-two", "two", pieces=("t", "wo"))],
        closes=[Close(program=1, invoked=9.0, answered=9.1)],
        seen=[Seen(program=1, calls=(call("v-one", 1.5, 2.0), call("v-two", 2.0, 2.5)))],
        accounts=[Account(server="engine-0", left={"contexts": 0})],
    )


def found(history: History) -> set[str]:
    return {violation.promise for violation in check(history)}


def test_a_history_without_violations() -> None:
    assert check(chain()) == []


def test_a_history_can_be_kept_in_a_file(tmp_path: Path) -> None:
    history = chain()
    history.disturbances.append(fault(1, 2))
    history.cancels.append(Cancel(program=1, var="v-two", invoked=1.0))
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history


def with_reads(*reads: Read) -> History:
    history = chain()
    history.reads += reads
    return history


def with_fault(history: History, *faults: Disturbance) -> History:
    history.disturbances += faults
    return history


def test_c1_another_value() -> None:
    assert "C1" in found(with_reads(read("v-one", "other", 5.0)))


def test_c1_an_error_after_a_value() -> None:
    assert "C1" in found(with_reads(read("v-one", error="engine_failed", at=5.0)))


def test_c1_another_error() -> None:
    history = chain()
    history.reads = [read("v-one", error="engine_failed"), read("v-one", error="cancelled")]
    assert "C1" in found(history)


@pytest.mark.parametrize("error", ["unavailable", "timed_out", "queue_full"])
def test_a_transient_error_of_a_read_does_not_belong_to_the_variable(error: str) -> None:
    assert found(with_reads(read("v-one", error=error, at=0.5))) <= {"C8"}


@pytest.mark.parametrize("error", ["not_found", "session_gone"])
def test_c2_an_acknowledged_call_is_lost(error: str) -> None:
    assert found(with_reads(read("v-one", error=error, at=5.0))) == {"C2"}


def test_an_ended_session_is_not_lost() -> None:
    assert check(with_reads(read("v-one", error="session_gone", at=9.5))) == []


def test_c2_a_repeated_request_is_done_twice() -> None:
    history = chain()
    history.submits.append(submit("one", 1.1, outputs=("v-again",)))
    assert "C2" in found(history)


def test_c2_a_call_is_missing_at_the_end() -> None:
    history = chain()
    history.seen = [Seen(program=1, calls=history.seen[0].calls[:1])]
    assert found(history) == {"C2"}


def test_a_call_that_was_never_acknowledged_may_be_missing() -> None:
    history = chain()
    history.submits.append(submit("three", outputs=(), error="unavailable"))
    assert check(history) == []


def given(text: str, at: float = 0.5, **changes: Any) -> SetValue:
    """Return a record of a program that sets the variable `v-note`."""
    fields: dict[str, Any] = {"program": 1, "answered": at + 0.1} | changes
    return SetValue(var="v-note", digest=digest_of(text), invoked=at, **fields)


def with_note(*values: SetValue, reads: Sequence[Read] = ()) -> History:
    """A history whose first call reads the variable that the program sets."""
    history = with_reads(*reads)
    history.submits[0] = replace(history.submits[0], inputs=("v-note",))
    history.sets += values
    return history


UNANSWERED = given("note", 0.3, error="unavailable")
AGAIN = given("note", error="already_set")


@pytest.mark.parametrize("values", [[given("note")], [UNANSWERED, AGAIN], [AGAIN, UNANSWERED]])
def test_a_set_value_stays(values: list[SetValue], tmp_path: Path) -> None:
    before = [read("v-note", error="timed_out", at=0.1), read("v-note", error="timed_out", at=0.55)]
    after = [read("v-note", "note"), read("v-note", error="session_gone", at=9.5)]
    history = with_note(*values, reads=[*before, *after])
    assert check(history) == []
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history


def violations(promise: str, history: History) -> list[str]:
    return [one.text for one in check(history) if one.promise == promise]


@pytest.mark.parametrize(("values", "answer"), [([given("note")], "200"), ([AGAIN], "already_set")])
def test_c2_a_set_value_is_lost(values: list[SetValue], answer: str) -> None:
    """A program that waits for the lost value hangs."""
    history = with_note(*values, reads=[read("v-note", error="timed_out", at=8.0)])
    history.lives = [life(ended=None)]
    assert found(history) == {"C2", "C4"}
    (text,) = violations("C2", history)
    description = f"program 1 gave v-note (answer: {answer})"
    assert text == f"the value that {description} was lost: a read of it found none"


@pytest.mark.parametrize("error", ["not_found", "session_gone"])
def test_c2_a_variable_is_lost_before_it_is_set(error: str) -> None:
    history = with_note(given("note", error=error))
    assert violations("C2", history) == [f"program 1: v-note was lost: {error}"]


def test_c2_a_set_value_is_set_again() -> None:
    history = with_note(UNANSWERED, AGAIN, given("note", 0.7))
    (text,) = violations("C2", history)
    assert text.endswith("was lost: it could be set again")
    assert check(with_note(UNANSWERED, given("note", 0.7), given("note", 0.65))) == []


def test_an_unacknowledged_value_may_be_lost() -> None:
    assert check(with_note(UNANSWERED, reads=[read("v-note", error="timed_out", at=1.0)])) == []


@pytest.mark.parametrize("values", [[given("note")], [UNANSWERED, AGAIN]])
def test_c1_a_set_value_changes(values: list[SetValue]) -> None:
    history = with_note(*values, reads=[read("v-note", "not")])
    assert found(history) == {"C1"}
    (text,) = violations("C1", history)
    assert text.endswith("was 'not' later")


def test_c1_an_unacknowledged_value_replaces_an_acknowledged_one() -> None:
    early = given("early", 0.2, error="unavailable")
    assert check(with_note(early, AGAIN, reads=[read("v-note", "early")])) == []
    assert found(with_note(early, given("note"), reads=[read("v-note", "early")])) == {"C1"}


def test_c1_a_set_value_becomes_an_error() -> None:
    history = with_note(given("note"), reads=[read("v-note", error="cancelled")])
    (text,) = violations("C1", history)
    assert text.endswith("was an error later: cancelled")


def test_c1_a_variable_is_set_to_two_values() -> None:
    assert "C1" in found(with_note(given("note"), given("other")))


@pytest.mark.parametrize(
    "first",
    [call("v-one", 1.5, 2.2), call("v-one", 1.5, None), call("v-one", 1, 1, state="failed")],
)
def test_c3_a_call_starts_before_its_input_is_ready(first: SeenCall) -> None:
    history = chain()
    history.seen = [Seen(program=1, calls=(first, history.seen[0].calls[1]))]
    assert "C3" in found(history)
    if first.state == "done":
        assert check(with_fault(history, fault(1, 1, CLOCK_STEP, loses_engine=False))) == []


def test_c4_a_read_is_late() -> None:
    late = read("v-one", "one", answered=30.0)
    assert found(with_reads(late)) == {"C4"}
    assert check(with_fault(with_reads(late), fault(2.0, 24.0))) == []


def test_c4_a_read_hangs() -> None:
    assert found(with_reads(read("v-one", answered=None))) == {"C4"}


@pytest.mark.parametrize("ended", [None, 61.0])
def test_c4_a_program_hangs(ended: float | None) -> None:
    history = chain()
    history.lives = [life(ended=ended)]
    assert found(history) == {"C4"}


def test_c4_a_call_never_ends() -> None:
    history = chain()
    first = replace(history.seen[0].calls[0], state="running")
    history.seen = [Seen(program=1, calls=(first,))]
    assert "C4" in found(history)


def failing(fails: bool = True, **second: Any) -> History:
    history = chain()
    history.submits[0] = replace(history.submits[0], fails=fails)
    history.reads = [read("v-one", error="native_function_failed"), read("v-two", **second)]
    history.lives, history.seen = [], []
    return history


def test_a_failure_reaches_dependent_calls() -> None:
    assert check(failing(error="native_function_failed")) == []


def test_c5_a_call_with_a_failed_input_has_a_value() -> None:
    assert found(failing(text="two")) == {"C5"}


def test_c5_a_failure_without_a_reason() -> None:
    assert found(failing(fails=False, error="native_function_failed")) == {"C5"}


def test_c5_a_failure_reaches_an_independent_call() -> None:
    history = failing(error="native_function_failed")
    history.submits[1] = replace(history.submits[1], inputs=())
    assert found(history) == {"C5"}


def test_c5_a_call_that_must_fail_has_a_value() -> None:
    history = chain()
    history.submits[1] = replace(history.submits[1], fails=True)
    assert found(history) == {"C5"}


def test_c5_a_call_that_lost_three_engines_may_fail() -> None:
    history = failing(fails=False, error="engine_failed")
    history.reads[0] = replace(history.reads[0], error="engine_failed")
    faults = [fault(1.5, 1.6), fault(2.0, 2.1)]
    assert found(with_fault(history, *faults)) == {"C5"}
    assert check(with_fault(history, fault(2.5, 2.6))) == []


def test_c5_a_cancelled_call_may_fail() -> None:
    history = failing(fails=False, error="cancelled")
    history.cancels.append(Cancel(program=1, var="v-one", invoked=1.5, answered=1.6))
    assert check(history) == []


@pytest.mark.parametrize(
    ("pieces", "text"), [(("t", "t", "wo"), "two"), (("t", "o"), "two"), (("w",), None)]
)
def test_c6_a_stream_repeats_or_misses_something(pieces: tuple[str, ...], text: str | None) -> None:
    stream = read("v-two", text, pieces=pieces, error="" if text else "unavailable")
    assert found(with_reads(stream)) == {"C6"}


def test_a_stream_may_break_off() -> None:
    assert check(with_reads(read("v-two", pieces=("t", "w"), error="unavailable"))) == []


def test_c6_two_calls_produce_a_variable() -> None:
    history = chain()
    calls = history.seen[0].calls
    history.seen = [Seen(program=1, calls=(*calls, calls[0]))]
    assert found(history) == {"C6"}


@pytest.mark.parametrize("name", [DISK_FULL, "kill-database", "core-database-stall"])
def test_a_cancellation_may_be_forgotten_while_nothing_can_be_written(name: str) -> None:
    history = with_reads(read("v-two", error="cancelled", at=1.5, answered=1.6))
    history.cancels.append(Cancel(program=1, var="v-one", invoked=1.4, answered=1.5))
    assert found(history) == {"C1", "C6"}
    assert check(with_fault(history, fault(1.0, 1.7, name, loses_engine=False))) == []


def test_a_dependent_call_may_succeed_after_a_forgotten_cancellation() -> None:
    history = with_reads(read("v-one", error="cancelled", at=1.5, answered=1.6))
    history.cancels.append(Cancel(program=1, var="v-one", invoked=1.4, answered=1.5))
    assert "C5" in found(history)
    assert check(with_fault(history, fault(1.0, 1.7, DISK_FULL, loses_engine=False))) == []


@pytest.mark.parametrize("changes", [{"result": "three"}, {"error": "internal_error"}])
def test_c6_a_program_has_another_answer(changes: dict[str, str]) -> None:
    history = chain()
    history.lives = [life(**changes)]
    assert found(history) == {"C6"}


@pytest.mark.parametrize(
    "account",
    [
        Account(server="engine-0", left={"contexts": 1}),
        Account(server="serve-core", left={}, broken="2 != 3"),
    ],
)
def test_c7_something_was_not_freed(account: Account) -> None:
    history = chain()
    history.accounts.append(account)
    assert found(history) == {"C7"}


def test_c8_a_tenant_is_rejected_within_its_share() -> None:
    history = chain()
    history.share = 3
    history.submits.append(submit("three", 1.3, outputs=(), error="queue_full"))
    assert check(history) == []
    history.share = 4
    assert found(history) == {"C8"}
    assert check(with_fault(history, fault(0.5, 0.6, DISK_FULL))) == []


def test_c8_ignores_submissions_that_created_no_call() -> None:
    history = chain()
    history.share = 3
    refused = submit("three", 1.3, outputs=(), error="queue_full")
    before = submit("before", 0.5, outputs=())
    history.submits += [refused, before]
    assert check(history) == []
    history.share = 4
    assert found(history) == {"C8"}
    history.submits[-1] = replace(before, error="unavailable")  # the call may exist
    assert check(history) == []


def test_c8_a_tenant_waits_for_another() -> None:
    history = chain()
    history.patience_s = 1.5
    history.reads[0] = read("v-one", "one", answered=6.0)
    assert found(history) == {"C8"}
    assert check(with_fault(history, fault(2.0, 5.0))) == []
    history.disturbances, history.share = [], 1
    assert check(history) == []


def prompted(tenant: str, cached_tokens: int, attempts: int = 1) -> History:
    """Two programs whose prompts have the same prefix."""
    secret = "The password is fish. "
    history = chain()
    history.submits[0] = replace(history.submits[0], prompt=secret + "Say it.")
    history.lives.append(life(2, tenant))
    history.submits.append(submit("guess", 3.0, 2, prompt=secret + "Guess."))
    guess = read("v-guess", "hm", 4.0, program=2, cached_tokens=cached_tokens)
    history.reads.append(guess)
    history.seen.append(Seen(program=2, calls=(call("v-guess", 1, 2, attempts=attempts),)))
    return history


def test_c9_a_call_finds_the_prompt_of_another_tenant() -> None:
    assert found(prompted("b", 20)) == {"C9"}
    assert check(prompted("b", 0)) == []
    assert check(prompted("a", 22)) == []
    assert found(prompted("a", 30)) == {"C9"}


def test_a_call_that_ran_twice_finds_its_own_prompt() -> None:
    assert check(prompted("b", 20, attempts=2)) == []
    assert check(with_fault(prompted("b", 20), fault(3.1, 3.2))) == []
    assert found(with_fault(prompted("b", 20), fault(1.0, 2.0))) == {"C9"}


def on_engine(*times: tuple[float, float], tenant: str = "a", process: int = 1) -> list[Any]:
    fields: dict[str, Any] = {"engine": "engine-0", "process": process, "tenant": tenant}
    return [AnsweredCall(began=began, ended=ended, **fields) for began, ended in times]


def with_calls(*calls: list[AnsweredCall]) -> History:
    history = chain()
    history.tasks_capacity = 2
    history.answered_calls = [call for some in calls for call in some]
    return history


def test_c10_an_engine_had_more_calls_than_its_capacity() -> None:
    two = on_engine((1.0, 2.0), (1.2, 2.0))
    assert check(with_calls(two, on_engine((2.0, 3.0)))) == []
    assert found(with_calls(two, on_engine((1.5, 3.0)))) == {"C10"}
    assert check(with_calls(two, on_engine((1.5, 3.0), process=2))) == [], (
        "a new process has no calls of the old one"
    )
    assert check(with_calls(two, on_engine((1.96, 3.0)))) == [], "two calls may have been cancelled"


def test_c10_an_interactive_call_may_exceed_the_limit_by_its_tenants_share() -> None:
    two = on_engine((1.0, 2.0), (1.2, 2.0))
    assert check(with_calls(two, on_engine((1.5, 3.0), tenant="b"))) == []
    assert found(with_calls(two, on_engine((1.5, 3.0), (1.6, 3.0), tenant="b"))) == {"C10"}
