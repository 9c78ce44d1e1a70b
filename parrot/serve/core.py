"""ServeCore: the service as a whole, which begins and ends sessions and knows the engines."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from parrot.protocol.engine_api import RegisterRequest, RegisterResponse
from parrot.protocol.errors import NoEngine, ParrotError, SessionGone, Unavailable
from parrot.protocol.public import (
    ModelsResponse,
    ReadyResponse,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
)
from parrot.serve.config import CoreConfig
from parrot.serve.conversations.turns import Turns
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.observers import Observer, Observers
from parrot.serve.programs import Programs
from parrot.serve.sessions import Session, SessionRegistry
from parrot.serve.tasks import Sandbox, TaskRunner
from parrot.serve.telemetry.metrics import CoreMetrics
from parrot.serve.views import engine_view, session_steps, session_view
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.timers import TimerQueue

_InfoSteps = Generator[None, None, SessionInfo]


class ServeCore:
    """One service. Use from one event loop; `close` when done. Its sessions' ids are
    `first_session_id` and up. `programs` has what the programs of live sessions may ask;
    `sessions`, `fleet`, `decisions`, `contexts`, `accounts` and `tenants` are for whoever shows the
    service, who changes nothing there; `follow` has a running completion's text shown as it comes,
    and `drain` gives an engine no more calls, or calls again.

    Whatever takes `session_id` and `session_auth` raises `NotFound`, `SessionGone` or
    `AuthenticationFailed` first of all."""

    def __init__(
        self,
        config: CoreConfig,
        *,
        clock: Clock | None = None,
        dispatcher: Dispatcher | None = None,
        sandbox: Sandbox | None = None,
        observers: Sequence[Observer] = (),
        first_session_id: int = 0,
    ) -> None:
        self.config = config
        self.is_closing = False
        self.clock = clock or MonotonicClock()
        self._timers = TimerQueue(self.clock)
        self._dispatcher = dispatcher or Dispatcher(config, self.clock)
        self.fleet, self.heartbeat = self._dispatcher.fleet, self._dispatcher.fleet.heartbeat
        self.decisions, self.contexts = self._dispatcher.decisions, self._dispatcher.contexts
        self.follow, drains = self._dispatcher.follow, self._dispatcher.drains
        self.drain, self.engine_leaves = drains.drain, drains.engine_leaves
        self._metrics = CoreMetrics(config)
        self.accounts, self.tenants = self._metrics.accounts, self._metrics.tenants
        self._dispatcher.shares.weigh = self.tenants.weigh
        self._observers = Observers(observers)
        self._runner = TaskRunner(
            config,
            self.clock,
            self._dispatcher,
            sandbox,
            self._metrics,
            self._observers,
            lambda session_id: self.sessions.find_owner(session_id),
        )
        self.require_room, self.meters = self._runner.require_room, self._runner.meters
        self.sessions = SessionRegistry(
            config,
            self.tenants,
            self.clock,
            self._timers,
            self._runner,
            self._dispatcher.estimates,
            self._expire,
            first_session_id,
        )
        self.programs = Programs(
            self.sessions, self._runner, self._observers, self._timers, self.clock
        )
        self.turns = Turns(
            self.sessions,
            self._end,
            self._timers,
            self.clock,
            self.fleet.tokenizer,
            self._longest,
            self._takes_messages,
            self._runner.require_room,
            self._metrics.prefix_broken,
            self._observers,
            repair=config.prefix_repair,
            aliases=config.model_aliases,
        )

    def _longest(self, model: str) -> int | None:
        """Tokens of the longest sequence that an engine of the model takes; None: there is none."""
        return max([e.max_len for e in self.fleet if e.info.model == model], default=None)

    def _takes_messages(self, model: str) -> bool:
        """Whether a server behind an engine of the model renders conversations."""
        able = [e.info.capabilities.features for e in self.fleet if e.info.model == model]
        return any("messages" in (features or ()) for features in able)

    # Sessions

    def create_session(self, request: SessionCreateRequest) -> SessionCreateResponse:
        """Raises `AuthenticationFailed`, `QuotaExceeded`."""
        return self.begin_session(self.tenant(request.api_key), request)

    def begin_session(self, tenant: str, request: SessionCreateRequest) -> SessionCreateResponse:
        """A session of a tenant that is known. Raises `QuotaExceeded`."""
        session = self.sessions.create(
            tenant,
            request.apps or (),
            on_demand=request.on_demand,
            traceparent=request.traceparent,
        )
        self._observers.tell(lambda one: one.session_created(session, request))
        return SessionCreateResponse(session_id=session.id, session_auth=session.auth)

    def tenant(self, api_key: str | None) -> str:
        """The id of whose work a request with this key is. Raises `AuthenticationFailed`,
        `PermissionDenied`, and `Unavailable` when the service is going down."""
        self._require_open()
        return self.tenants.user_of_key(api_key).id

    def session_info(self, session_id: int, session_auth: str | None) -> SessionInfo:
        """As `session_steps` says, at once."""
        return session_view(self.session_steps(session_id, session_auth))

    def session_steps(self, session_id: int, session_auth: str | None) -> _InfoSteps:
        """`session_auth` may be the API key instead, where that shows whose session it is: one of
        `api_keys`, or without those whatever the requests of a conversation had."""
        session = self.sessions.find(session_id)
        if session is None or not self._is_owner(session, session_auth):
            session = self.sessions.authenticate(session_id, session_auth)
        remaining_s = self.sessions.remaining_s(session)
        steps = session_steps(session, self.clock.now(), remaining_s, self._metrics.prices)
        return self._while_live(session, steps)

    def _while_live(self, session: Session, steps: _InfoSteps) -> _InfoSteps:
        """An ended session is taken apart, and tells nothing that is true. Raises `SessionGone`,
        and `Unavailable` if ServeCore is shutting down, where a journal has it."""
        info = yield from steps
        if self.sessions.find(session.id) is not session:
            self._require_open()
            raise SessionGone(f"session {session.id} has ended")
        return info

    def _is_owner(self, session: Session, api_key: str | None) -> bool:
        if self.tenants.is_closed:
            tenant = self.tenants.find_by_key(api_key or "")
            return tenant is not None and tenant.id == session.tenant
        is_known = self.turns.has_session(session.id)
        return is_known and self.tenants.of_key(api_key).id == session.tenant

    def delete_session(self, session_id: int, session_auth: str | None) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        self._observers.tell(lambda one: one.session_deleted(session))
        self._end(session, SessionGone(f"session {session_id} was deleted"))

    def restore(
        self, replay: Callable[[], Iterable[Session]], left_out: Session | None = None
    ) -> None:
        """Call `replay`, which does once more what a journal tells, has the sessions write down
        there what comes, and returns those that are not whole; or do so for one that was left out.
        Nothing runs meanwhile; then goes on what ran."""
        self._runner.hold()
        for session in replay():
            self._end(session, SessionGone(f"session {session.id} could not be restored"))
        if left_out is None:
            for _ in self.sessions.keys_changed():
                pass
            self._dispatcher.on_placed = self.sessions.placed
        self.turns.programs.cancel_orphans()
        self._runner.go_on()
        for session in self.sessions if left_out is None else (left_out,):
            if self.sessions.find(session.id) is session:
                self.programs.restored(session)

    # Engines and the service itself

    async def register_engine(self, request: RegisterRequest) -> RegisterResponse:
        self._require_open()
        engine_id = await self.fleet.register(request.engine_config)
        self._observers.tell(lambda one: one.engine_registered(request.engine_config))
        core, lease_s = self.fleet.identity, self.fleet.lease_s
        return RegisterResponse(
            engine_id=engine_id, core=core.id, epoch=core.epoch, lease_s=lease_s
        )

    def models(self) -> ModelsResponse:
        """The models that engines serve, by all their names."""
        models = self.fleet.models()
        cards = {card.id: card for card in models.data}
        for alias, name in self.config.model_aliases.items():
            if name in cards and alias not in cards:
                models.data.append(cards[name].model_copy(update={"id": alias}))
        return models

    def readiness(self, *, sees_engines: bool) -> ReadyResponse:
        """Raises `NoEngine`, or `Unavailable` when the service is going down."""
        self._require_open()
        if not (engines := self.fleet.views()):
            raise NoEngine("no engine is registered")
        if not sees_engines:
            return ReadyResponse(num_queued=None, engines=None)
        shown = [engine_view(engine) for engine in engines]
        return ReadyResponse(num_queued=self.num_queued, engines=shown)

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    def metrics(self) -> Iterator[bytes]:
        """Yield one family after the other: all of them may take some ten milliseconds."""
        return self._metrics.render(self.sessions, self._dispatcher, self.sessions.journal)

    def check_integrity(self) -> None:
        """Recount every book. Only between events of the loop."""
        self.sessions.check_integrity()
        self.turns.check_integrity()
        self._dispatcher.check_integrity()
        self.meters.check_integrity()

    def shut_down(self) -> None:
        """Admit nothing more, and end every session: open reads get `Unavailable` now."""
        self.is_closing = self.sessions.is_closing = True
        for session in self.sessions:
            session.follow(None)  # the journal has it, for the next process
            self._end(session, Unavailable("ServeCore is shutting down"))
        self.sessions.backlog.finish()

    async def close(self) -> None:
        self.shut_down()
        await self._runner.close()
        await self._timers.close()
        self._observers.tell(lambda one: one.core_closed(self._dispatcher.kv_log.total))

    def _require_open(self) -> None:
        if self.is_closing:
            raise Unavailable("ServeCore is shutting down")

    def _expire(self, session: Session, reason: str) -> None:
        text = f"session {session.id} {reason}"
        self.fleet.events.session_expired(text, session.id, session.tenant)
        self._end(session, SessionGone(text))

    def _end(self, session: Session, error: ParrotError) -> None:
        """Nobody finds it any more; what it was to make and keeps goes in the backlog."""
        if session.history is not None:
            session.history.ended()
            session.follow(None)
        self.sessions.retire(session)
        self.turns.forget(session)
        self.sessions.backlog.add(session.id, self._ending(session, error))

    def _ending(self, session: Session, error: ParrotError) -> Iterator[int]:
        yield from session.graph.close(error)
        yield from self._dispatcher.release_session(session.id)
        self.sessions.remove(session)
        self._metrics.session_ended(session, self.clock.now() - session.created_at)
        self._observers.tell(lambda one: one.session_ended(session))
        yield from session.graph.dissolve()
