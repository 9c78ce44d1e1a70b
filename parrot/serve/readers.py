"""Reads: a program wants variables, and waits until it has them, gives up or goes away."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from math import inf
from typing import NamedTuple

from parrot.protocol.errors import ParrotError, TimedOut
from parrot.protocol.public import (
    FirstVarsRequest,
    ReadLimits,
    TokenUsage,
    VarGetResponse,
)
from parrot.protocol.sampling import LikelyToken, Logprobs, TokenLogprob
from parrot.serve.events import Events, ReadBegan, ReadEnded
from parrot.serve.graph.nodes import Reader, SemanticVariable
from parrot.serve.sessions import Session
from parrot.utils.clock import Clock
from parrot.utils.heaps import TimerQueue
from parrot.utils.ids import IdCounter

# After a read has timed out, its work goes on for this long: a program that reads again and again
# with short timeouts must not start it from the beginning each time.
READ_GRACE_S = 0.25
# Seconds from a call's submission until it runs in the background, once its program has read
# anything. A read that arrives earlier says how the call is to run. A program that is blocked in a
# read sends no other, so its calls start without this delay.
WAKE_DELAY_S = 0.1
_ROUNDING_S = 1e-6


class Reads:
    """Cancelling a read, or closing its iterator, withdraws it: work without another reader stops.
    Each raises `TimedOut` at its timeout, and the error of what it reads. Where a journal is kept,
    a value or an error is given when it is on disk. `why` says why a variable is not ready."""

    def __init__(
        self,
        timers: TimerQueue,
        clock: Clock,
        events: Events,
        why: Callable[[SemanticVariable], str],
    ) -> None:
        self._timers = timers
        self._clock = clock
        self._events = events
        self._why = why
        self._ids = IdCounter()

    def wake_soon(self, session: Session) -> None:
        """The session was read, or a call was submitted: wake in time what its program holds, if
        anything was read."""
        if session.was_read and not session.is_wake_due:
            session.is_wake_due = True
            when = self._clock.now() + WAKE_DELAY_S
            self._timers.call_at(when, lambda: self._wake(session))

    async def value(self, session: Session, variable: SemanticVariable, options: ReadLimits) -> str:
        async with session.published():
            if not self._events.wants(ReadBegan, ReadEnded):
                return await self._value(session, variable, options)
            with self._told(session, options, [variable.id]):
                return await self._value(session, variable, options)

    async def _value(
        self, session: Session, variable: SemanticVariable, options: ReadLimits
    ) -> str:
        if variable.is_settled:
            return variable.result()
        with self._open(session, options) as read:
            read.want(variable)
            if options.blocked:
                self._wake_held(session)
            async with time_limit(self._timers, read.end, lambda: self._late(variable, options)):
                return await variable.wait()

    def _late(self, variable: SemanticVariable, options: ReadLimits) -> str:
        return f"`{variable.name}` was not ready after {options.timeout:g} s: {self._why(variable)}"

    def stream(
        self, session: Session, variable: SemanticVariable, options: ReadLimits
    ) -> AsyncGenerator[str]:
        """All the text in deltas, the past ones first."""
        deltas = self._stream(session, variable, options)
        if not self._events.wants(ReadBegan, ReadEnded):
            return deltas
        return self._told_stream(session, variable, options, deltas)

    async def _told_stream(
        self,
        session: Session,
        variable: SemanticVariable,
        options: ReadLimits,
        deltas: AsyncGenerator[str],
    ) -> AsyncGenerator[str]:
        with self._told(session, options, [variable.id], is_stream=True):
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta

    async def _stream(
        self, session: Session, variable: SemanticVariable, options: ReadLimits
    ) -> AsyncGenerator[str]:
        async with session.published():
            if variable.is_settled:
                if text := variable.result():
                    yield text
                return
            deltas = variable.stream()
            with self._open(session, options) as read:
                read.want(variable, as_stream=True)
                if options.blocked:
                    self._wake_held(session)
                if read.end is None:
                    async for text in deltas:
                        yield text
                    return
                while True:
                    async with time_limit(
                        self._timers, read.end, lambda: self._late(variable, options)
                    ):
                        delta = await anext(deltas, None)
                    if delta is None:
                        return
                    yield delta

    async def first(
        self, session: Session, variables: Sequence[SemanticVariable], request: FirstVarsRequest
    ) -> list[SemanticVariable]:
        """The first `request.k` of different variables to be ready, in the order in which they
        were. Raises as soon as too many have failed. The others lose this reader the moment that
        the last winner is there, before anything else runs."""
        async with session.published():
            if not self._events.wants(ReadBegan, ReadEnded):
                return await self._first(session, variables, request)
            with self._told(session, request, request.var_ids, k=request.k):
                return await self._first(session, variables, request)

    async def _first(
        self, session: Session, variables: Sequence[SemanticVariable], request: FirstVarsRequest
    ) -> list[SemanticVariable]:
        with self._open(session, request) as read:
            read.candidates = variables
            race = _Race(request.k, len(variables), read)
            try:
                for variable in sorted(variables, key=_settled_at):
                    race.enter(variable)
                if request.blocked:
                    self._wake_held(session)
                async with time_limit(
                    self._timers, read.end, lambda: self._late_race(race, request)
                ):
                    await race.decided
            finally:
                race.close()
        return race.result()

    def _late_race(self, race: "_Race", options: ReadLimits) -> str:
        late = race.first_open
        return f"{race.progress} after {options.timeout:g} s. `{late.name}`: {self._why(late)}"

    @contextmanager
    def _told(
        self,
        session: Session,
        options: ReadLimits,
        var_ids: Sequence[str],
        *,
        k: int | None = None,
        is_stream: bool = False,
    ) -> Iterator[None]:
        """Tell of the beginning and the end of the read that is made in the block."""
        read_id = self._ids.next()
        self._events.emit(ReadBegan, session, read_id, options, var_ids, k, is_stream)
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._events.emit(ReadEnded, session, read_id, failure)

    def _wake_held(self, session: Session) -> None:
        """Start what a blocked program holds, after what it reads: its blocked thread sends no read
        that would say how else to run it."""
        if session.graph.activation.wake():
            self.wake_soon(session)

    def _wake(self, session: Session) -> None:
        session.is_wake_due = False
        if session.graph.activation.wake(until=self._clock.now() - WAKE_DELAY_S + _ROUNDING_S):
            self.wake_soon(session)

    @contextmanager
    def _open(self, session: Session, options: ReadLimits) -> Iterator["_Read"]:
        read = _Read(session, options, self._clock.now())
        if read.end is not None:
            session.timed_reads[read] = read.end
        session.read_began()
        self.wake_soon(session)
        grace_s = 0.0
        try:
            yield read
        except TimedOut:
            grace_s = READ_GRACE_S
            raise
        finally:
            session.timed_reads.pop(read, None)
            session.last_active = self._clock.now()
            if grace_s:
                self._timers.call_at(session.last_active + grace_s, read.leave)
            else:
                read.leave()


class _Read:
    """The wants of one request. `end`: when it times out, on the clock's scale. `candidates` of a
    race: those that were not ready in time are not made in the background either."""

    def __init__(self, session: Session, options: ReadLimits, now: float) -> None:
        limits = [s for s in (options.timeout, options.deadline) if s is not None]
        self.end = None if options.timeout is None else now + options.timeout
        self._deadline = now + min(limits) if limits else None
        self._criteria = options.criteria
        self._activation = session.graph.activation
        self._readers: list[Reader] = []
        self.candidates: Sequence[SemanticVariable] = ()

    def want(
        self, variable: SemanticVariable, *, as_stream: bool = False, may_lose: bool = False
    ) -> None:
        reader = Reader(variable, self._criteria, self._deadline, as_stream, may_lose)
        self._readers.append(reader)
        self._activation.add_reader(reader)

    def leave(self) -> None:
        """Want nothing any more. Safe in any state."""
        readers, self._readers = self._readers, []
        for reader in readers:
            self._activation.remove_reader(reader)
        for variable in self.candidates:
            self._activation.release(variable)


class _Race:
    """Counts who is ready and who has failed until it is `decided`. Both happen inside the turn in
    which a variable is settled."""

    def __init__(self, num_wanted: int, num_entries: int, read: _Read) -> None:
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_wanted = num_wanted
        self._has_losers = num_wanted < num_entries
        self._num_open = num_entries
        self._read = read
        self._watched: list[SemanticVariable] = []
        self._winners: list[SemanticVariable] = []
        self._error: ParrotError | None = None

    def enter(self, variable: SemanticVariable) -> None:
        if variable.is_settled:
            self._on_settled(variable)
        elif not self.decided.done():
            self._watched.append(variable)
            variable.on_settled(self._on_settled)
            self._read.want(variable, may_lose=self._has_losers)

    @property
    def progress(self) -> str:
        return f"{len(self._winners)} of the {self._num_wanted} wanted variables were ready"

    @property
    def first_open(self) -> SemanticVariable:
        """The first variable that is not settled. There is one until the race is decided."""
        return next(variable for variable in self._watched if not variable.is_settled)

    def close(self) -> None:
        for variable in self._watched:
            variable.forget(self._on_settled)

    def result(self) -> list[SemanticVariable]:
        if self._error is not None:
            raise self._error.again()
        return self._winners

    def _on_settled(self, variable: SemanticVariable) -> None:
        if self.decided.done():
            return
        self._num_open -= 1
        if variable.error is None:
            self._winners.append(variable)
        elif self._num_open + len(self._winners) < self._num_wanted:
            self._error = self._too_few(variable.error)
        if self._error is not None or len(self._winners) == self._num_wanted:
            self.decided.set_result(None)
            self._read.leave()

    def _too_few(self, cause: ParrotError) -> ParrotError:
        """The error of a race that cannot be won: of the type of the failure that decided it."""
        possible = self._num_open + len(self._winners)
        error = type(cause)(
            f"only {possible} of the {self._num_wanted} wanted can be ready, since others failed: "
            f"{cause.message}",
            param=cause.param,
        )
        error.__cause__ = cause
        return error


def _settled_at(variable: SemanticVariable) -> float:
    """Given values come first, what has yet to be made comes last."""
    if not variable.is_settled:
        return inf
    return 0.0 if variable.producer is None else variable.producer.times.finished or 0.0


@asynccontextmanager
async def time_limit(
    timers: TimerQueue, deadline: float | None, message: Callable[[], str]
) -> AsyncIterator[None]:
    """Raise `TimedOut` in the block if it still runs at `deadline` on the timers' clock."""
    if deadline is None:
        yield
        return
    loop = asyncio.get_running_loop()
    scope = asyncio.timeout(None)
    try:
        async with scope:
            timer = timers.call_at(deadline, lambda: scope.reschedule(loop.time()))
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimedOut(message()) from None


SLICE = 64  # tokens that are looked at at once, within a few milliseconds


class ScoredToken(NamedTuple):
    """A token, its log probability, and the most likely tokens in its place."""

    token: bytes
    logprob: float
    likely: Sequence[tuple[bytes, float]]


async def scored_tokens(found: Logprobs, start: int = 0) -> AsyncIterator[ScoredToken]:
    """Yield the tokens from `start` on, those that are there now. Now and then others may run."""
    stop = len(found)
    for first in range(start, stop, SLICE):
        if first > start:
            await asyncio.sleep(0)
        for scored in _scored(found, first, min(first + SLICE, stop)):
            yield scored


async def logprobs_view(found: Logprobs) -> list[TokenLogprob] | None:
    """The tokens as programs read them."""
    if found.tokens is None:
        return None
    return [
        TokenLogprob(
            token=scored.token.decode(errors="replace"),
            logprob=scored.logprob,
            bytes=list(scored.token),
            top_logprobs=[
                LikelyToken(
                    token=token.decode(errors="replace"), logprob=logprob, bytes=list(token)
                )
                for token, logprob in scored.likely
            ],
        )
        async for scored in scored_tokens(found)
    ]


def _scored(found: Logprobs, start: int, stop: int) -> Iterator[ScoredToken]:
    width, tokens = found.width, found.tokens
    assert tokens is not None, "the bytes of the tokens are unknown"
    for first in range(start * width, stop * width, width):
        row = [
            (tokens[found.ids[at]], found.values[at])
            for at in range(first, first + width)
            if found.ids[at] >= 0
        ]
        (token, logprob), *likely = row
        yield ScoredToken(token, logprob, likely)


def value_view(variable: SemanticVariable) -> VarGetResponse:
    """The value of a ready variable, as a reader gets it."""
    stats = variable.stats
    if stats is None or stats.finish_reason is None:
        return VarGetResponse(content=variable.text)
    return VarGetResponse(
        content=variable.text,
        finish_reason=stats.finish_reason.value,
        stop_string=stats.stop_string,
        usage=TokenUsage(
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
        ),
    )


async def read_view(variable: SemanticVariable) -> VarGetResponse:
    """The same, and how likely its tokens were, if that is wanted. Else it does not suspend."""
    value, stats = value_view(variable), variable.stats
    if stats is not None and stats.logprobs is not None:
        value.logprobs = await logprobs_view(stats.logprobs)
    return value
