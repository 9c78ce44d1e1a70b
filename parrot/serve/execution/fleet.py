"""The live engines: registration, heartbeats, leases, and the loss of engines."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from parrot.protocol.engine_api import (
    CHARS_PER_TOKEN,
    EngineInfo,
    EngineType,
    HeartbeatRequest,
    HeartbeatResponse,
    RuntimeInfo,
)
from parrot.protocol.engine_client import CoreIdentity, EngineClient, http_connect
from parrot.protocol.errors import (
    Conflict,
    NoEngine,
    NotFound,
    ParrotError,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.public import ModelCard, ModelName, ModelsResponse
from parrot.serve.command_log import CommandLog, Fields
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.ledger import ContextLedger, KvCounts
from parrot.serve.events import EngineJoined, EngineLost, Events
from parrot.serve.prompts.encode import ModelTokenizer, TokenizerRegistry
from parrot.serve.scheduling.scheduler import Scheduler, queued_by_model
from parrot.utils.clock import Clock
from parrot.utils.heaps import Timer, TimerQueue
from parrot.utils.tasks import TaskSet

# Seconds between two free requests to one engine. Larger values make larger batches.
_FREE_INTERVAL_S = 0.01
_MAX_FREE_INTERVAL_S = 5.0  # Upper limit of this interval after failed requests, which double it.
# Largest number of expected models. Above it, an accepted call may fail with `NotFound` when the
# first engine, of another model, has registered.
_MAX_EXPECTED = 1024
_MAX_FREES_PER_REQUEST = 65536  # Largest number of context ids in one free request.


logger = logging.getLogger(__name__)

# A timer that fires this late, in seconds, shows that the process was stalled. A turn of the event
# loop is shorter.
_STALL_S = 0.5

MODEL = "model"
"""The kind of a journal record that names a model which an engine has served."""

Connect = Callable[[EngineInfo], EngineClient]
Address = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Engine:
    """A registered engine. It is alive until it is lost."""

    id: int
    info: EngineInfo
    client: EngineClient
    tokenizer: ModelTokenizer | None  # None: the engine's contexts are text.
    last_seen: float  # Time of the last heartbeat.
    last_progress: float  # Time of the last heartbeat with new steps, or without work.
    runtime: RuntimeInfo | None = None  # The content of the last heartbeat.
    is_alive: bool = True
    loss: str = ""  # Why the engine was lost, with its name.
    lost_without_crash: bool = False  # The process survived its loss, or announced its exit.
    # Start time of the first attempt that could not reach the engine since its last answered ping.
    unreachable_since: float = math.inf
    lease_check: Timer | None = None
    ping: "asyncio.Task[bool] | None" = None  # The ping in flight.
    # Requests that are not runs. They are cancelled when the engine is lost.
    direct_requests: "set[asyncio.Task[Any]]" = field(default_factory=set)
    max_len: int = field(init=False)  # Largest number of tokens of one sequence.
    uses_drafts: bool = field(init=False)  # Whether the engine uses draft texts from ServeCore.

    def __post_init__(self) -> None:
        self.max_len = min(self.info.max_seq_len, self.info.tokens_capacity)
        is_builtin = self.info.engine_type is EngineType.BUILTIN
        self.uses_drafts = is_builtin and self.tokenizer is not None

    @property
    def units(self) -> int:
        """Units per token: 1, or the usual number of characters for contexts of text."""
        return CHARS_PER_TOKEN if self.tokenizer is None else 1


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of an engine, for the API and the page."""

    id: int
    info: EngineInfo
    runtime: RuntimeInfo | None
    num_running: int
    num_contexts: int
    num_tokens: int  # KV of these contexts, in tokens; in characters for contexts of text.
    silent_s: float  # Seconds since the last heartbeat.
    kv: KvCounts
    is_draining: bool = False
    needed_tokens: int = 0  # Predicted KV of the placed runs, in tokens.
    num_queued: int = 0  # Queued runs that may be placed on the engine's model.


def _address(info: EngineInfo) -> Address:
    """The name and address by which an engine that registers again is recognised."""
    return (info.engine_name, info.host, info.port)


class FreeSender:
    """Sends the ids of freed contexts to engines, in batches and in the background.

    At most one request per engine is in flight. Ids are sent until the engine acknowledges them or
    is lost. An engine that registers again has no contexts left to free."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks = TaskSet()
        self._pending: dict[Engine, list[int]] = {}  # Context ids that are not acknowledged.

    def send(self, engine: "Engine", context_id: int) -> None:
        pending = self._pending.get(engine)
        if pending is not None:
            pending.append(context_id)
        else:
            self._pending[engine] = [context_id]
            self._tasks.spawn(self._run(engine), name=f"frees of engine {engine.id}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, engine: "Engine") -> None:
        delay_s = _FREE_INTERVAL_S
        while engine.is_alive and (pending := self._pending[engine]):
            batch = pending[:_MAX_FREES_PER_REQUEST]
            try:
                await engine.client.free_contexts(batch)
            except ParrotError as error:
                if delay_s == _FREE_INTERVAL_S:  # Log the first failure only.
                    name = engine.info.engine_name
                    logger.warning(
                        "engine %s did not free contexts; retrying: %s",
                        name,
                        error.message,
                    )
                delay_s = min(2 * delay_s, _MAX_FREE_INTERVAL_S)
            else:
                delay_s = _FREE_INTERVAL_S
                del pending[: len(batch)]
            await self._clock.sleep(delay_s)
        del self._pending[engine]


class EngineChange(Enum):
    """A change of an engine. The fleet's set of engines is updated before the owner is notified."""

    JOINED = auto()
    REPORTED = auto()  # The engine has sent a heartbeat.
    LOST = auto()


class Fleet:
    """Owns the live engines. Ids of lost engines are not reused.

    An engine is lost if its lease expires without a heartbeat, if it has work but takes no steps
    for that time, or if it does not answer a ping after a connection broke."""

    def __init__(
        self,
        config: CoreConfig,
        timers: TimerQueue,
        connect: Connect | None,
        scheduler: Scheduler,
        ledger: ContextLedger,
        events: Events,
        on_change: Callable[[Engine, EngineChange], None],
    ) -> None:
        """Raises `ConfigError` for an invalid file of `public_prefixes`."""
        self._max_engines = config.max_engines_num
        self.lease_s = config.engine_heartbeat_timeout
        # Engines accept commands only from the ServeCore with which they registered. The identity
        # may be replaced before the first engine registers.
        self.identity = CoreIdentity.new()
        self._clock = timers.clock
        self._timers = timers
        self._connect = connect or http_connect(config.cluster_token, lambda: self.identity)
        self._scheduler = scheduler
        self._ledger = ledger
        self.events = events
        self._on_change = on_change
        self._tokenizers = TokenizerRegistry(config.public_prefixes)
        self._ids = itertools.count()
        self._joined = asyncio.Event()  # Set and replaced when an engine joins.
        self.engines: dict[int, Engine] = {}  # By id. Only the fleet changes it.
        self._stalled_at = -math.inf  # When this process was last found to have been stalled.
        self._by_address: dict[Address, Engine] = {}
        # Models that engines have served, and since when, in Unix time. Includes lost engines.
        self._known_models: dict[str, int] = {}
        self._losses: dict[str, str] = {}  # The last loss of an engine of each model.
        self._configured_models = frozenset(config.prices)
        # Models of calls that were accepted before an engine had served them.
        self._expected_models: set[str] = set()
        self._log: CommandLog | None = None
        self._pings, self._closing = TaskSet(), TaskSet()
        self._frees = FreeSender(timers.clock)

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self.engines.values()))

    async def register(self, info: EngineInfo, client: EngineClient | None = None) -> int:
        """Add an engine and return its id. It replaces an engine with the same name and address.
        `client`: for an engine in this process.

        Raises `QuotaExceeded` above `max_engines_num`, `Conflict` if another live process has this
        name and address, and the errors of fetching the tokenizer."""
        self._require_capacity(info)
        client = client or self._connect(info)
        try:
            await self._require_free_address(info)
            tokenizer = await self._tokenizer(info, client)
            await self._require_free_address(info)
            self._require_capacity(info)
        except BaseException:
            await client.close()
            raise
        if (old := self._by_address.get(_address(info))) is not None:
            old.lost_without_crash = (
                bool(info.incarnation) and info.incarnation == old.info.incarnation
            )
            self.lose(old, "it registered again")
        now = self._clock.now()
        engine = Engine(next(self._ids), info, client, tokenizer, now, now)
        self.engines[engine.id] = self._by_address[_address(info)] = engine
        self._record_model(info.model)
        self._schedule_check(engine)
        self._on_change(engine, EngineChange.JOINED)
        self._joined.set()
        self._joined = asyncio.Event()
        logger.info("engine %s joined with id %d: %s", info.engine_name, engine.id, info.model)
        self.events.emit(EngineJoined, info)
        return engine.id

    def restore_model(self, subject: str, fields: Fields) -> None:
        """Mark a model as known because engines served it before the restart."""
        self._known_models.setdefault(fields["name"], fields["since"])

    def expect(self, models: Sequence[str]) -> None:
        """Mark the models of an accepted call as known. Their engines may register later than those
        of other models."""
        if len(self._expected_models) < _MAX_EXPECTED:
            self._expected_models.update(models)

    def record_models(self, log: CommandLog) -> None:
        """Record each new model in `log` from now on."""
        self._log = log

    def _record_model(self, model: str) -> None:
        if model not in self._known_models:
            self._known_models[model] = since = int(time.time())
            if self._log is not None:
                self._log.append("models", MODEL, {"name": model, "since": since})

    async def joined(self) -> None:
        """Wait until the next engine has joined."""
        await self._joined.wait()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        engine, runtime = self.engines.get(request.engine_id), request.runtime_info
        # Another ServeCore gives other ids to the same engines.
        is_ours = request.core in ("", self.identity.id)
        if not is_ours or engine is None or engine.info.engine_name != request.engine_name:
            return HeartbeatResponse(state="unknown")
        now = self._clock.now()
        if not self._is_stuck(engine, runtime):
            engine.last_progress = now
        engine.last_seen, engine.runtime = now, runtime
        if runtime.capabilities is not None:
            engine.info = engine.info.model_copy(update={"capabilities": runtime.capabilities})
        self._on_change(engine, EngineChange.REPORTED)
        return HeartbeatResponse(state="ok")

    async def check_reachable(self, engine: Engine) -> bool:
        """Ping an engine after a connection to it broke. False if the engine is lost.

        Concurrent calls for one engine share one ping."""
        if not engine.is_alive:
            return False
        if engine.ping is None:
            engine.ping = self._pings.spawn(self._ping(engine), name=f"ping {engine.id}")
        return await asyncio.shield(engine.ping)

    def lose(self, engine: Engine, reason: str) -> None:
        """Remove the engine. If its process is alive, its next heartbeat is answered with the state
        `unknown`, and it registers again."""
        if not engine.is_alive:
            return
        logger.warning("engine %s (%d) is lost: %s", engine.info.engine_name, engine.id, reason)
        self.events.emit(EngineLost, engine.info, reason)
        engine.is_alive = False
        self._losses[engine.info.model] = engine.loss = f"{engine.info.engine_name}: {reason}"
        self._record_stall(engine)
        del self.engines[engine.id], self._by_address[_address(engine.info)]
        if engine.lease_check is not None:
            engine.lease_check.cancel()
        for request in engine.direct_requests:
            request.cancel()
        self._on_change(engine, EngineChange.LOST)
        self._closing.spawn(engine.client.close(), name=f"close engine {engine.id}")

    def was_stalled(self, since: float) -> bool:
        """Whether this process was stalled since then, so that leases expired without being
        renewed. Then a run is not blamed for the loss of its engine."""
        return self._stalled_at >= since or any(map(self._is_check_overdue, self))

    def free(self, engine_id: int, context_id: int) -> None:
        """Free a context on the engine, in the background. No effect if the engine was lost."""
        if (engine := self.engines.get(engine_id)) is not None:
            self._frees.send(engine, context_id)

    async def close(self) -> None:
        await self._pings.close()
        await self._frees.close()
        for engine in self:
            await engine.client.close()
        await self._closing.close()

    def num_requests(self, engine: Engine) -> int:
        """The number of the engine's placed runs and direct requests."""
        return self._scheduler.engines.num_placed(engine.id) + len(engine.direct_requests)

    # Views

    @property
    def session_kv_fraction(self) -> float:
        """The fraction of all engines' KV that contexts of live sessions use."""
        return self._ledger.index.session_fraction

    def views(self) -> list[EngineView]:
        queued = queued_by_model(self._scheduler)
        return [self._view(engine, queued[""] + queued[engine.info.model]) for engine in self]

    def _view(self, engine: Engine, num_queued: int) -> EngineView:
        load = self._scheduler.engines.get(engine.id)
        assert load is not None, engine
        return EngineView(
            engine.id,
            engine.info,
            engine.runtime,
            load.num_tasks,
            *self._ledger.usage(engine.id),
            self._clock.now() - engine.last_seen,
            self._ledger.kv_stats.engine(engine.id),
            load.is_draining,
            load.num_tokens,
            num_queued,
        )

    def models(self) -> ModelsResponse:
        engines = sorted({engine.info.model: engine for engine in self}.items())
        return ModelsResponse(
            data=[
                ModelCard(
                    id=name,
                    created=self._known_models[name],
                    max_model_len=engine.max_len,
                    default_sampling=engine.info.default_sampling,
                    architecture=engine.info.architecture or None,
                )
                for name, engine in engines
            ],
            models=[
                ModelName(model_name=name, tokenizer_name=engine.info.tokenizer)
                for name, engine in engines
            ],
        )

    def tokenizer(self, model: str) -> ModelTokenizer | None:
        """The model's tokenizer; None if its engines take text. Raises `NotFound` or `NoEngine` if
        no live engine serves the model."""
        for engine in self.engines.values():
            if engine.info.model == model:
                return engine.tokenizer
        raise self.unserved_error([model], param="model")

    def unsupported_error(self, models: Sequence[str], name: str) -> UnsupportedField:
        """The error for a call that needs the feature `name`, which no engine of the models has."""
        infos = [engine.info for engine in self if engine.info.model in models or not models]
        servers = {info.capabilities.server for info in infos if info.capabilities.server}
        behind = f" (servers: {', '.join(sorted(servers))})" if servers else ""
        of_model = f" of {' or '.join(models)}" if models else ""
        return UnsupportedField(f"no engine{of_model} supports `{name}`{behind}", param=name)

    def unserved_error(self, models: Sequence[str], param: str = "models") -> ParrotError:
        """The error for a call whose models no engine serves. `models` is empty for any model.
        Unknown models are an error of the request's field `param`."""
        is_unknown = self.is_unknown(models)
        if not self.engines and not is_unknown:
            losses = [self._losses[m] for m in models or self._losses if m in self._losses]
            lost = f"; lost: {losses[-1]}" if losses else ""
            return NoEngine(f"no engine is registered{lost}")
        wanted = " or ".join(f"`{model}`" for model in models)
        served = ", ".join(sorted({engine.info.model for engine in self})) or "none now"
        if is_unknown:
            return NotFound(f"model {wanted} is not served; available: {served}", param=param)
        losses = [self._losses[model] for model in models if model in self._losses]
        lost = f"; lost: {losses[-1]}" if losses else ""
        return NoEngine(f"no engine serves model {wanted} now{lost}; available: {served}")

    def why_unserved(self, models: Sequence[str]) -> ParrotError | None:
        """The error if no live engine serves one of these models; None if an engine does."""
        has_one = any(not models or engine.info.model in models for engine in self.engines.values())
        return None if has_one else self.unserved_error(models)

    def is_unknown(self, models: Sequence[str]) -> bool:
        """Whether none of these models was ever served, is configured or is expected.

        False while no model was ever served, because the first engines may register soon."""
        if not models or not self._known_models:
            return False
        known = self._known_models.keys() | self._configured_models | self._expected_models
        return known.isdisjoint(models)

    def require_known(self, models: Sequence[str]) -> None:
        """Raise `NotFound` if the models are unknown, see `is_unknown`. Otherwise an accepted call
        may wait for them."""
        if self.is_unknown(models):
            raise self.unserved_error(models)
        if not self.engines:
            self.expect(models)

    # Leases

    def _schedule_check(self, engine: Engine) -> None:
        when = min(engine.last_seen, engine.last_progress) + self.lease_s
        engine.lease_check = self._timers.call_at(when, lambda: self._check_lease(engine))

    def _is_check_overdue(self, engine: Engine) -> bool:
        return (
            engine.lease_check is not None
            and self._clock.now() > engine.lease_check.when + _STALL_S
        )

    def _record_stall(self, engine: Engine) -> None:
        if self._is_check_overdue(engine):
            self._stalled_at = self._clock.now()

    def _check_lease(self, engine: Engine) -> None:
        """Lose the engine if its lease has expired. Otherwise schedule the next check: heartbeats
        extend the lease without touching the timer."""
        now = self._clock.now()
        self._record_stall(engine)
        # The same sums as in `_schedule_check`, so that both are rounded equally.
        if engine.last_seen + self.lease_s <= now:
            self.lose(engine, f"no heartbeat for {self.lease_s:g} s")
        elif engine.last_progress + self.lease_s <= now:
            self.lose(engine, f"its work made no progress for {self.lease_s:g} s")
        else:
            self._schedule_check(engine)

    def _is_stuck(self, engine: Engine, runtime: RuntimeInfo) -> bool:
        """Whether the engine has work but has taken no step since its last heartbeat."""
        before = engine.runtime
        return (
            before is not None
            and engine.info.engine_type
            is not EngineType.OPENAI  # The steps are the foreign server's.
            and runtime.num_steps is not None
            and runtime.num_steps == before.num_steps
            and self.num_requests(engine) > 0
        )

    async def _ping(self, engine: Engine) -> bool:
        try:
            await engine.client.ping()
            engine.unreachable_since = math.inf
        except ParrotError as error:
            self.lose(engine, f"a connection broke, and a ping was not answered: {error}")
        finally:
            engine.ping = None
        return engine.is_alive

    # Registration

    def _require_capacity(self, info: EngineInfo) -> None:
        """Raise `QuotaExceeded` if `info` would exceed `max_engines_num`."""
        if _address(info) not in self._by_address and len(self.engines) >= self._max_engines:
            raise QuotaExceeded(f"already {self._max_engines} engines are registered")

    async def _require_free_address(self, info: EngineInfo) -> None:
        """Raise `Conflict` if another live process is registered with this name and address.

        If the registered process does not answer, its engine is lost. If a new process answers at
        its address, `info` may replace it."""
        old = self._by_address.get(_address(info))
        if old is None or (info.incarnation and info.incarnation == old.info.incarnation):
            return
        try:
            incarnation = await old.client.incarnation()
        except ParrotError as error:
            self.lose(old, f"another engine took its address, and a ping failed: {error}")
            return
        if incarnation == old.info.incarnation and old.is_alive:
            raise Conflict(f"engine {info.engine_name} is already registered here, and answers")

    async def _tokenizer(self, info: EngineInfo, client: EngineClient) -> ModelTokenizer | None:
        """The engine's tokenizer, fetched if it is unknown; None if its contexts are text."""
        if info.tokenizer_id is None:
            return None
        if (known := self._tokenizers.get(info.model, info.tokenizer_id)) is not None:
            return known
        try:
            payload = await client.tokenizer()
        except ParrotError as error:
            # A registration may name any address. The error must not reveal the server behind it.
            logger.warning("engine %s returned no tokenizer: %s", info.engine_name, error)
            raise Unavailable("the engine's tokenizer could not be fetched") from None
        await self._tokenizers.add(info.model, info.tokenizer_id, payload)
        return self._tokenizers.get(info.model, info.tokenizer_id)
