"""Check in a history that values that programs have set are neither lost nor changed."""

from collections import defaultdict
from collections.abc import Iterator

from tests.nemesis.history import History, Read, SetValue, digest_of


def lost(history: History) -> Iterator[str]:
    """Yield acknowledged values that later reads did not find, or that could be set again."""
    for value, reads, attempts in _acknowledged(history):
        for read in reads:
            if read.error == "timed_out":  # a read of an existing value returns at once
                yield f"the value that {_told(value)} was lost: a read of it found none"
        for again in attempts:
            is_first = again.is_acknowledged and not again.error
            if is_first and again.invoked >= _answered(value):
                yield f"the value that {_told(value)} was lost: it could be set again"


def changed(history: History) -> Iterator[str]:
    """Yield acknowledged values that later reads found changed or replaced by an error."""
    for value, reads, attempts in _acknowledged(history):
        acknowledged = {one.digest for one in attempts if not one.error and one.is_acknowledged}
        given = acknowledged or {one.digest for one in attempts}
        for read in reads:
            if read.text is not None and digest_of(read.text) not in given:
                yield f"the value that {_told(value)} was {read.text!r} later"
            elif read.is_own_error:
                yield f"the value that {_told(value)} was an error later: {read.error}"
        if len(acknowledged) > 1:
            yield f"{value.var} was set to {len(acknowledged)} values"


def _acknowledged(history: History) -> Iterator[tuple[SetValue, list[Read], list[SetValue]]]:
    """Yield the first acknowledgement of each variable's value, all later reads, and all attempts
    to set the variable."""
    attempts: dict[str, list[SetValue]] = defaultdict(list)
    for one in history.sets:
        attempts[one.var].append(one)
    reads: dict[str, list[Read]] = defaultdict(list)
    for read in history.reads:
        reads[read.var].append(read)
    for var, all_of in attempts.items():
        answered = [one for one in all_of if one.is_acknowledged]
        if answered:
            first = min(answered, key=_answered)
            yield first, [r for r in reads[var] if r.invoked >= _answered(first)], all_of


def _answered(value: SetValue) -> float:
    assert value.answered is not None, value
    return value.answered


def _told(value: SetValue) -> str:
    return f"program {value.program} gave {value.var} (answer: {value.error or 200})"
