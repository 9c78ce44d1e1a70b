"""The options of a read."""

from typing import TypedDict

from parrot.frontend.pfunc.metadata import Criteria, parse_criteria
from parrot.protocol.fields import PerformanceCriteria

Limit = float | None  # seconds


class ReadOptions(TypedDict):
    criteria: PerformanceCriteria
    timeout_s: Limit
    deadline_s: Limit


def read_options(criteria: Criteria, timeout: Limit, deadline: Limit) -> ReadOptions:
    """Raises `ValueError` that lists the criteria."""
    return {"criteria": parse_criteria(criteria), "timeout_s": timeout, "deadline_s": deadline}
