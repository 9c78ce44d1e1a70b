"""Telling engines which contexts they may forget."""

import logging
from typing import Protocol

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import ParrotError
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_FREE_INTERVAL_S = 0.01  # between two requests to one engine; the first goes at once
_MAX_FREE_INTERVAL_S = 5.0  # between two that fail
_MAX_FREED = 65536  # context ids that one request may have


class Engine(Protocol):
    """The facts that are known of one."""

    id: int
    info: EngineInfo
    client: EngineClient
    is_alive: bool


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
