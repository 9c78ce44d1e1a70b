"""Reading many variables: all of them, each as soon as it is ready, or only the first."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from parrot.frontend.pfunc.semantic_variable import ReadOptions, SemanticVariable, read_options
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import InvalidRequest, ParrotError, TimedOut

if TYPE_CHECKING:
    from parrot.frontend.pfunc.session import Producer, Session

_LATENCY = PerformanceCriteria.LATENCY
_THROUGHPUT = PerformanceCriteria.THROUGHPUT

Progress = Callable[[int, int], None]
Completed = tuple[SemanticVariable, ParrotError | None]


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
    options = read_options(criteria, timeout, deadline)
    reading = session.read_first(pending, k - len(ready), options)
    return ready + session.run(reading)


async def afirst_k(
    variables: Sequence[SemanticVariable],
    k: int,
    criteria: PerformanceCriteria | str = _LATENCY,
    timeout: float | None = None,
    deadline: float | None = None,
) -> list[SemanticVariable]:
    """The same as `first_k` for async code. Cancelling withdraws the read."""
    session, pending, ready = _prepare(variables, k)
    if session is None:
        return ready
    options = read_options(criteria, timeout, deadline)
    reading = session.read_first(pending, k - len(ready), options)
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


def gather(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _THROUGHPUT,
    timeout: float | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Wait for all of the variables: their values, in order. When one fails, its error is raised
    at once, and the other reads are withdrawn.

    `progress(num_done, num_variables)` is called whenever one more is there, from the thread that
    waits. `timeout` and `deadline` are those of `SemanticVariable.get`, for each of them."""
    distinct = list(dict.fromkeys(variables))
    for num_done, (_, error) in enumerate(
        _completed(distinct, read_options(criteria, timeout, deadline)), 1
    ):
        if error is not None:
            raise error
        if progress is not None:
            progress(num_done, len(distinct))
    return [var.get() for var in variables]


async def agather(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _THROUGHPUT,
    timeout: float | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """The same as `gather` for async code. Cancelling withdraws the reads."""
    distinct = list(dict.fromkeys(variables))
    num_done = 0
    async with aclosing(
        _acompleted(distinct, read_options(criteria, timeout, deadline))
    ) as completed:
        async for _, error in completed:
            if error is not None:
                raise error
            num_done += 1
            if progress is not None:
                progress(num_done, len(distinct))
    return [var.get() for var in variables]


def as_completed(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _THROUGHPUT,
    timeout: float | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> Iterator[SemanticVariable]:
    """Each of the variables as soon as it is ready or failed: its `get` gives the value or raises
    the error. All are wanted from the first step of the loop on; leaving it early withdraws the
    reads of the others. Raises `TimedOut` when `timeout` has passed, and `ValueError` if a variable
    is given twice. `progress` is that of `gather`, and counts failed ones too."""
    completed = _completed(_distinct(variables), read_options(criteria, timeout, deadline))
    for num_done, (var, error) in enumerate(completed, start=1):
        if isinstance(error, TimedOut):
            raise error
        if progress is not None:
            progress(num_done, len(variables))
        yield var


async def aas_completed(
    variables: Sequence[SemanticVariable],
    criteria: PerformanceCriteria | str = _THROUGHPUT,
    timeout: float | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[SemanticVariable]:
    """The same as `as_completed` for async code. To withdraw the reads at a certain moment, close
    the iterator."""
    num_done = 0
    completed = _acompleted(_distinct(variables), read_options(criteria, timeout, deadline))
    async with aclosing(completed):
        async for var, error in completed:
            if isinstance(error, TimedOut):
                raise error
            num_done += 1
            if progress is not None:
                progress(num_done, len(variables))
            yield var


def _completed(variables: Sequence[SemanticVariable], options: ReadOptions) -> Iterator[Completed]:
    """Yield each variable with its error, if it failed; those whose value is known here first."""
    session, pending, ready = _split(variables)
    yield from ((var, None) for var in ready)
    if session is not None:
        yield from session.items(_reader(session, pending, options))


async def _acompleted(
    variables: Sequence[SemanticVariable], options: ReadOptions
) -> AsyncGenerator[Completed]:
    session, pending, ready = _split(variables)
    for var in ready:
        yield var, None
    if session is not None:
        async with aclosing(session.aitems(_reader(session, pending, options))) as items:
            async for item in items:
                yield item


def _reader(
    session: "Session", variables: Sequence[SemanticVariable], options: ReadOptions
) -> "Producer[Completed]":
    return lambda emit: session.read_each(variables, options, emit)


def _prepare(
    variables: Sequence[SemanticVariable], k: int
) -> "tuple[Session | None, list[SemanticVariable], list[SemanticVariable]]":
    """Split the candidates of a race. The session is None when `k` of them are ready."""
    if not 1 <= k <= len(variables):
        raise ValueError(f"k is {k}, but there are {len(variables)} variables")
    ready = [var for var in _distinct(variables) if var.is_ready][:k]
    if len(ready) == k:
        return None, [], ready
    session, pending, _ = _split(variables)
    return session, pending, ready


def _distinct(variables: Sequence[SemanticVariable]) -> Sequence[SemanticVariable]:
    if len(set(map(id, variables))) < len(variables):
        raise ValueError("a variable is given twice")
    return variables


def _split(
    variables: Sequence[SemanticVariable],
) -> "tuple[Session | None, list[SemanticVariable], list[SemanticVariable]]":
    """The session to ask for the missing ones (None: nothing is missing), the variables whose value
    is not known here, and those whose value is."""
    pending = [var for var in variables if not var.is_ready]
    sessions = {var.live_session() for var in pending}
    if len(sessions) > 1:
        raise InvalidRequest("the variables are of different sessions")
    return sessions.pop() if sessions else None, pending, [v for v in variables if v.is_ready]
