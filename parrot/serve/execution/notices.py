"""Telling engines which contexts they may forget, and that a lease is awaited, on nobody's path."""

import logging
from typing import Protocol

from parrot.protocol.engine_api import EngineInfo, Lease, LeaseUse
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import ParrotError
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.scheduling.scheduler import Scheduler, take_lease, use_of_lease
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_FREE_INTERVAL_S = 0.01  # between two requests to one engine; the first goes at once
_MAX_FREE_INTERVAL_S = 5.0  # between two that fail
_MAX_FREED = 65536  # context ids that one request may have
_LOOK_S = 0.001  # between two looks at the use of an engine's lease, times the number of engines


class Engine(Protocol):
    """The facts that are known of one."""

    id: int
    info: EngineInfo
    client: EngineClient
    is_alive: bool

    @property
    def units(self) -> int:
        """Units that a token takes in its contexts."""
        ...


class FreeSender:
    """Tells engines which contexts they may forget, in batches and never on anybody's path. At most
    one request per engine is under way; what comes meanwhile goes with the next. Ids are sent until
    the engine has acknowledged them or is lost: one that registers again has forgotten all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks = TaskSet()
        self._pending: dict[Engine, list[int]] = {}

    def send(self, engine: Engine, context_id: int) -> None:
        pending = self._pending.get(engine)
        if pending is not None:
            pending.append(context_id)
        else:
            self._pending[engine] = [context_id]
            self._tasks.spawn(self._run(engine), name=f"frees of engine {engine.id}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, engine: Engine) -> None:
        delay_s = _FREE_INTERVAL_S
        while engine.is_alive and (pending := self._pending[engine]):
            batch = pending[:_MAX_FREED]
            try:
                await engine.client.free_contexts(batch)
            except ParrotError as error:
                if delay_s == _FREE_INTERVAL_S:  # not at each attempt
                    name = engine.info.engine_name
                    logger.warning("engine %s did not free, trying on: %s", name, error.message)
                delay_s = min(2 * delay_s, _MAX_FREE_INTERVAL_S)
            else:
                delay_s = _FREE_INTERVAL_S
                del pending[: len(batch)]
            await self._clock.sleep(delay_s)
        del self._pending[engine]


class Leases:
    """Takes the leases that come with heartbeats, and answers with what is made of them. If that
    changes so that somebody may begin a call by it, the engine is asked for the next heartbeat at
    once: if more is wanted here than there is, or less is used here than others wait for."""

    def __init__(self, clock: Clock, scheduler: Scheduler, ledger: ContextLedger) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._ledger = ledger
        self._told: dict[Engine, LeaseUse] = {}
        self._asked: set[Engine] = set()  # from whom no heartbeat has come since
        self._next_look = 0.0
        self._tasks = TaskSet()

    def take(self, engine: Engine, lease: Lease) -> LeaseUse:
        use = take_lease(self._scheduler, engine.id, lease)
        if use.number == lease.number:
            self._ledger.make_room(engine.id, on_device=lease.tokens * engine.units)
        self._asked.discard(engine)
        self._told[engine] = use = self._with_contexts(engine, use)
        return use

    def forget(self, engine: Engine) -> None:
        self._told.pop(engine, None)
        self._asked.discard(engine)

    def review(self) -> float | None:
        """Ask for heartbeats where that is due. Returns the time to look again, if this was too
        soon."""
        now = self._clock.now()
        if now < self._next_look:
            return self._next_look
        self._next_look = now + _LOOK_S * len(self._told)
        for engine, told in self._told.items():
            if engine not in self._asked and self._is_news(engine, told):
                self._asked.add(engine)
                self._tasks.spawn(self._ask(engine), name=f"ask engine {engine.id} for a heartbeat")
        return None

    async def close(self) -> None:
        await self._tasks.close()

    def _is_news(self, engine: Engine, told: LeaseUse) -> bool:
        load = self._scheduler.engines.get(engine.id)
        assert load is not None, engine
        assert load.lease is not None, engine
        lease, use = load.lease, use_of_lease(self._scheduler, load, load.lease)
        if told.wanted_tokens <= lease.tokens < use.wanted_tokens:
            return True
        if told.wanted_calls <= lease.calls < use.wanted_calls:
            return True
        if not lease.is_wanted:
            return False
        self._ledger.make_room(engine.id)
        use = self._with_contexts(engine, use)
        return (
            use.tokens < told.tokens
            or use.calls < told.calls
            or use.wanted_tokens < min(told.wanted_tokens, lease.tokens)
            or use.wanted_calls < min(told.wanted_calls, lease.calls)
        )

    def _with_contexts(self, engine: Engine, use: LeaseUse) -> LeaseUse:
        """The use, with what contexts take there that are kept."""
        _, used = self._ledger.usage(engine.id)
        held = -(-used // engine.units) - engine.info.host_tokens_capacity
        return use if held <= use.tokens else use.model_copy(update={"tokens": held})

    async def _ask(self, engine: Engine) -> None:
        try:
            await engine.client.beat()
        except ParrotError as error:  # it comes in its own time
            name = engine.info.engine_name
            logger.debug("engine %s sends no heartbeat at once: %s", name, error.message)
