"""The options of a read."""

from typing import TypedDict

from parrot.frontend.pfunc.metadata import Criteria, parse_criteria
from parrot.protocol.fields import PerformanceCriteria

Limit = float | None  # seconds


class ReadOptions(TypedDict):
    """`blocked`: the thread that reads waits until it has the answer, so ServeCore starts the other
    calls of the session at once. It is true for synchronous reads (`get`, `gather`, `as_completed`,
    `first_k`, `any_of`), and false for streams and async reads: other tasks of the program run on.

    Other threads may still read or submit. A call that was started for the blocked thread takes
    over the criteria of a read that comes later, and calls submitted later keep the delay."""

    criteria: PerformanceCriteria
    timeout_s: Limit
    deadline_s: Limit
    blocked: bool


def read_options(
    criteria: Criteria, timeout: Limit, deadline: Limit, *, blocked: bool = False
) -> ReadOptions:
    """Raises `ValueError` that lists the criteria."""
    return {
        "criteria": parse_criteria(criteria),
        "timeout_s": timeout,
        "deadline_s": deadline,
        "blocked": blocked,
    }
