"""Ends that come by themselves: sessions expire, reads run out of time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from parrot.protocol.errors import TimedOut
from parrot.serve.sessions import Session
from parrot.utils.clock import Clock
from parrot.utils.timers import Timer, TimerQueue


class SessionExpiry:
    """Ends each watched session when it has been idle for its life span. Activity moves no timer:
    a timer that comes too early is set again for the time that holds by then."""

    def __init__(
        self,
        timers: TimerQueue,
        clock: Clock,
        life_span_s: float,
        expire: Callable[[Session], None],
    ) -> None:
        self._timers = timers
        self._clock = clock
        self._life_span_s = life_span_s
        self._expire = expire
        self._pending: dict[int, Timer] = {}

    def watch(self, session: Session) -> None:
        when = session.expires_at(self._clock.now(), self._life_span_s)
        self._pending[session.id] = self._timers.call_at(when, lambda: self._check(session))

    def forget(self, session: Session) -> None:
        self._pending.pop(session.id).cancel()

    def remaining_s(self, session: Session) -> float:
        now = self._clock.now()
        return session.expires_at(now, self._life_span_s) - now

    def _check(self, session: Session) -> None:
        now = self._clock.now()
        if session.expires_at(now, self._life_span_s) <= now:
            self._expire(session)
        else:
            self.watch(session)


@asynccontextmanager
async def time_limit(timers: TimerQueue, deadline: float | None, what: str) -> AsyncIterator[None]:
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
        raise TimedOut(f"{what} timed out") from None
