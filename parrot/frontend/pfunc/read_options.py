"""The options of a read."""

from typing import TypedDict

from parrot.frontend.pfunc.metadata import Criteria, parse_criteria
from parrot.protocol.fields import PerformanceCriteria

Limit = float | None  # seconds


class ReadOptions(TypedDict):
    """Options of a read."""

    criteria: PerformanceCriteria
    timeout_s: Limit
    deadline_s: Limit
    # The reading thread waits for the answer, so ServeCore starts the session's other calls at
    # once. True for synchronous reads (`get`, `gather`, `as_completed`, `first_k`, `any_of`). False
    # for streams and async reads, because other tasks of the program continue. Other threads may
    # still read or submit: a call that was started early takes the criteria of a later read, and
    # calls that are submitted later are delayed as usual.
    blocked: bool


def read_options(
    criteria: Criteria, timeout: Limit, deadline: Limit, *, blocked: bool = False
) -> ReadOptions:
    """Raises `ValueError` with the allowed criteria for an unknown value."""
    return {
        "criteria": parse_criteria(criteria),
        "timeout_s": timeout,
        "deadline_s": deadline,
        "blocked": blocked,
    }
