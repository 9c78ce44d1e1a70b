"""The live engines: joining, giving signs of life, and being lost."""

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
)
from parrot.protocol.public import ModelCard, ModelName, ModelsResponse
from parrot.serve.config import CoreConfig
from parrot.serve.contexts.ledger import ContextLedger, KvCounts
from parrot.serve.events import EngineJoined, EngineLost, Events
from parrot.serve.prompts.encode import ModelTokenizer, TokenizerRegistry
from parrot.serve.scheduling.scheduler import Scheduler, queued_by_model
from parrot.serve.sessions import CommandLog, Fields
from parrot.utils.clock import Clock
from parrot.utils.heaps import Timer, TimerQueue
from parrot.utils.tasks import TaskSet

_FREE_INTERVAL_S = 0.01  # between two requests to one engine; the first goes at once
_MAX_FREE_INTERVAL_S = 5.0  # between two that fail
_MAX_FREES_PER_REQUEST = 65536  # context ids that one request may have


logger = logging.getLogger(__name__)

_STALL_S = 0.5  # of a timer: more than any turn of the event loop takes

MODEL = "model"
"""The kind of a record that names a model which an engine has served."""

Connect = Callable[[EngineInfo], EngineClient]
Address = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Engine:
    """A registered engine, alive until it is lost. `tokenizer` is None if its contexts are text.
    `last_progress`: the last heartbeat by which it had done something, or had nothing to do.
    `lost_without_crash`: it was lost, though its process lives on, or wanted to end.
    `unreachable_since`: the first call came then that could not reach it, unless it has answered
    since. `lease_check`: when it is looked at next; `ping`: the one under way. `direct_requests`:
    those that are no runs, which end with it."""

    id: int
    info: EngineInfo
    client: EngineClient
    tokenizer: ModelTokenizer | None
    last_seen: float
    last_progress: float
    runtime: RuntimeInfo | None = None
    is_alive: bool = True
    lost_without_crash: bool = False
    unreachable_since: float = math.inf
    lease_check: Timer | None = None
    ping: "asyncio.Task[bool] | None" = None
    direct_requests: "set[asyncio.Task[Any]]" = field(default_factory=set)
    max_len: int = field(init=False)  # tokens of the longest sequence that it takes
    uses_drafts: bool = field(init=False)  # whether it drafts from texts that ServeCore sends

    def __post_init__(self) -> None:
        self.max_len = min(self.info.max_seq_len, self.info.tokens_capacity)
        is_builtin = self.info.engine_type is EngineType.BUILTIN
        self.uses_drafts = is_builtin and self.tokenizer is not None

    @property
    def units(self) -> int:
        """Units that a token takes in its contexts: 1, or so many characters."""
        return CHARS_PER_TOKEN if self.tokenizer is None else 1


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
    is_draining: bool = False
    needed_tokens: int = 0
    num_queued: int = 0


def _address(info: EngineInfo) -> Address:
    """The name and place by which an engine that registers again is known."""
    return (info.engine_name, info.host, info.port)


class FreeSender:
    """Tells engines which contexts they may forget, in batches and never on anybody's path. At most
    one request per engine is under way; what comes meanwhile goes with the next. Ids are sent until
    the engine has acknowledged them or is lost: one that registers again has forgotten all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks = TaskSet()
        self._pending: dict[Engine, list[int]] = {}

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
                if delay_s == _FREE_INTERVAL_S:  # not at each attempt
                    name = engine.info.engine_name
                    logger.warning("engine %s did not free, trying on: %s", name, error.message)
                delay_s = min(2 * delay_s, _MAX_FREE_INTERVAL_S)
            else:
                delay_s = _FREE_INTERVAL_S
                del pending[: len(batch)]
            await self._clock.sleep(delay_s)
        del self._pending[engine]


class EngineChange(Enum):
    """The changes of an engine that the owner of a `Fleet` is told of, after the set of engines has
    changed."""

    JOINED = auto()
    REPORTED = auto()  # it has sent a heartbeat
    LOST = auto()  # everything about it must be given up


class Fleet:
    """Owns the live engines; the id of one that was lost is never used again.

    An engine lives as long as

    - its heartbeats are less than `engine_heartbeat_timeout` apart;
    - it makes progress: while runs are placed on it, its count of steps changes within that time
      (the heartbeats of a process with a stuck device go on);
    - it answers a ping after a connection to it broke, or it was found to obey another ServeCore.

    `identity` is who registered engines obey. It may be set before there are any. Raises
    `ConfigError` for a file of `public_prefixes`."""

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
        self._max_engines = config.max_engines_num
        self.lease_s = config.engine_heartbeat_timeout
        self.identity = CoreIdentity.new()
        self._clock = timers.clock
        self._timers = timers
        self._connect = connect or http_connect(config.cluster_token, lambda: self.identity)
        self._scheduler = scheduler
        self._ledger = ledger
        self._events = events
        self._on_change = on_change
        self._tokenizers = TokenizerRegistry(config.public_prefixes)
        self._ids = itertools.count()
        self._joined = asyncio.Event()  # set, and another, when one joins
        self.engines: dict[int, Engine] = {}  # by id; nobody else changes it
        self._stalled_at = -math.inf  # when a review came too late
        self._by_address: dict[Address, Engine] = {}
        self._known_models: dict[str, int] = {}  # since when (Unix time), also of lost engines
        self._configured_models = frozenset(config.prices)
        self._log: CommandLog | None = None
        self._pings, self._closing = TaskSet(), TaskSet()
        self._frees = FreeSender(timers.clock)

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self.engines.values()))

    async def register(self, info: EngineInfo, client: EngineClient | None = None) -> int:
        """The same name and address again replaces the engine, with all that it was doing.
        `client`: of an engine in this process. Raises
        `QuotaExceeded`, `Conflict` if another engine is at this address, or what fetching the
        tokenizer raised: then the engine has not joined."""
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
        self._events.emit(EngineJoined, info)
        return engine.id

    def restore_model(self, subject: str, fields: Fields) -> None:
        """Engines served the model before a restart, so it may come back."""
        self._known_models.setdefault(fields["name"], fields["since"])

    def record_models(self, log: CommandLog) -> None:
        """Record each new model in the log from now on."""
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
        is_ours = request.core in ("", self.identity.id)  # else ids are another's
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
        """Ping an engine to which a connection broke, once for all who ask at the same time. If
        there is no answer it is lost by the time that this returns False."""
        if not engine.is_alive:
            return False
        if engine.ping is None:
            engine.ping = self._pings.spawn(self._ping(engine), name=f"ping {engine.id}")
        return await asyncio.shield(engine.ping)

    def lose(self, engine: Engine, reason: str) -> None:
        """Take the engine for dead from now on. If it is not, its next heartbeat is told so and it
        registers again."""
        if not engine.is_alive:
            return
        logger.warning("engine %s (%d) is lost: %s", engine.info.engine_name, engine.id, reason)
        self._events.emit(EngineLost, engine.info, reason)
        engine.is_alive = False
        self._record_stall(engine)
        del self.engines[engine.id], self._by_address[_address(engine.info)]
        if engine.lease_check is not None:
            engine.lease_check.cancel()
        for request in engine.direct_requests:
            request.cancel()
        self._on_change(engine, EngineChange.LOST)
        self._closing.spawn(engine.client.close(), name=f"close engine {engine.id}")

    def was_stalled(self, since: float) -> bool:
        """Whether this process itself has stood still since then, for so long that an engine's
        lease ended: then it is not to blame for what became of the engine."""
        return self._stalled_at >= since or any(map(self._is_check_overdue, self))

    def free(self, engine_id: int, context_id: int) -> None:
        """Let the engine forget a context, soon. No effect if it is gone."""
        if (engine := self.engines.get(engine_id)) is not None:
            self._frees.send(engine, context_id)

    async def close(self) -> None:
        await self._pings.close()
        await self._frees.close()
        for engine in self:
            await engine.client.close()
        await self._closing.close()

    def num_requests(self, engine: Engine) -> int:
        """The number of requests that it has."""
        return self._scheduler.engines.num_placed(engine.id) + len(engine.direct_requests)

    # What others may see

    @property
    def session_kv_fraction(self) -> float:
        """The part of the engines' KV that contexts of live sessions have."""
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
        it has none."""
        for engine in self.engines.values():
            if engine.info.model == model:
                return engine.tokenizer
        raise self.unserved_error([model], param="model")

    def unserved_error(self, models: Sequence[str], param: str = "models") -> ParrotError:
        """Why no engine can run a call for these models (empty: any). An unknown model is an error
        of the request, in its field `param`."""
        if not self.engines:
            return NoEngine("no engine is registered")
        wanted = " or ".join(f"`{model}`" for model in models)
        served = ", ".join(sorted({engine.info.model for engine in self}))
        if self.is_unknown(models):
            return NotFound(f"model {wanted} is not served; available: {served}", param=param)
        return NoEngine(f"no engine serves model {wanted} now; available: {served}")

    def why_unserved(self, models: Sequence[str]) -> ParrotError | None:
        """Why no live engine can run a call for these models (empty: any); None if one can."""
        has_one = any(not models or engine.info.model in models for engine in self.engines.values())
        return None if has_one else self.unserved_error(models)

    def is_unknown(self, models: Sequence[str]) -> bool:
        """Whether engines are registered, none of these models (empty: any) has ever been served,
        and the configuration names none of them. Without any engine, one of these models may be
        about to come."""
        known = self._known_models.keys() | self._configured_models
        return bool(models and self.engines) and known.isdisjoint(models)

    def require_known(self, models: Sequence[str]) -> None:
        """Raise `NotFound` for models that are unknown."""
        if self.is_unknown(models):
            raise self.unserved_error(models)

    # Signs of life

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
        """Heartbeats only move the deadline away, so the timer is set again when it fires."""
        now = self._clock.now()
        self._record_stall(engine)
        if engine.last_seen + self.lease_s <= now:  # the same sum as in `_schedule_check`
            self.lose(engine, f"no heartbeat for {self.lease_s:g} s")
        elif engine.last_progress + self.lease_s <= now:
            self.lose(engine, f"its work made no progress for {self.lease_s:g} s")
        else:
            self._schedule_check(engine)

    def _is_stuck(self, engine: Engine, runtime: RuntimeInfo) -> bool:
        """Whether it has taken no step since the last heartbeat, though it had work."""
        before = engine.runtime
        return (
            before is not None
            and engine.info.engine_type is not EngineType.OPENAI  # the other server's steps
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

    # Joining

    def _require_capacity(self, info: EngineInfo) -> None:
        """Raise `QuotaExceeded` if `info` would be one engine too many."""
        if _address(info) not in self._by_address and len(self.engines) >= self._max_engines:
            raise QuotaExceeded(f"already {self._max_engines} engines are registered")

    async def _require_free_address(self, info: EngineInfo) -> None:
        """Raise `Conflict` if a live engine has this name and address, and `info` is not of the
        same start of it. One that answers no ping is lost, and so is one in whose place another
        answers."""
        old = self._by_address.get(_address(info))
        if old is None or (info.incarnation and info.incarnation == old.info.incarnation):
            return
        try:
            incarnation = await old.client.incarnation()
        except ParrotError as error:
            self.lose(old, f"another registers in its place, and it answered no ping: {error}")
            return
        if incarnation == old.info.incarnation and old.is_alive:
            raise Conflict(f"engine {info.engine_name} is registered at this address, and answers")

    async def _tokenizer(self, info: EngineInfo, client: EngineClient) -> ModelTokenizer | None:
        """The engine's tokenizer, fetched if it is a new one; None if its contexts are text."""
        if info.tokenizer_id is None:
            return None
        if (known := self._tokenizers.get(info.model, info.tokenizer_id)) is not None:
            return known
        try:
            payload = await client.tokenizer()
        except ParrotError as error:
            # Who registers may have named any address, and shall not learn what is there.
            logger.warning("engine %s gave no tokenizer: %s", info.engine_name, error)
            raise Unavailable("the engine's tokenizer could not be fetched") from None
        await self._tokenizers.add(info.model, info.tokenizer_id, payload)
        return self._tokenizers.get(info.model, info.tokenizer_id)
