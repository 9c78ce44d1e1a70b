"""Find broken promises in a history.

C1  the value or error of a variable never changes
C2  an acknowledged call or value is not lost
C3  a call starts only after all its inputs are ready
C4  every read and every program ends in time
C5  a failure reaches all dependent calls, and no others
C6  exactly one result of each call is published, equal to the result without faults
C7  the resources of a session are freed when it ends
C8  a tenant that stays within its share is neither rejected nor slowed down
C9  a tenant never uses KV that was computed for another tenant
C10 an engine never has more calls than its `tasks_capacity`
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.nemesis import capacity, set_values
from tests.nemesis.history import (
    CLOCK_STEPS,
    GIVEN_UP,
    GONE,
    Disturbance,
    History,
    Life,
    Read,
    SeenCall,
    Submit,
)

SLACK_S = 2.0  # Tolerance of time limits, because the machine may be busy.
_ROUNDING_S = 1e-3
_MAX_LOST = 3  # ServeCore fails a call that has lost 3 engines, as the probable cause.
_SPECIAL_TOKENS = 1  # Tokens that every prompt begins with.


@dataclass(frozen=True, slots=True)
class Violation:
    promise: str
    text: str


def check(history: History) -> list[Violation]:
    facts = _Facts(history)
    return [
        Violation(promise, text) for promise, broken in _PROMISES.items() for text in broken(facts)
    ]


class _Facts:
    """A history, with indexes over its records."""

    def __init__(self, history: History) -> None:
        self.history = history

    @cached_property
    def lives(self) -> dict[int, Life]:
        return {life.program: life for life in self.history.lives}

    @cached_property
    def acknowledged(self) -> list[Submit]:
        return [submit for submit in self.history.submits if submit.outputs]

    @cached_property
    def calls(self) -> list[Submit]:
        """One acknowledged submission of each call."""
        return list({(s.program, s.key): s for s in self.acknowledged}.values())

    @cached_property
    def keys(self) -> set[tuple[int, str]]:
        """The programs and keys of acknowledged calls."""
        return {(submit.program, submit.key) for submit in self.acknowledged}

    @cached_property
    def producer(self) -> dict[str, Submit]:
        return {output: submit for submit in self.acknowledged for output in submit.outputs}

    def is_sampled(self, var: str) -> bool:
        return var in self.producer and self.producer[var].is_sampled

    @cached_property
    def reads(self) -> dict[str, list[Read]]:
        """The reads of each variable in the order of their answers. Unanswered reads come last."""
        found: dict[str, list[Read]] = defaultdict(list)
        for read in sorted(self.history.reads, key=lambda r: _or_never(r.answered)):
            found[read.var].append(read)
        return found

    @cached_property
    def values(self) -> dict[str, str]:
        """The first value that was read of each variable."""
        texts = {}
        for var, reads in self.reads.items():
            for read in reads:
                if read.text is not None:
                    texts.setdefault(var, read.text)
        return texts

    @cached_property
    def errors(self) -> dict[str, str]:
        """The first permanent error of each variable."""
        return {
            var: next(read.error for read in reads if read.is_own_error)
            for var, reads in self.reads.items()
            if any(read.is_own_error for read in reads)
        }

    @cached_property
    def seen(self) -> dict[str, SeenCall]:
        """Calls as the service showed them, by output."""
        return {o: call for seen in self.history.seen for call in seen.calls for o in call.outputs}

    @cached_property
    def cancelled(self) -> set[str]:
        return {cancel.var for cancel in self.history.cancels}

    @cached_property
    def closed_at(self) -> dict[int, float]:
        closes = sorted(self.history.closes, key=lambda c: -c.invoked)
        return {close.program: close.invoked for close in closes}

    def is_closed(self, program: int, when: float | None) -> bool:
        """Whether the program had asked to end its session by then."""
        return self.closed_at.get(program, _or_never(None)) <= _or_never(when)

    def _during(self, began: float, ended: float) -> Iterator[Disturbance]:
        """Yield the faults that overlap a period."""
        for one in self.history.disturbances:
            if one.began <= ended and began <= one.ended + SLACK_S:
                yield one

    def disturbed_s(self, began: float, ended: float) -> float:
        """Return the seconds of a period in which faults may have slowed down the service."""
        return sum(
            max(0.0, min(ended, one.ended) - max(began, one.began)) + SLACK_S
            for one in self._during(began, ended)
        )

    def has_reason(self, submit: Submit) -> bool:
        """Whether the call may fail although its inputs did not."""
        is_asked_for = submit.fails or self.cancelled.intersection(submit.outputs)
        return bool(is_asked_for) or self.may_give_up(submit)

    def may_give_up(self, submit: Submit) -> bool:
        """Whether the call may have lost `_MAX_LOST` engines, so that ServeCore fails it."""
        life = self.lives.get(submit.program)
        end = _or_never(None if life is None else life.ended)
        lost = [one for one in self._during(submit.invoked, end) if one.loses_engine]
        return sum(map(_num_engines, lost)) >= _MAX_LOST


def _num_engines(fault: Disturbance) -> int:
    """Return how many engines a call may lose by the fault: 2 if it kills several engines."""
    return min(2, max(1, fault.target.count("engine-")))


def _or_never(when: float | None) -> float:
    return float("inf") if when is None else when


def _one_value(facts: _Facts) -> Iterator[str]:
    for var, reads in facts.reads.items():
        for text in dict.fromkeys(read.text for read in reads if read.text is not None):
            if text != facts.values[var]:
                yield f"{var} was {facts.values[var]!r}, and then {text!r}"
        own = dict.fromkeys(read.error for read in reads if read.is_own_error)
        if var in facts.values and own and not _may_revive(facts, var):
            yield f"{var} had a value, and an error: {', '.join(own)}"
        if len(own) > 1:
            yield f"{var} failed in several ways: {', '.join(own)}"
    yield from set_values.changed(facts.history)


def _nothing_lost(facts: _Facts) -> Iterator[str]:
    history = facts.history
    for asked in (*history.submits, *history.reads, *history.sets, *history.cancels):
        if asked.error in GONE and not facts.is_closed(asked.program, asked.answered):
            what = asked.var if not isinstance(asked, Submit) else asked.key
            yield f"program {asked.program}: {what} was lost: {asked.error}"
    yield from set_values.lost(history)
    calls = {(call.program, call.key): call for call in facts.calls}
    for submit in facts.acknowledged:
        known = calls[submit.program, submit.key]
        if known.outputs != submit.outputs:
            both = f"{known.outputs} and {submit.outputs}"
            yield f"program {submit.program}: {submit.key} was done twice: {both}"
    for seen in history.seen:
        shown = {output for call in seen.calls for output in call.outputs}
        for submit in facts.calls:
            if submit.program == seen.program and not shown.issuperset(submit.outputs):
                yield f"program {seen.program}: its call {submit.key} no longer exists"


def _inputs_first(facts: _Facts) -> Iterator[str]:
    if any(one.fault in CLOCK_STEPS for one in facts.history.disturbances):
        return  # times in the journal follow the wall clock
    for submit in facts.calls:
        call = facts.seen.get(submit.outputs[0])
        if call is None or call.started_s is None:
            continue
        for var in submit.inputs:
            source = facts.seen.get(var)
            if source is None:
                continue  # a value that the program has set
            if source.state != "done":
                yield f"{submit.key} started, though {var} is {source.state}"
            elif _or_never(source.finished_s) > call.started_s + _ROUNDING_S:
                yield f"{submit.key} started at {call.started_s}, {var} came at {source.finished_s}"


def _all_end(facts: _Facts) -> Iterator[str]:
    for read in facts.history.reads:
        allowed_s = read.limit_s + SLACK_S
        took_s = _or_never(read.answered) - read.invoked
        end = read.answered or read.invoked + allowed_s
        if took_s > allowed_s + facts.disturbed_s(read.invoked, end):
            yield f"a read of {read.var} with {read.limit_s:g} s took {took_s:.1f} s"
    for life in facts.history.lives:
        if life.ended is None or life.ended - life.began > life.limit_s:
            yield f"program {life.program} ({life.kind}) did not end within {life.limit_s:g} s"
    for seen in facts.history.seen:
        for call in seen.calls:
            if call.state in ("running", "queued", "waiting"):
                yield f"program {seen.program} has ended, and {call.outputs} is {call.state}"


def _failures(facts: _Facts) -> Iterator[str]:
    for var, error in facts.errors.items():
        submit = facts.producer.get(var)
        if submit is None:
            yield f"{var} failed ({error}), which nothing makes"
        elif not any(map(facts.has_reason, _ancestors(facts, submit))):
            yield f"{var} ({submit.key}) failed without a reason: {error}"
    for submit in facts.calls:
        ready = [output for output in submit.outputs if output in facts.values]
        if submit.fails and ready:
            yield f"{submit.key} must fail, and made {ready}"
        for var in submit.inputs:
            if ready and var in facts.errors and not _may_revive(facts, var):
                yield f"{submit.key} made {ready}, though its input {var} had failed"


def _ancestors(facts: _Facts, submit: Submit) -> list[Submit]:
    """Return the call and all calls that it depends on."""
    found = [submit]
    for one in found:
        sources = (facts.producer.get(var) for var in one.inputs)
        found += [source for source in sources if source is not None and source not in found]
    return found


def _published_once(facts: _Facts) -> Iterator[str]:
    for read in facts.history.reads:
        if read.pieces is None:
            continue
        got, value = "".join(read.pieces), facts.values.get(read.var)
        if read.text is not None and got != read.text:
            yield f"a stream of {read.var} gave {got!r}, and in the end {read.text!r}"
        elif facts.is_sampled(read.var):
            continue  # the stream broke off, and the call may have run again with another value
        elif value is not None and not value.startswith(got):
            yield f"a stream of {read.var} gave {got!r}, which does not begin {value!r}"
    for seen in facts.history.seen:
        outputs = [output for call in seen.calls for output in call.outputs]
        for output in {one for one in outputs if outputs.count(one) > 1}:
            yield f"program {seen.program}: {output} is made by several calls"
        for call in seen.calls:
            outputs = [o for o in call.outputs if o in facts.errors and not _may_revive(facts, o)]
            missing = outputs if call.state == "done" else []
            if missing:
                yield f"program {seen.program}: {missing} failed, and their call is done"
    yield from _other_answers(facts)


def _may_revive(facts: _Facts, var: str) -> bool:
    """Whether the variable depends on a cancelled call whose cancellation may not have been written
    to the journal. ServeCore forgets it then if it dies."""
    submit = facts.producer.get(var)
    was_lost = facts.history.may_be_unwritten
    sources = [] if submit is None or not was_lost else _ancestors(facts, submit)
    return any(facts.cancelled.intersection(source.outputs) for source in sources)


def _other_answers(facts: _Facts) -> Iterator[str]:
    for life in facts.history.lives:
        program = f"program {life.program} ({life.kind})"
        if life.error:
            own = [submit for submit in facts.history.submits if submit.program == life.program]
            if life.error not in GIVEN_UP or not any(map(facts.may_give_up, own)):
                yield f"{program} ended with an error: {life.error} ({life.result})"
        elif life.ended is not None and life.result != life.expected:
            yield f"{program} ended with {life.result!r}, not {life.expected!r}"


def _all_freed(facts: _Facts) -> Iterator[str]:
    for account in facts.history.accounts:
        for name, count in account.left.items():
            if count:
                yield f"{account.server} still has {count} {name}"
        if account.broken:
            yield f"{account.server}: {account.broken}"


def _fair(facts: _Facts) -> Iterator[str]:
    history = facts.history
    if history.may_be_unwritten:
        return  # finished calls may run again, and the history does not show it
    for asked in (*history.submits, *history.reads):
        life = facts.lives.get(asked.program)
        if life is None:
            continue
        end = _or_never(asked.answered)
        if asked.error in ("queue_full", "cluster_full", "quota_exceeded"):
            num_open = _num_open(facts, life.tenant, asked.invoked, end)
            if num_open < history.share:
                yield (
                    f"{life.tenant} was refused ({asked.error}) with {num_open} of its "
                    f"{history.share} calls"
                )
        elif isinstance(asked, Read) and asked.text is not None:
            took_s = end - asked.invoked
            allowed_s = history.patience_s + facts.disturbed_s(asked.invoked, end)
            if took_s > allowed_s and (
                _num_open(facts, life.tenant, asked.invoked, end) <= history.share
            ):
                yield f"{life.tenant} waited {took_s:.1f} s for {asked.var}, within its share"


def _num_open(facts: _Facts, tenant: str, began: float, ended: float) -> int:
    """Return the greatest number of calls that the tenant may have had in the queue at any moment
    of a period."""
    count = 0
    for submit in facts.history.submits:
        life = facts.lives.get(submit.program)
        if life is None or life.tenant != tenant or submit.invoked > ended:
            continue
        count += _over_at(facts, submit) > began
    return count


def _over_at(facts: _Facts, submit: Submit) -> float:
    """Return the time at which the call was certainly no longer in the queue."""
    if submit.outputs:
        return max(_settled_at(facts, output) for output in submit.outputs)
    is_unknown = submit.error == "unavailable" and (submit.program, submit.key) not in facts.keys
    return _or_never(None if is_unknown else submit.answered)


def _settled_at(facts: _Facts, var: str) -> float:
    """Return the time at which a reader first knew that the variable had a value or an error."""
    reads = facts.reads.get(var, [])
    answers = (_or_never(r.answered) for r in reads if r.text is not None or r.is_own_error)
    return min(answers, default=_or_never(None))


def _nothing_shared(facts: _Facts) -> Iterator[str]:
    """A token has at least one character. So a call may find at most as many cached tokens as the
    longest prefix that its prompt shares with other prompts of its tenant has characters. A call
    that ran twice may find its own prompt. A fault during the call excuses it, because ServeCore
    may have died before it recorded the first attempt."""
    for read in facts.history.reads:
        submit, call = facts.producer.get(read.var), facts.seen.get(read.var)
        if read.cached_tokens is None or submit is None or submit.prompt is None:
            continue
        if call is None or call.attempts > 1 or _is_disturbed(facts.history, submit, read):
            continue
        tenant = facts.lives[submit.program].tenant
        own = (
            other.prompt
            for other in facts.history.submits
            if other.prompt is not None
            and facts.lives[other.program].tenant == tenant
            and (other.program, other.key) != (submit.program, submit.key)
            and other.invoked <= _or_never(read.answered)
        )
        common = max((_common(submit.prompt, one) for one in own), default=0)
        if read.cached_tokens > common + _SPECIAL_TOKENS:
            yield (
                f"{read.var} of {tenant} had {read.cached_tokens} tokens, and its own prompts "
                f"have {common} characters of it"
            )


def _is_disturbed(history: History, submit: Submit, read: Read) -> bool:
    """Whether there was a fault from the submit of the call to the end of the read."""
    end = _or_never(read.answered)
    return any(f.began <= end and submit.invoked <= f.ended for f in history.disturbances)


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


_PROMISES: dict[str, Callable[[_Facts], Iterator[str]]] = {
    "C1": _one_value,
    "C2": _nothing_lost,
    "C3": _inputs_first,
    "C4": _all_end,
    "C5": _failures,
    "C6": _published_once,
    "C7": _all_freed,
    "C8": _fair,
    "C9": _nothing_shared,
    "C10": lambda facts: capacity.exceeded(facts.history),
}
