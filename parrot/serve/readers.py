"""Reads: a program waits for variables until they are set, it times out, or it disconnects."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from math import inf
from typing import NamedTuple, Self

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

# Seconds that the work for a read continues after the read has timed out. Otherwise a program that
# polls with short timeouts would restart the work with each read.
READ_GRACE_S = 0.25
# Seconds from a call's submission until it runs in the background, once its program has read a
# variable. A read that arrives earlier sets the call's objective. The calls of a program that is
# blocked in a read start at once, because it sends no other read.
WAKE_DELAY_S = 0.1
_ROUNDING_S = 1e-6  # Seconds. A timer may be early by a rounding error.


class Reads:
    """Waits for variables. Cancelling a read or closing its iterator withdraws the read, and work
    without another reader is cancelled. A read raises `TimedOut` at its timeout, the variable's
    error, or `NoEngine` while no engine can run a needed call; the value may still come then. With
    a journal, a value or an error is on disk before it is returned."""

    def __init__(
        self,
        timers: TimerQueue,
        clock: Clock,
        events: Events,
        why: Callable[[SemanticVariable], str],
    ) -> None:
        """`why` explains why a variable is not ready, for `TimedOut`."""
        self._timers = timers
        self._clock = clock
        self._events = events
        self._why = why
        self._ids = IdCounter()

    def wake_soon(self, session: Session) -> None:
        """Start the calls that the session holds after `WAKE_DELAY_S`, if any variable was read.
        Call it after a read or a submission."""
        is_needed = session.was_read and session.graph.activation.has_background
        if is_needed and not session.is_wake_due:
            session.is_wake_due = True
            when = self._clock.now() + WAKE_DELAY_S
            self._timers.call_at(when, lambda: self._wake(session))

    async def value(
        self,
        session: Session,
        variable: SemanticVariable,
        options: ReadLimits,
        *,
        is_kept: bool = True,
    ) -> str:
        """Wait for the value of a variable. `is_kept`: see `Session.published`."""
        async with session.published(variable, is_kept=is_kept):
            if not self._events.has_sink(ReadBegan, ReadEnded):
                return await self._value(session, variable, options)
            with self._emit_events(session, options, [variable.id]):
                return await self._value(session, variable, options)

    async def _value(
        self, session: Session, variable: SemanticVariable, options: ReadLimits
    ) -> str:
        if variable.is_settled:
            return variable.result()
        with self._open(session, options) as read:
            read.add_reader(variable)
            if options.blocked:
                self._wake_held(session)
            async with time_limit(
                self._timers, read.end, lambda: self._timeout_text(variable, options)
            ):
                return await variable.wait()

    def _timeout_text(self, variable: SemanticVariable, options: ReadLimits) -> str:
        return f"`{variable.name}` was not ready after {options.timeout:g} s: {self._why(variable)}"

    def stream(
        self,
        session: Session,
        variable: SemanticVariable,
        options: ReadLimits,
        *,
        is_kept: bool = True,
        is_patient: bool = False,
    ) -> AsyncGenerator[str]:
        """The value in deltas, starting with the text so far. If `is_patient`, the stream waits for
        an engine without a limit. `is_kept`: see `Session.published`."""
        deltas = self._stream(session, variable, options, is_kept, is_patient)
        if not self._events.has_sink(ReadBegan, ReadEnded):
            return deltas
        return self._stream_with_events(session, variable, options, deltas)

    async def _stream_with_events(
        self,
        session: Session,
        variable: SemanticVariable,
        options: ReadLimits,
        deltas: AsyncGenerator[str],
    ) -> AsyncGenerator[str]:
        with self._emit_events(session, options, [variable.id], is_stream=True):
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta

    async def _stream(
        self,
        session: Session,
        variable: SemanticVariable,
        options: ReadLimits,
        is_kept: bool,
        is_patient: bool,
    ) -> AsyncGenerator[str]:
        async with session.published(variable, is_kept=is_kept):
            if variable.is_settled:
                if text := variable.result():
                    yield text
                return
            sent = 0
            with self._open(session, options) as read:
                read.add_reader(variable, as_stream=True)
                if options.blocked:
                    self._wake_held(session)
                while True:
                    if read.end is None:
                        delta = await variable.text_after(sent, is_patient=is_patient)
                    else:
                        async with time_limit(
                            self._timers, read.end, lambda: self._timeout_text(variable, options)
                        ):
                            delta = await variable.text_after(sent, is_patient=is_patient)
                    if delta is None:
                        return
                    sent += len(delta)
                    yield delta

    async def first(
        self, session: Session, variables: Sequence[SemanticVariable], request: FirstVarsRequest
    ) -> list[SemanticVariable]:
        """The first `request.k` variables to be ready, in that order. Raises as soon as too many
        have failed. When the last of them is ready, this reader leaves the others in the same turn
        of the event loop."""
        async with session.published(*variables):
            if not self._events.has_sink(ReadBegan, ReadEnded):
                return await self._first(session, variables, request)
            with self._emit_events(session, request, request.var_ids, k=request.k):
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
                    self._timers, read.end, lambda: self._race_timeout_text(race, request)
                ):
                    await race.decided
            finally:
                race.close()
        return race.result()

    def _race_timeout_text(self, race: "_Race", options: ReadLimits) -> str:
        late = race.first_open
        return f"{race.progress} after {options.timeout:g} s. `{late.name}`: {self._why(late)}"

    @contextmanager
    def _emit_events(
        self,
        session: Session,
        options: ReadLimits,
        var_ids: Sequence[str],
        *,
        k: int | None = None,
        is_stream: bool = False,
    ) -> Iterator[None]:
        """Emit the events of the read in the block."""
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
        """Start the calls that a blocked program holds, after the producer of the variable. A
        blocked program sends no read that would set another objective."""
        if session.graph.activation.start_background():
            self.wake_soon(session)

    def _wake(self, session: Session) -> None:
        session.is_wake_due = False
        until = self._clock.now() - WAKE_DELAY_S + _ROUNDING_S
        if session.graph.activation.start_background(until):
            self.wake_soon(session)

    def _open(self, session: Session, options: ReadLimits) -> "_Read":
        """The read ends with the block that it opens."""
        read = _Read(session, options, self._timers)
        if read.end is not None:
            session.timed_reads[read] = read.end
        session.read_began()
        self.wake_soon(session)
        return read


class _Read:
    """The readers of one request."""

    def __init__(self, session: Session, options: ReadLimits, timers: TimerQueue) -> None:
        self._session = session
        self._timers = timers
        now = timers.clock.now()
        limits = [s for s in (options.timeout, options.deadline) if s is not None]
        self.end = None if options.timeout is None else now + options.timeout
        """The time of the timeout, on the clock's scale."""
        self._deadline = now + min(limits) if limits else None
        self._criteria = options.criteria
        self._activation = session.graph.activation
        self._readers: list[Reader] = []
        self.candidates: Sequence[SemanticVariable] = ()
        """The variables of a race. When it is decided, the others are not run in background."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        session = self._session
        if kind is None:
            session.was_abandoned = False
        elif issubclass(kind, asyncio.CancelledError | GeneratorExit):
            session.was_abandoned = True
        session.timed_reads.pop(self, None)
        session.last_active = self._timers.clock.now()
        if kind is not None and issubclass(kind, TimedOut):
            self._timers.call_at(session.last_active + READ_GRACE_S, self.withdraw)
        else:
            self.withdraw()

    def add_reader(
        self,
        variable: SemanticVariable,
        *,
        as_stream: bool = False,
        is_racing: bool = False,
        on_refused: Callable[[SemanticVariable, ParrotError], None] | None = None,
    ) -> None:
        reader = Reader(
            variable,
            self._criteria,
            self._deadline,
            as_stream,
            is_racing,
            on_refused=on_refused,
        )
        self._readers.append(reader)
        self._activation.add_reader(reader)

    def withdraw(self) -> None:
        """Withdraw the readers. Safe in any state."""
        readers, self._readers = self._readers, []
        for reader in readers:
            self._activation.remove_reader(reader)
        for variable in self.candidates:
            self._activation.release(variable)


class _Race:
    """Counts ready and failed variables until the race is `decided`, in the turn of the event loop
    in which a variable is settled."""

    def __init__(self, num_needed: int, num_entries: int, read: _Read) -> None:
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_needed = num_needed
        self._has_losers = num_needed < num_entries
        self._num_open = num_entries
        self._read = read
        self._watched: list[SemanticVariable] = []
        self._winners: list[SemanticVariable] = []
        self._refused: set[SemanticVariable] = set()  # No engine can run their calls now.
        self._error: ParrotError | None = None

    def enter(self, variable: SemanticVariable) -> None:
        if variable.is_settled:
            self._on_settled(variable)
        elif not self.decided.done():
            self._watched.append(variable)
            variable.on_settled(self._on_settled)
            self._read.add_reader(variable, is_racing=self._has_losers, on_refused=self._on_refused)

    @property
    def progress(self) -> str:
        return f"{len(self._winners)} of {self._num_needed} variables were ready"

    @property
    def first_open(self) -> SemanticVariable:
        """The first variable that is not settled. It exists until the race is decided."""
        return next(variable for variable in self._watched if not variable.is_settled)

    def close(self) -> None:
        for variable in self._watched:
            variable.forget(self._on_settled)

    def result(self) -> list[SemanticVariable]:
        if self._error is not None:
            raise self._error.again()
        return self._winners

    def _on_refused(self, variable: SemanticVariable, error: ParrotError) -> None:
        if self.decided.done() or variable.is_settled:
            return
        self._refused.add(variable)
        if self._num_open - len(self._refused) + len(self._winners) < self._num_needed:
            self._error = error
            self._decide()

    def _on_settled(self, variable: SemanticVariable) -> None:
        if self.decided.done():
            return
        self._num_open -= 1
        self._refused.discard(variable)
        if variable.error is None:
            self._winners.append(variable)
        elif self._num_open + len(self._winners) < self._num_needed:
            self._error = self._too_few(variable.error)
        if self._error is not None or len(self._winners) == self._num_needed:
            self._decide()

    def _decide(self) -> None:
        self.decided.set_result(None)
        self._read.withdraw()

    def _too_few(self, cause: ParrotError) -> ParrotError:
        """The error of a race that can no longer succeed, of the same type as `cause`."""
        possible = self._num_open + len(self._winners)
        error = type(cause)(
            f"only {possible} of the {self._num_needed} needed variables can become ready, because "
            f"others failed: {cause.message}",
            param=cause.param,
        )
        error.__cause__ = cause
        error.is_final = True
        return error


def _settled_at(variable: SemanticVariable) -> float:
    """The sort key of a race's variables: given values first, then by time, unsettled ones last."""
    if not variable.is_settled:
        return inf
    return 0.0 if variable.producer is None else variable.producer.times.finished or 0.0


@asynccontextmanager
async def time_limit(
    timers: TimerQueue, deadline: float | None, message: Callable[[], str]
) -> AsyncIterator[None]:
    """Raise `TimedOut` if the block still runs at `deadline`, on the timers' clock."""
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


SLICE = 64  # Tokens that are processed before other tasks may run; a few milliseconds.


class ScoredToken(NamedTuple):
    """A token, its log probability, and the most likely tokens at its position."""

    token: bytes
    logprob: float
    likely: Sequence[tuple[bytes, float]]


async def scored_tokens(found: Logprobs, start: int = 0) -> AsyncIterator[ScoredToken]:
    """Yield the tokens from `start` to the current end. Other tasks may run in between."""
    stop = len(found)
    for first in range(start, stop, SLICE):
        if first > start:
            await asyncio.sleep(0)
        for scored in _scored(found, first, min(first + SLICE, stop)):
            yield scored


async def logprobs_view(found: Logprobs) -> list[TokenLogprob] | None:
    """The tokens in the form that programs receive."""
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
    """The value of a ready variable in the form that readers receive."""
    stats = variable.stats
    if stats is None or stats.finish_reason is None:
        return VarGetResponse(content=variable.text)
    return VarGetResponse(
        content=variable.text,
        finish_reason=stats.finish_reason,
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
    """Like `value_view`, with log probabilities if they were requested. Otherwise it does not
    suspend."""
    value, stats = value_view(variable), variable.stats
    if stats is not None and stats.logprobs is not None:
        value.logprobs = await logprobs_view(stats.logprobs)
    return value
