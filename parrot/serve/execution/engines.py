"""The live engines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parrot.protocol.engine_api import EngineInfo, RuntimeInfo
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NoEngine, NotFound, ParrotError, QuotaExceeded
from parrot.protocol.public import ModelCard, ModelName, ModelsResponse
from parrot.serve.contexts.kv_log import KvCounts
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter


@dataclass(slots=True, eq=False)
class Engine:
    """A registered engine. `is_alive` is False for ever once it was removed. `last_progress`: the
    last heartbeat by which it had done something, or had nothing to do."""

    id: int
    info: EngineInfo
    client: EngineClient
    last_seen: float
    last_progress: float
    runtime: RuntimeInfo | None = None
    is_alive: bool = True

    @property
    def address(self) -> tuple[str, str, int]:
        return (self.info.engine_name, self.info.host, self.info.port)


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of an engine as shown to others. Tokens are characters for engines whose contexts are
    text; `silent_s`: since its last sign of life."""

    id: int
    info: EngineInfo
    runtime: RuntimeInfo | None
    num_running: int
    num_contexts: int
    num_tokens: int
    silent_s: float
    kv: KvCounts


class EngineRegistry:
    """An engine is live from `add` until `remove`; its id is never used again."""

    def __init__(self, max_engines: int, clock: Clock) -> None:
        self._max_engines = max_engines
        self._clock = clock
        self._ids = IdCounter()
        self._engines: dict[int, Engine] = {}
        self._by_address: dict[tuple[str, str, int], Engine] = {}
        self._known_models: set[str] = set()  # of lost engines, too

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self._engines.values()))

    def get(self, engine_id: int) -> Engine | None:
        return self._engines.get(engine_id)

    def find(self, info: EngineInfo) -> Engine | None:
        """The live engine with this name at this address."""
        return self._by_address.get((info.engine_name, info.host, info.port))

    def require_room(self, info: EngineInfo) -> None:
        """Raise `QuotaExceeded` if `info` would be one engine too many."""
        if self.find(info) is None and len(self._engines) >= self._max_engines:
            raise QuotaExceeded(f"already {self._max_engines} engines are registered")

    def add(self, info: EngineInfo, client: EngineClient) -> Engine:
        """A predecessor at the same address must have been removed. Raises `QuotaExceeded`."""
        self.require_room(info)
        now = self._clock.now()
        engine = Engine(self._ids.next(), info, client, now, now)
        assert engine.address not in self._by_address, engine.address
        self._engines[engine.id] = self._by_address[engine.address] = engine
        self._known_models.add(info.model)
        return engine

    def remove(self, engine: Engine) -> None:
        engine.is_alive = False
        del self._engines[engine.id], self._by_address[engine.address]

    def unserved(self, models: Sequence[str]) -> ParrotError:
        """Why nothing with one of these models (empty: any) can run. If engines are there, and none
        ever had such a model, it is the request that is wrong."""
        wanted = " or ".join(models) or "any model"
        if self._engines and self._known_models.isdisjoint(models):
            served = ", ".join(sorted({engine.info.model for engine in self}))
            return NotFound(f"unknown model: {wanted}; there is {served}", param="models")
        return NoEngine(f"no live engine serves {wanted}")

    def models(self) -> ModelsResponse:
        by_name = {engine.info.model: engine.info for engine in self._engines.values()}
        infos = [by_name[name] for name in sorted(by_name)]
        return ModelsResponse(
            data=[ModelCard(id=info.model, max_model_len=info.max_seq_len) for info in infos],
            models=[
                ModelName(model_name=info.model, tokenizer_name=info.tokenizer) for info in infos
            ],
        )
