"""When a registered engine counts as lost."""

import asyncio
from collections.abc import Callable

from parrot.protocol.engine_api import EngineType, RuntimeInfo
from parrot.protocol.errors import ParrotError
from parrot.serve.execution.engines import Engine
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet
from parrot.utils.timers import Timer, TimerQueue


class Liveness:
    """The one rule by which engines are lost. An engine lives as long as

    - its heartbeats are less than `timeout_s` apart;
    - it makes progress: while ServeCore has runs on it, its count of steps changes within
      `timeout_s` (the heartbeats of a process with a stuck device go on);
    - it answers a ping after a connection to it broke.

    `on_lost` is called once with the first of these that does not hold."""

    def __init__(
        self,
        timeout_s: float,
        clock: Clock,
        timers: TimerQueue,
        has_runs: Callable[[Engine], bool],
        on_lost: Callable[[Engine, str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._timers = timers
        self._has_runs = has_runs
        self._on_lost = on_lost
        self._watches: dict[Engine, Timer] = {}
        self._pings: dict[Engine, asyncio.Task[bool]] = {}
        self._tasks = TaskSet()

    def watch(self, engine: Engine) -> None:
        when = min(engine.last_seen, engine.last_progress) + self._timeout_s
        self._watches[engine] = self._timers.call_at(when, lambda: self._review(engine))

    def forget(self, engine: Engine) -> None:
        self._watches.pop(engine).cancel()

    def heartbeat(self, engine: Engine, runtime: RuntimeInfo) -> None:
        now, before = self._clock.now(), engine.runtime
        is_stuck = (
            before is not None
            and engine.info.engine_type is not EngineType.OPENAI  # the other server's steps
            and runtime.num_steps is not None
            and runtime.num_steps == before.num_steps
            and self._has_runs(engine)
        )
        if not is_stuck:
            engine.last_progress = now
        engine.last_seen, engine.runtime = now, runtime

    async def answers(self, engine: Engine) -> bool:
        """Ping an engine to which a connection broke, once for all who ask at the same time. If
        there is no answer it is lost by the time that this returns False."""
        if not engine.is_alive:
            return False
        if engine not in self._pings:
            self._pings[engine] = self._tasks.spawn(self._ping(engine), name=f"ping {engine.id}")
        return await asyncio.shield(self._pings[engine])

    async def close(self) -> None:
        await self._tasks.close()

    async def _ping(self, engine: Engine) -> bool:
        try:
            await engine.client.ping()
        except ParrotError as error:
            self._on_lost(engine, f"a connection broke, and a ping was not answered: {error}")
        finally:
            del self._pings[engine]
        return engine.is_alive

    def _review(self, engine: Engine) -> None:
        """Heartbeats only move the deadline away, so the timer is set again when it fires."""
        now = self._clock.now()
        if engine.last_seen + self._timeout_s <= now:  # the same sum as in `watch`
            self._on_lost(engine, f"no heartbeat for {self._timeout_s:g} s")
        elif engine.last_progress + self._timeout_s <= now:
            self._on_lost(engine, f"its work made no progress for {self._timeout_s:g} s")
        else:
            self.watch(engine)
