"""Engines joining, giving signs of life, and being lost."""

import logging
from collections.abc import Callable

from parrot.protocol.engine_api import EngineInfo, HeartbeatRequest, HeartbeatResponse
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import ParrotError
from parrot.protocol.http import HttpClient
from parrot.serve.config import CoreConfig
from parrot.serve.execution.engines import Engine, EngineRegistry
from parrot.serve.execution.liveness import Liveness
from parrot.serve.prompts.tokenizers import TokenizerRegistry
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet
from parrot.utils.timers import TimerQueue

logger = logging.getLogger(__name__)

Connect = Callable[[EngineInfo], EngineClient]


def http_connect(cluster_token: str | None) -> Connect:
    """Engines are reached at the address that they register with."""

    def connect(info: EngineInfo) -> EngineClient:
        host = f"[{info.host}]" if ":" in info.host else info.host
        url = f"http://{host}:{info.port}"
        return EngineClient(HttpClient(url, bearer_token=cluster_token))

    return connect


class Fleet:
    """Says by `on_joined` and `on_lost` when the set of live engines has changed; then everything
    about an engine that was lost has to be given up at once."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        timers: TimerQueue,
        tokenizers: TokenizerRegistry,
        connect: Connect,
        has_runs: Callable[[Engine], bool],
        on_joined: Callable[[Engine], None],
        on_lost: Callable[[Engine], None],
    ) -> None:
        self.registry = EngineRegistry(config.max_engines_num, clock)
        self.liveness = Liveness(
            config.engine_heartbeat_timeout, clock, timers, has_runs, self.lose
        )
        self._tokenizers = tokenizers
        self._connect = connect
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._closing = TaskSet()

    async def register(self, info: EngineInfo) -> int:
        """Raises `QuotaExceeded`, or what fetching the tokenizer raised: then the engine has not
        joined. The same name and address again replaces the engine, with all that it was doing."""
        self.registry.require_room(info)
        client = self._connect(info)
        try:
            await self._learn_tokenizer(info, client)
            if (old := self.registry.find(info)) is not None:
                self.lose(old, "it registered again")
            engine = self.registry.add(info, client)
        except BaseException:
            await client.close()
            raise
        self.liveness.watch(engine)
        self._on_joined(engine)
        logger.info("engine %s joined with id %d: %s", info.engine_name, engine.id, info.model)
        return engine.id

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        engine = self.registry.get(request.engine_id)
        if engine is None or engine.info.engine_name != request.engine_name:
            return HeartbeatResponse(state="unknown")
        self.liveness.heartbeat(engine, request.runtime_info)
        return HeartbeatResponse(state="ok")

    def lose(self, engine: Engine, reason: str) -> None:
        """Take the engine for dead from now on. If it is not, its next heartbeat is told so and it
        registers again."""
        if not engine.is_alive:
            return
        logger.warning("engine %s (%d) is lost: %s", engine.info.engine_name, engine.id, reason)
        self.registry.remove(engine)
        self.liveness.forget(engine)
        self._on_lost(engine)
        self._closing.spawn(engine.client.close(), name=f"close engine {engine.id}")

    async def close(self) -> None:
        await self.liveness.close()
        for engine in self.registry:
            await engine.client.close()
        await self._closing.close()

    async def _learn_tokenizer(self, info: EngineInfo, client: EngineClient) -> None:
        if info.tokenizer_id is None or self._tokenizers.get(info.model, info.tokenizer_id):
            return
        try:
            payload = await client.tokenizer()
        except ParrotError as error:
            logger.warning("engine %s gave no tokenizer: %s", info.engine_name, error.message)
            raise
        await self._tokenizers.add(info.model, info.tokenizer_id, payload)
