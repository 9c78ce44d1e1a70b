"""Engines joining, giving signs of life, and being lost."""

import logging
from collections.abc import Callable, Iterator, Sequence

from parrot.protocol.engine_api import EngineInfo, HeartbeatRequest, HeartbeatResponse
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NoEngine, NotFound, ParrotError, QuotaExceeded
from parrot.protocol.http import HttpClient
from parrot.protocol.public import ModelCard, ModelName, ModelsResponse
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.engines import Address, Engine, EngineView, address
from parrot.serve.execution.liveness import Liveness
from parrot.serve.prompts.tokenizers import ModelTokenizer, TokenizerRegistry
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter
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
    """Owns the live engines; the id of one that was lost is never used again. Calls `on_joined` and
    `on_lost` when the set has changed: then everything about a lost engine must be given up."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        timers: TimerQueue,
        connect: Connect,
        scheduler: Scheduler,
        ledger: ContextLedger,
        on_joined: Callable[[Engine], None],
        on_lost: Callable[[Engine], None],
    ) -> None:
        self.liveness = Liveness(
            config.engine_heartbeat_timeout,
            clock,
            timers,
            lambda engine: scheduler.num_placed(engine.id) > 0,
            self.lose,
        )
        self._max_engines = config.max_engines_num
        self._clock = clock
        self._connect = connect
        self._scheduler = scheduler
        self._ledger = ledger
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._tokenizers = TokenizerRegistry()
        self._ids = IdCounter()
        self._engines: dict[int, Engine] = {}
        self._by_address: dict[Address, Engine] = {}
        self._known_models: set[str] = set()  # of lost engines, too
        self._closing = TaskSet()

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self._engines.values()))

    def get(self, engine_id: int) -> Engine | None:
        return self._engines.get(engine_id)

    async def register(self, info: EngineInfo) -> int:
        """Raises `QuotaExceeded`, or what fetching the tokenizer raised: then the engine has not
        joined. The same name and address again replaces the engine, with all that it was doing."""
        self._require_room(info)
        client = self._connect(info)
        try:
            tokenizer = await self._tokenizer(info, client)
            self._require_room(info)
        except BaseException:
            await client.close()
            raise
        if (old := self._by_address.get(address(info))) is not None:
            self.lose(old, "it registered again")
        now = self._clock.now()
        engine = Engine(self._ids.next(), info, client, tokenizer, now, now)
        self._engines[engine.id] = self._by_address[address(info)] = engine
        self._known_models.add(info.model)
        self.liveness.watch(engine)
        self._on_joined(engine)
        logger.info("engine %s joined with id %d: %s", info.engine_name, engine.id, info.model)
        return engine.id

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        engine = self._engines.get(request.engine_id)
        if engine is None or engine.info.engine_name != request.engine_name:
            return HeartbeatResponse(state="unknown")
        self.liveness.heartbeat(engine, request.runtime_info)
        if (costs := request.runtime_info.costs) is not None:
            self._scheduler.set_costs(engine.id, costs)
        return HeartbeatResponse(state="ok")

    def lose(self, engine: Engine, reason: str) -> None:
        """Take the engine for dead from now on. If it is not, its next heartbeat is told so and it
        registers again."""
        if not engine.is_alive:
            return
        logger.warning("engine %s (%d) is lost: %s", engine.info.engine_name, engine.id, reason)
        engine.is_alive = False
        del self._engines[engine.id], self._by_address[address(engine.info)]
        self.liveness.forget(engine)
        self._on_lost(engine)
        self._closing.spawn(engine.client.close(), name=f"close engine {engine.id}")

    async def close(self) -> None:
        await self.liveness.close()
        for engine in self:
            await engine.client.close()
        await self._closing.close()

    # What others may see

    def views(self) -> list[EngineView]:
        now = self._clock.now()
        return [
            EngineView(
                engine.id,
                engine.info,
                engine.runtime,
                self._scheduler.num_placed(engine.id),
                *self._ledger.usage(engine.id),
                now - engine.last_seen,
                self._ledger.log.engine(engine.id),
            )
            for engine in self
        ]

    def models(self) -> ModelsResponse:
        by_name = {engine.info.model: engine.info for engine in self}
        infos = [by_name[name] for name in sorted(by_name)]
        return ModelsResponse(
            data=[ModelCard(id=info.model, max_model_len=info.max_seq_len) for info in infos],
            models=[
                ModelName(model_name=info.model, tokenizer_name=info.tokenizer) for info in infos
            ],
        )

    def unserved(self, models: Sequence[str]) -> ParrotError:
        """Why nothing with one of these models (empty: any) can run. If engines are there, and none
        ever had such a model, it is the request that is wrong."""
        wanted = " or ".join(models) or "any model"
        if self._engines and self._known_models.isdisjoint(models):
            served = ", ".join(sorted({engine.info.model for engine in self}))
            return NotFound(f"unknown model: {wanted}; there is {served}", param="models")
        return NoEngine(f"no live engine serves {wanted}")

    # Inside

    def _require_room(self, info: EngineInfo) -> None:
        """Raise `QuotaExceeded` if `info` would be one engine too many."""
        if address(info) not in self._by_address and len(self._engines) >= self._max_engines:
            raise QuotaExceeded(f"already {self._max_engines} engines are registered")

    async def _tokenizer(self, info: EngineInfo, client: EngineClient) -> ModelTokenizer | None:
        """The engine's tokenizer, fetched if it is a new one; None if its contexts are text."""
        if info.tokenizer_id is None:
            return None
        if (known := self._tokenizers.get(info.model, info.tokenizer_id)) is not None:
            return known
        try:
            payload = await client.tokenizer()
        except ParrotError as error:
            logger.warning("engine %s gave no tokenizer: %s", info.engine_name, error.message)
            raise
        await self._tokenizers.add(info.model, info.tokenizer_id, payload)
        return self._tokenizers.get(info.model, info.tokenizer_id)
