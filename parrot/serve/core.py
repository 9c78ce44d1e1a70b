"""ServeCore: the service as a whole. Each public method (a verb) handles one request."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from parrot.protocol.engine_api import RegisterRequest, RegisterResponse
from parrot.protocol.errors import (
    NoEngine,
    ParrotError,
    QuotaExceeded,
    SessionGone,
    Unavailable,
)
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
    CancelRequested,
    CompletionUnserved,
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
from parrot.serve.metrics import Accounts, CoreMetrics, EngineTotals, PriceTable
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
from parrot.serve.tenants.limits import TenantQuotaExceeded
from parrot.serve.tenants.table import TenantTable
from parrot.serve.views import (
    engine_view,
    journal_state,
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
    """A component on top of the core that keeps state of sessions, such as the gateway's turns."""

    def forget(self, session: Session) -> None:
        """Drop the state of a session that has ended."""

    def make_room(self, tenant: str, *, only_own: bool) -> bool:
        """End an idle session that the component began, preferably one of the tenant. `only_own`:
        only one of the tenant. Returns False if no session was ended, or if its quota becomes free
        only later."""

    def check_integrity(self) -> None:
        """Recount the component's state. For tests."""


class KeepsRuns(Protocol):
    """Called when a session ends, with the error of its unsettled variables. Once these are
    settled, the steps of the result run, and then the graph is freed. A step yields its size. A
    keeper that needs the graph for longer sets `keeps_graph`, and frees the graph."""

    def __call__(self, session: Session, error: ParrotError) -> Iterator[int]: ...


class ServeCore:
    """One service. Use it from one event loop; `close` it when done. Observers may read its
    attributes, and must not change them. Methods with `session_id` and `session_auth` raise
    `NotFound`, `SessionGone` or `AuthenticationFailed` first. A method that raises has changed
    nothing."""

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
        """`sampler` decides which sessions are traced. None: no session is traced. Numbers of
        sessions start at `first_session_id`. 0: their ids are their numbers."""
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
        self.keepers: list[KeepsRuns] = []
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
        self.events.add({CompletionUnserved: self._refuse_readers})
        self.reads = Reads(
            self._timers,
            self.clock,
            self.events,
            lambda variable: why_not_ready(variable, self.fleet.why_unserved),
        )

    def attach(self, attached: Attached) -> None:
        self._attached.append(attached)

    # Sessions

    def create_session(self, request: SessionCreateRequest) -> SessionCreateResponse:
        """Raises `AuthenticationFailed`, `QuotaExceeded`."""
        return self.begin_session(self.tenant(request.api_key), request)

    def begin_session(self, tenant: str, request: SessionCreateRequest) -> SessionCreateResponse:
        """Begin a session for a known tenant. Raises `QuotaExceeded`."""
        session = self.begin_with_room(
            tenant,
            request.apps or (),
            {},
            on_demand=request.on_demand,
            traceparent=request.traceparent,
        )
        return SessionCreateResponse(session_id=session.id, session_auth=session.auth)

    def begin_with_room(
        self,
        tenant: str,
        apps: Sequence[str],
        usage: Mapping[str, int],
        *,
        on_demand: bool = False,
        is_program: bool = False,
        client: str = "",
        traceparent: str | None = None,
    ) -> Session:
        """Begin a session that may use `usage`, as in `Quota`. Idle sessions of attached components
        end if the quota is used up. Raises `QuotaExceeded`."""
        while True:
            session = None
            try:
                session = self.sessions.create(
                    tenant,
                    apps,
                    on_demand=on_demand,
                    is_program=is_program,
                    client=client,
                    traceparent=traceparent,
                )
                self.events.emit(SessionBegan, session, on_demand, traceparent)
                session.account.require(**usage)
            except QuotaExceeded as error:
                if session is not None:
                    self.end(session, SessionGone(error.message))
                is_own = isinstance(error, TenantQuotaExceeded)
                if not any(each.make_room(tenant, only_own=is_own) for each in self._attached):
                    raise
            else:
                return session

    def tenant(self, api_key: str | None) -> str:
        """The id of the tenant with this key. Raises `AuthenticationFailed`, `PermissionDenied`,
        and `Unavailable` while ServeCore shuts down."""
        self._require_open()
        return self.tenants.user_of_key(api_key).id

    def session_info(self, session_id: int, session_auth: str | None) -> SessionInfo:
        """The complete result of `session_steps`."""
        return session_view(self.session_steps(session_id, session_auth))

    def session_steps(self, session_id: int, session_auth: str | None) -> _InfoSteps:
        """Build the session's view in steps. Instead of `session_auth`, the tenant's API key is
        accepted. Without `api_keys`, the key of a conversation's requests is accepted for that
        conversation only."""
        session = self.sessions.find(session_id)
        if session is None or not self._is_owner(session, session_auth):
            session = self.sessions.authenticate(session_id, session_auth)
        remaining_s = self.sessions.remaining_s(session)
        steps = session_steps(session, self.clock.now(), remaining_s, self._metrics.prices)
        return self._while_live(session, steps)

    def _while_live(self, session: Session, steps: _InfoSteps) -> _InfoSteps:
        """Run the steps. If the session has ended meanwhile, its view is incomplete. Then raise
        `SessionGone`, or `Unavailable` while ServeCore shuts down, because a journal may keep it.
        """
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
        """The tenant's live sessions, newest first. Without `api_keys` only its conversations,
        because a program's session is secret to that program. Raises `AuthenticationFailed`."""
        tenant = self.tenant(request.api_key)
        is_closed = self.tenants.is_closed
        number_of = self.sessions.numbers.number_of
        found = [s for s in self.sessions if s.tenant == tenant and (is_closed or s.is_program)]
        if request.before is not None:
            last = number_of(request.before)
            found = [session for session in found if number_of(session.id) < last]
        found.sort(key=lambda session: number_of(session.id), reverse=True)
        summaries = []
        for session in found[: request.limit]:
            if self.sessions.find(session.id) is session:
                remaining_s = self.sessions.remaining_s(session)
                summaries.append(session_summary(session, self.clock.now(), remaining_s))
            await asyncio.sleep(0)  # Let other tasks run.
        return SessionListResponse(sessions=summaries, has_more=len(found) > request.limit)

    def delete_session(self, session_id: int, session_auth: str | None) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        self.events.emit(SessionDeleted, session)
        self.end(session, SessionGone(f"session {session_id} was deleted"))

    # Calls, variables and reads

    def submit_call(self, request: SemanticCallRequest) -> CallResponse:
        """Raises `NotFound` for a model that is not served, `InvalidRequest`, `CyclicGraph`,
        `QueueFull`, `QuotaExceeded`, and the errors of bindings."""
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
        """Submit all variables and calls of a graph to an existing session, or none. Raises as
        `submit_call` does, with the call and its field in the error. A call whose model is not
        served is accepted, and fails when its inputs are ready: another call may replace it."""
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
        self.events.emit(CancelRequested, session, request_id=request_id)

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
        self.sessions.authenticate(session_id, session_auth)  # Raise if it has ended meanwhile.
        return VarListResponse(vars=found)

    def set_var(self, session_id: int, session_auth: str | None, var_id: str, content: str) -> None:
        """Raises `QuotaExceeded`, `AlreadySet`, or `Conflict` if a call produces the variable."""
        session = self.sessions.authenticate(session_id, session_auth)
        session.apply(SetVariable(var_id, content))
        self.events.emit(VariableSet, session, var_id, content)

    def cancel_var(self, session_id: int, session_auth: str | None, var_id: str) -> None:
        session = self.sessions.authenticate(session_id, session_auth)
        session.apply(CancelVariable(var_id))
        self.events.emit(CancelRequested, session, var_id=var_id)

    def variable(self, request: VarGetRequest, var_id: str) -> SemanticVariable:
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        return session.graph.variable(var_id)

    async def read(self, request: VarGetRequest, var_id: str) -> VarGetResponse:
        """Wait for the value, and activate its producer. Does not suspend if the value is set.
        Raises the variable's error, `TimedOut`, or `QueueFull`, which affects this reader only.
        Cancelling withdraws the read."""
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self.tasks.require_room(session.tenant)
        await self.reads.value(session, variable, request)
        return await read_view(variable)

    async def first(self, request: FirstVarsRequest) -> FirstVarsResponse:
        """Wait for the first `k` of the variables, and activate all their producers. Raises as
        `read` does, but a variable's error only if fewer than `k` variables can still be ready."""
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
        """The value in deltas, starting with the text so far. The call raises the errors that
        `read` raises before it waits. The iterator raises the others."""
        session = self.sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self.tasks.require_room(session.tenant)
        return self.reads.stream(session, variable, request)

    def wake_soon(self, session: Session) -> None:
        """Start the calls that the session holds after a delay, if any variable was read."""
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
        """The served models, under all their names."""
        models = self.fleet.models()
        cards = {card.id: card for card in models.data}
        for alias, name in self.config.model_aliases.items():
            if name in cards and alias not in cards:
                models.data.append(cards[name].model_copy(update={"id": alias}))
        return models

    def readiness(self, *, sees_engines: bool) -> ReadyResponse:
        """Raises `NoEngine`, or `Unavailable` while ServeCore shuts down."""
        self._require_open()
        if not (engines := self.fleet.views()):
            raise NoEngine("no engine is registered")
        journal = journal_state(self.sessions.journal)
        if not sees_engines:
            return ReadyResponse(num_queued=None, engines=None, journal=journal)
        shown = [engine_view(engine) for engine in engines]
        return ReadyResponse(num_queued=self.num_queued, engines=shown, journal=journal)

    @property
    def num_queued(self) -> int:
        return self.dispatcher.num_queued

    @property
    def prices(self) -> PriceTable | None:
        """The prices of tokens; None: no prices are configured."""
        return self._metrics.prices

    def engine_totals(self) -> dict[str, EngineTotals]:
        """The tokens and completions so far, by engine name."""
        return self._metrics.engine_totals()

    @property
    def accounts(self) -> Accounts:
        """The usage of each tenant so far."""
        return self._metrics.accounts

    def metrics(self) -> Iterator[bytes]:
        """Yield one metric family after another. All of them may take tens of milliseconds."""
        return self._metrics.render(self.sessions, self.dispatcher, self.sessions.journal)

    def check_integrity(self) -> None:
        """Recount all state. Call it only between turns of the event loop."""
        self.sessions.check_integrity()
        for attached in self._attached:
            attached.check_integrity()
        self.dispatcher.check_integrity()
        if self.tasks.meters is not None:
            self.tasks.meters.check_integrity()

    def shut_down(self) -> None:
        """Reject new requests and end all sessions. Open reads fail with `Unavailable`."""
        self.is_closing = self.sessions.is_closing = True
        for session in self.sessions:
            session.set_log(None)  # The journal keeps the session for the next process.
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

    def _refuse_readers(self, event: CompletionUnserved) -> None:
        session = self.sessions.find_owner(event.completion.session_id)
        if session is not None:
            session.graph.activation.refuse_readers(event.completion, event.error)

    def _expire(self, session: Session, reason: str) -> None:
        text = f"session {session.id} {reason}"
        self.events.emit(SessionExpired, session, text)
        self.end(session, SessionGone(text))

    def end(self, session: Session, error: ParrotError) -> None:
        """End a session: it can no longer be found, and the backlog frees its calls and values."""
        if session.log is not None:
            session.log.ended()
            session.set_log(None)
        self.sessions.retire(session)
        for attached in self._attached:
            attached.forget(session)
        keeping = [keep(session, error) for keep in self.keepers]
        self.sessions.backlog.add(session.id, self._ending(session, error, keeping))

    def _ending(
        self, session: Session, error: ParrotError, keeping: Sequence[Iterator[int]]
    ) -> Iterator[int]:
        yield from session.graph.close(error)
        yield from self.dispatcher.release_session(session.id)
        yield from chain.from_iterable(keeping)
        self.sessions.remove(session)
        self.events.emit(SessionEnded, session, self.clock.now() - session.created_at)
        if not session.keeps_graph:
            yield from session.graph.free()
