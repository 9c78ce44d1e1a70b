"""Reading many variables: all of them, each as soon as it is ready, or only the first."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from parrot.frontend.pfunc.display.progress import Callback, Progress, reporting
from parrot.frontend.pfunc.metadata import Criteria
from parrot.frontend.pfunc.read_options import Limit, ReadOptions, read_options
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, id_of, read_value
from parrot.protocol.errors import InvalidRequest, ParrotError, TimedOut
from parrot.protocol.fields import PerformanceCriteria

if TYPE_CHECKING:
    from parrot.frontend.pfunc.session import Session

_LATENCY = PerformanceCriteria.LATENCY
_THROUGHPUT = PerformanceCriteria.THROUGHPUT

V = TypeVar("V")
A = TypeVar("A")
B = TypeVar("B")

Outputs = SemanticVariable | tuple[SemanticVariable, ...]  # The outputs of a call.


def first_k(
    variables: Sequence[SemanticVariable[V]],
    k: int,
    criteria: Criteria = _LATENCY,
    timeout: Limit = None,
    deadline: Limit = None,
) -> list[SemanticVariable[V]]:
    """Wait until `k` of the variables are ready. Returns these, in the order in which they became
    ready. The read of the other variables ends: engines stop their calls within one step, unless
    they have another reader.

    Failed variables are skipped. If fewer than `k` variables can become ready, their error is
    raised at once. Raises `ValueError` if `k` is not in 1 ... len(variables), or if a variable is
    given twice. `timeout` and `deadline` work as in `SemanticVariable.get`."""
    session, pending, ready = _race(variables, k)
    if session is None:
        return ready
    options = read_options(criteria, timeout, deadline, blocked=True)
    return ready + session.loop.run(_read_first(session, pending, k - len(ready), options))


async def afirst_k(
    variables: Sequence[SemanticVariable[V]],
    k: int,
    criteria: Criteria = _LATENCY,
    timeout: Limit = None,
    deadline: Limit = None,
) -> list[SemanticVariable[V]]:
    """`first_k` for async code. Cancelling withdraws the read."""
    session, pending, ready = _race(variables, k)
    if session is None:
        return ready
    options = read_options(criteria, timeout, deadline)
    return ready + await session.loop.arun(_read_first(session, pending, k - len(ready), options))


def any_of(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _LATENCY,
    timeout: Limit = None,
    deadline: Limit = None,
) -> SemanticVariable[V]:
    """Wait for the first variable that is ready and return it. Works as `first_k` with `k=1`."""
    return first_k(variables, 1, criteria, timeout, deadline)[0]


async def aany_of(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _LATENCY,
    timeout: Limit = None,
    deadline: Limit = None,
) -> SemanticVariable[V]:
    """`any_of` for async code. Cancelling withdraws the read."""
    return (await afirst_k(variables, 1, criteria, timeout, deadline))[0]


@overload
def gather(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: Literal[False] = False,
) -> list[V]: ...
@overload
def gather(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    *,
    return_exceptions: bool,
) -> list[V | ParrotError]: ...
@overload
def gather(
    variables: Sequence[tuple[SemanticVariable[A], SemanticVariable[B]]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: Literal[False] = False,
) -> list[tuple[A, B]]: ...
@overload
def gather(
    variables: Sequence[tuple[SemanticVariable[A], SemanticVariable[B]]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    *,
    return_exceptions: bool,
) -> list[tuple[A, B] | ParrotError]: ...
@overload
def gather(
    variables: Sequence[Outputs],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: bool = False,
) -> list[Any]: ...
def gather(
    variables: Sequence[Outputs],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Wait for all variables and return their values, in order. For the tuple of a call with
    several outputs, the value is a tuple. The first failure raises its error at once and withdraws
    the other reads. With `return_exceptions`, the list contains errors in place of values.

    `progress`: True, or a label, shows a bar in a terminal or a notebook. A function receives the
    number of finished variables and the number of all variables, in the thread that waits.
    `timeout` and `deadline` work as in `SemanticVariable.get`, for each variable."""
    reads = _gathering(variables, criteria, timeout, deadline, progress, return_exceptions)
    for _ in reads:
        pass
    return reads.values(variables)


@overload
async def agather(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: Literal[False] = False,
) -> list[V]: ...
@overload
async def agather(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    *,
    return_exceptions: bool,
) -> list[V | ParrotError]: ...
@overload
async def agather(
    variables: Sequence[tuple[SemanticVariable[A], SemanticVariable[B]]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: Literal[False] = False,
) -> list[tuple[A, B]]: ...
@overload
async def agather(
    variables: Sequence[tuple[SemanticVariable[A], SemanticVariable[B]]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    *,
    return_exceptions: bool,
) -> list[tuple[A, B] | ParrotError]: ...
@overload
async def agather(
    variables: Sequence[Outputs],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: bool = False,
) -> list[Any]: ...
async def agather(
    variables: Sequence[Outputs],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """`gather` for async code. Cancelling withdraws the reads."""
    reads = _gathering(variables, criteria, timeout, deadline, progress, return_exceptions)
    async with aclosing(aiter(reads)) as completed:
        async for _ in completed:
            pass
    return reads.values(variables)


def as_completed(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
) -> Iterator[SemanticVariable[V]]:
    """Yield each variable when it is ready or has failed. Its `get` returns the value or raises
    the error. The first step of the loop starts all reads. Leaving the loop early withdraws the
    remaining reads. Raises `TimedOut` after `timeout` seconds, and `ValueError` if a variable is
    given twice. `progress` works as in `gather` and counts failed variables too."""
    options = read_options(criteria, timeout, deadline)
    return iter(_Reads(_distinct(variables), options, progress, raised=TimedOut))


def aas_completed(
    variables: Sequence[SemanticVariable[V]],
    criteria: Criteria = _THROUGHPUT,
    timeout: Limit = None,
    deadline: Limit = None,
    progress: Progress = None,
) -> AsyncIterator[SemanticVariable[V]]:
    """`as_completed` for async code. `aclose` on the iterator withdraws the reads at once."""
    options = read_options(criteria, timeout, deadline)
    return aiter(_Reads(_distinct(variables), options, progress, raised=TimedOut))


class _Reads:
    """Concurrent reads of many variables. Yields each variable when it is ready or has failed,
    variables with a known value first. The first error of type `raised` ends the reads and is
    raised. `raised` None: all errors are collected."""

    def __init__(
        self,
        variables: Collection[SemanticVariable],
        options: ReadOptions,
        progress: Progress,
        raised: type[ParrotError] | None,
    ) -> None:
        self._variables = variables
        self._options = options
        self._progress = progress
        self._raised = raised
        self._numbers = count(1)
        self._errors: dict[SemanticVariable, ParrotError] = {}

    def __iter__(self) -> Iterator[SemanticVariable]:
        with reporting(self._progress, len(self._variables)) as report:
            session, pending, ready = _split(self._variables)
            for var in ready:
                yield self._counted(var, None, report)
            if session is not None:
                options: ReadOptions = {**self._options, "blocked": True}
                read = partial(_read_each, session, pending, options)
                for var, error in session.loop.items(read):
                    yield self._counted(var, error, report)

    async def __aiter__(self) -> AsyncGenerator[SemanticVariable]:
        with reporting(self._progress, len(self._variables)) as report:
            session, pending, ready = _split(self._variables)
            for var in ready:
                yield self._counted(var, None, report)
            if session is not None:
                read = partial(_read_each, session, pending, self._options)
                async with aclosing(session.loop.aitems(read)) as completed:
                    async for var, error in completed:
                        yield self._counted(var, error, report)

    def values(self, items: Iterable[Outputs]) -> list[Any]:
        """The values of the items after the reads. Collected errors replace failed values."""
        return list(map(self._outcome, items))

    def _outcome(self, item: Outputs) -> Any:
        try:
            return tuple(map(self._value, item)) if isinstance(item, tuple) else self._value(item)
        except ParrotError as error:
            if self._raised is not None:
                raise
            return error

    def _value(self, var: SemanticVariable) -> Any:
        if var in self._errors:
            raise self._errors[var]
        return var.get()

    def _counted(
        self, var: SemanticVariable, error: ParrotError | None, report: Callback | None
    ) -> SemanticVariable:
        if error is not None:
            if self._raised is not None and isinstance(error, self._raised):
                raise error
            self._errors[var] = error
        if report is not None:
            report(next(self._numbers), len(self._variables))
        return var


def _gathering(
    items: Iterable[Outputs],
    criteria: Criteria,
    timeout: Limit,
    deadline: Limit,
    progress: Progress,
    return_exceptions: bool,
) -> _Reads:
    parts = (item if isinstance(item, tuple) else (item,) for item in items)
    variables = dict.fromkeys(chain.from_iterable(parts))
    options = read_options(criteria, timeout, deadline)
    return _Reads(variables, options, progress, None if return_exceptions else ParrotError)


def _race(
    variables: Sequence[SemanticVariable], k: int
) -> "tuple[Session | None, list[SemanticVariable], list[SemanticVariable]]":
    """As `_split`, but the session is None if `k` variables are already ready."""
    if not 1 <= k <= len(variables):
        raise ValueError(f"k is {k}, but there are {len(variables)} variables")
    ready = [var for var in _distinct(variables) if var.is_ready][:k]
    return (None, [], ready) if len(ready) == k else _split(variables)


def _distinct(variables: Sequence[SemanticVariable]) -> Sequence[SemanticVariable]:
    if len(set(map(id, variables))) < len(variables):
        raise ValueError("a variable is given twice")
    return variables


def _split(
    variables: Collection[SemanticVariable],
) -> "tuple[Session | None, list[SemanticVariable], list[SemanticVariable]]":
    """The session of the unread variables (None: all are read), the unread variables, and the read
    ones."""
    pending = [var for var in variables if not var.is_ready]
    sessions = {var.live_session() for var in pending}
    if len(sessions) > 1:
        raise InvalidRequest("the variables belong to different sessions")
    return sessions.pop() if sessions else None, pending, [v for v in variables if v.is_ready]


# On the session's loop


async def _read_each(
    session: "Session",
    variables: Sequence[SemanticVariable],
    options: ReadOptions,
    emit: Callable[[tuple[SemanticVariable, ParrotError | None]], None],
) -> None:
    """Read all variables concurrently. Emit each with its error or None. Only the last read has
    `blocked`, so that ServeCore first receives the criteria of all reads."""
    import asyncio

    unblocked: ReadOptions = {**options, "blocked": False}

    async def read(var: SemanticVariable) -> None:
        try:
            await read_value(session, var, options if var is variables[-1] else unblocked)
        except ParrotError as error:
            emit((var, error))
        else:
            emit((var, None))

    async with asyncio.TaskGroup() as group:
        for var in variables:
            group.create_task(read(var))


async def _read_first(
    session: "Session", variables: Sequence[SemanticVariable], k: int, options: ReadOptions
) -> list[SemanticVariable]:
    """The first `k` ready variables, in order. All variables must belong to the session."""
    by_id = {await id_of(var): var for var in variables}
    values = await session.read_first(list(by_id), k, options)
    for value in values:
        by_id[value.var_id].settle(value)
    return [by_id[value.var_id] for value in values]
