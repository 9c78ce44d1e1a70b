"""Reading whichever of many variables are ready first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from parrot.frontend.pfunc.metadata import parse_criteria
from parrot.frontend.pfunc.semantic_variable import SemanticVariable
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from parrot.frontend.pfunc.session import Session

_LATENCY = PerformanceCriteria.LATENCY


def first_k(
    variables: Sequence[SemanticVariable],
    k: int,
    criteria: PerformanceCriteria | str = _LATENCY,
    timeout: float | None = None,
    deadline: float | None = None,
) -> list[SemanticVariable]:
    """Wait until `k` of the variables are ready: those, in the order in which they were. The others
    lose this reader, so what nobody else wants of them stops within one engine step.

    A failed variable counts for nothing. When too many have failed for `k` to be left, their error
    is raised at once. `ValueError`: `k` is not in 1 ... len(variables), or a variable is given
    twice. `timeout` and `deadline` are those of `SemanticVariable.get`."""
    session, pending, ready = _prepare(variables, k)
    if session is None:
        return ready
    reading = session.read_first(
        pending, k - len(ready), parse_criteria(criteria), timeout, deadline
    )
    return ready + session.run(reading)


async def afirst_k(
    variables: Sequence[SemanticVariable],
    k: int,
    criteria: PerformanceCriteria | str = _LATENCY,
    timeout: float | None = None,
    deadline: float | None = None,
) -> list[SemanticVariable]:
    """As `first_k`. Cancelling withdraws the read."""
    session, pending, ready = _prepare(variables, k)
    if session is None:
        return ready
    reading = session.read_first(
        pending, k - len(ready), parse_criteria(criteria), timeout, deadline
    )
    return ready + await session.arun(reading)


def any_of(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _LATENCY,
    timeout: float | None = None,
    deadline: float | None = None,
) -> SemanticVariable:
    """The first of the variables to be ready: see `first_k`."""
    return first_k(variables, 1, criteria, timeout, deadline)[0]


async def aany_of(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _LATENCY,
    timeout: float | None = None,
    deadline: float | None = None,
) -> SemanticVariable:
    return (await afirst_k(variables, 1, criteria, timeout, deadline))[0]


def _prepare(
    variables: Sequence[SemanticVariable], k: int
) -> "tuple[Session | None, list[SemanticVariable], list[SemanticVariable]]":
    """The session to ask for the missing ones (None: nothing is missing), the variables whose
    value is not known here, and up to `k` whose value is."""
    if not 1 <= k <= len(variables):
        raise ValueError(f"k is {k}, but there are {len(variables)} variables")
    if len(set(map(id, variables))) < len(variables):
        raise ValueError("a variable is given twice")
    ready = [var for var in variables if var.is_ready][:k]
    if len(ready) == k:
        return None, [], ready
    pending = [var for var in variables if not var.is_ready]
    sessions = {var.live_session() for var in pending}
    if len(sessions) > 1:
        raise InvalidRequest("the variables are of different sessions")
    return sessions.pop(), pending, ready
