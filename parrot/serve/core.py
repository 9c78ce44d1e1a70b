"""ServeCore: the service as a whole. Each verb is one request, from what it asks to its answer."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from parrot.protocol.engine_api import RegisterRequest, RegisterResponse
from parrot.protocol.errors import NoEngine, ParrotError, SessionGone, Unavailable
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    GraphRequest,
    GraphResponse,
    ModelsResponse,
    NativeCallRequest,
    ReadyResponse,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
    SessionListRequest,
    SessionListResponse,
    VarGetRequest,
    VarGetResponse,
    VarListResponse,
    VarValue,
)
from parrot.serve.config import CoreConfig
from parrot.serve.events import (
    CallAdded,
    CancelAsked,
    CoreClosed,
    SessionBegan,
    SessionDeleted,
    SessionEnded,
    SessionExpired,
    Sink,
    VariableCreated,
    VariableSet,
)
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.graph import naming_call
from parrot.serve.graph.nodes import SemanticVariable, VariableState
from parrot.serve.metrics import Accounts, CoreMetrics
from parrot.serve.readers import Reads, read_view
from parrot.serve.sessions import (
    AddCall,
    AddGraph,
    CancelCall,
    CancelVariable,
    CreateVariable,
    Session,
    SessionRegistry,
    SetVariable,
)
from parrot.serve.tasks import Sandbox, TaskRunner
from parrot.serve.tenants.table import TenantTable
from parrot.serve.views import (
    engine_view,
    session_steps,
    session_summary,
    session_view,
    variables_view,
)
from parrot.serve.waiting import why_not_ready
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.heaps import TimerQueue

_InfoSteps = Generator[None, None, SessionInfo]

if TYPE_CHECKING:
    from parrot.utils.spans import TraceSampler


class Attached(Protocol):
    """Stands on the core, and keeps things of its sessions."""

    def forget(self, session: Session) -> None:
        """The session has ended."""

    def check_integrity(self) -> None:
        """Recount every book."""


class ServeCore:
    """One service. Use from one event loop; `close` when done. Its sessions' ids are
    `first_session_id` and up. Its parts are there for whoever shows the service, who changes
    nothing in them.

    Whatever takes `session_id` and `session_auth` raises `NotFound`, `SessionGone` or
    `AuthenticationFailed` first of all. A verb that raises has changed nothing."""

    def __init__(
        self,
        config: CoreConfig,
        *,
        clock: Clock | None = None,
        dispatcher: Dispatcher | None = None,
        sandbox: Sandbox | None = None,
        sinks: Sequence[Sink] = (),
        sampler: "TraceSampler | None" = None,
        first_session_id: int = 0,
    ) -> None:
        """`sampler`: decides which sessions are traced. None: no session is."""
        self.config = config
        self.is_closing = False
        self.clock = clock or MonotonicClock()
        self._timers = TimerQueue(self.clock)
        self.dispatcher = dispatcher or Dispatcher(config, self.clock)
        self.fleet = self.dispatcher.fleet
        self.events = self.dispatcher.events
        self.tenants = TenantTable(config)
        self.dispatcher.weigh_tenants(self.tenants.weigh)
        self._attached: list[Attached] = []
        self.sessions = SessionRegistry(
            config, self.tenants, self.clock, self._timers, sampler, first_session_id
        )
        self._metrics = CoreMetrics(config, self.tenants, self.sessions.find_owner)
        for sink in (self._metrics.sink, *sinks):
            self.events.add(sink)
        self.tasks = TaskRunner(
            config, self.clock, self.dispatcher, sandbox, self.tenants, self.sessions
        )
        self.sessions.connect(self.tasks, self.dispatcher.estimates, self._expire)
        self.reads = Reads(
            self._timers,
            self.clock,
            self.events,
            lambda variable: why_not_ready(variable, self.fleet.lack),
        )

    def attach(self, attached: Attached) -> None:
        self._attached.append(attached)

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
        self.events.emit(SessionBegan, session, request.on_demand, request.traceparent)
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
        return session.is_program and self.tenants.of_key(api_key).id == session.tenant

    async def list_sessions(self, request: SessionListRequest) -> SessionListResponse:
        """Sessions of the API key's tenant; where there are no `api_keys` its conversations only,
        since a program's session is known to that program alone. Raises `AuthenticationFailed`."""
        tenant = self.tenant(request.api_key)
        is_closed = self.tenants.is_closed
        found = [s for s in self.sessions if s.tenant == tenant and (is_closed or s.is_program)]
        if request.before is not None:
            found = [session for session in found if session.id < request.before]
        found.sort(key=lambda session: session.id, reverse=True)
        summaries = []
        for session in found[: request.limit]:
            if self.sessions.find(session.id) is session:
                remaining_s = self.sessions.remaining_s(session)
                summaries.append(session_summary(session, self.clock.now(), remaining_s))
            await asyncio.sleep(0)  # others may go on
        return SessionListResponse(sessions=summaries, has_more=len(found) > request.limit)

    def delete_session(self, session_id: int, session_auth: str | None) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        self.events.emit(SessionDeleted, session)
        self.end(session, SessionGone(f"session {session_id} was deleted"))

    # Calls, variables and reads

    def submit_call(self, request: SemanticCallRequest) -> CallResponse:
        """Raises `NotFound` for a model that is not served, `InvalidRequest`, `CyclicGraph`,
        `QueueFull`, `QuotaExceeded` and what bindings may raise."""
        return self._submit(request)

    def submit_native(self, request: NativeCallRequest) -> CallResponse:
        """Raises as `submit_call` does."""
        return self._submit(request)

    def _submit(self, request: SemanticCallRequest | NativeCallRequest) -> CallResponse:
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        if isinstance(request, NativeCallRequest):
            self.tasks.check_native(request)
        if (answer := session.graph.answered(request, CallResponse)) is not None:
            return answer
        if isinstance(request, SemanticCallRequest) and request.models:
            self.fleet.require_known(request.models)
        self.tasks.require_room(session.tenant)
        response = session.apply(AddCall(request))
        self.wake_soon(session)
        self.events.emit(CallAdded, session, request, response)
        return response

    def submit_graph(self, request: GraphRequest) -> GraphResponse:
        """All of a graph for a session that is there, or nothing. Raises as `submit_call` does; the
        error names the call and its field. A call whose model is not served is accepted and fails
        when its inputs are ready, because another call of the graph may replace it."""
        assert request.session_id is not None
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        if (answer := session.graph.answered(request, GraphResponse)) is not None:
            return answer
        command = AddGraph.of(request, session.graph)
        graph = command.resolved
        for index, call in enumerate(graph.calls):
            if isinstance(call, NativeCallRequest):
                with naming_call(index, call.func_name):
                    self.tasks.check_native(call)
        self.tasks.require_room(session.tenant)
        answer = session.apply(command)
        self.wake_soon(session)
        contents = {declared.name: declared.content for declared in request.variables}
        for name, variable in graph.variables.items():
            self.events.emit(VariableCreated, session, variable.id, name, contents.get(name))
        for call, response in zip(graph.calls, answer.calls, strict=True):
            self.events.emit(CallAdded, session, call, response)
        return answer

    def cancel_call(self, session_id: int, session_auth: str | None, request_id: int) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        session.apply(CancelCall(request_id))
        self.events.emit(CancelAsked, session, request_id=request_id)

    def create_var(
        self, session_id: int, session_auth: str | None, var_name: str, content: str | None
    ) -> str:
        """Raises `QuotaExceeded`."""
        session = self.sessions.authenticate(session_id, session_auth)
        variable = session.apply(CreateVariable(var_name, content))
        self.events.emit(VariableCreated, session, variable.id, variable.name, content)
        return variable.id

    async def list_vars(self, session_id: int, session_auth: str | None) -> VarListResponse:
        session = self.sessions.authenticate(session_id, session_auth)
        found = await variables_view(session)
        self.sessions.authenticate(session_id, session_auth)  # else it was taken apart meanwhile
        return VarListResponse(vars=found)

    def set_var(self, session_id: int, session_auth: str | None, var_id: str, content: str) -> None:
        """Raises `QuotaExceeded`, `AlreadySet`, or `Conflict` if a call makes the variable."""
        session = self.sessions.authenticate(session_id, session_auth)
        session.apply(SetVariable(var_id, content))
        self.events.emit(VariableSet, session, var_id, content)

    def cancel_var(self, session_id: int, session_auth: str | None, var_id: str) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        session.apply(CancelVariable(var_id))
        self.events.emit(CancelAsked, session, var_id=var_id)

    def variable(self, request: VarGetRequest, var_id: str) -> SemanticVariable:
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        return session.graph.variable(var_id)

    async def read(self, request: VarGetRequest, var_id: str) -> VarGetResponse:
        """Wait for the value, and meanwhile want it. Does not suspend if it is there. Raises the
        variable's error, `TimedOut`, or `QueueFull` (to this reader alone). Cancelling withdraws
        the read."""
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self.tasks.require_room(session.tenant)
        await self.reads.value(session, variable, request)
        return await read_view(variable)

    async def first(self, request: FirstVarsRequest) -> FirstVarsResponse:
        """Wait for the first `k` of the variables to be ready, and meanwhile want all. Raises as
        `read` does; the error of a variable only when fewer than `k` are left."""
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        variables = [session.graph.variable(var_id) for var_id in request.var_ids]
        num_ready = sum(variable.state is VariableState.READY for variable in variables)
        if num_ready < request.k and any(variable.is_idle for variable in variables):
            self.tasks.require_room(session.tenant)
        winners = await self.reads.first(session, variables, request)
        read = [(winner.id, await read_view(winner)) for winner in winners]
        return FirstVarsResponse(
            values=[VarValue(var_id=var_id, **dict(value)) for var_id, value in read]
        )

    def stream(self, request: VarGetRequest, var_id: str) -> AsyncGenerator[str]:
        """All the text in deltas, the past ones first. Raises at once what `read` raises before it
        waits; the iterator raises the rest."""
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self.tasks.require_room(session.tenant)
        return self.reads.stream(session, variable, request)

    def wake_soon(self, session: Session) -> None:
        """Let what its program holds run, if anything was read."""
        self.reads.wake_soon(session)

    # Engines and the service itself

    async def register_engine(self, request: RegisterRequest) -> RegisterResponse:
        self._require_open()
        engine_id = await self.fleet.register(request.engine_config)
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
        return self.dispatcher.num_queued

    @property
    def accounts(self) -> Accounts:
        """The use of each tenant until now."""
        return self._metrics.accounts

    def metrics(self) -> Iterator[bytes]:
        """Yield one family after the other: all of them may take some ten milliseconds."""
        return self._metrics.render(self.sessions, self.dispatcher, self.sessions.journal)

    def check_integrity(self) -> None:
        """Recount every book. Only between events of the loop."""
        self.sessions.check_integrity()
        for attached in self._attached:
            attached.check_integrity()
        self.dispatcher.check_integrity()
        if self.tasks.meters is not None:
            self.tasks.meters.check_integrity()

    def shut_down(self) -> None:
        """Admit nothing more, and end every session: open reads get `Unavailable` now."""
        self.is_closing = self.sessions.is_closing = True
        for session in self.sessions:
            session.follow(None)  # the journal has it, for the next process
            self.end(session, Unavailable("ServeCore is shutting down"))
        self.sessions.backlog.finish()

    async def close(self) -> None:
        self.shut_down()
        await self.tasks.close()
        await self._timers.close()
        kv = self.dispatcher.kv_stats.total
        self.events.emit(CoreClosed, kv.hit, kv.recomputed.total(), kv.evicted)

    def _require_open(self) -> None:
        if self.is_closing:
            raise Unavailable("ServeCore is shutting down")

    def _expire(self, session: Session, reason: str) -> None:
        text = f"session {session.id} {reason}"
        self.events.emit(SessionExpired, session, text)
        self.end(session, SessionGone(text))

    def end(self, session: Session, error: ParrotError) -> None:
        """Nobody finds it any more; what it was to make and keeps goes in the backlog."""
        if session.log is not None:
            session.log.ended()
            session.follow(None)
        self.sessions.retire(session)
        for attached in self._attached:
            attached.forget(session)
        self.sessions.backlog.add(session.id, self._ending(session, error))

    def _ending(self, session: Session, error: ParrotError) -> Iterator[int]:
        yield from session.graph.close(error)
        yield from self.dispatcher.release_session(session.id)
        self.sessions.remove(session)
        self.events.emit(SessionEnded, session, self.clock.now() - session.created_at)
        yield from session.graph.dissolve()
