"""ServeCore: every verb of the service, each from its request to its answer."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from parrot.protocol.engine_api import (
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
)
from parrot.protocol.errors import (
    NoEngine,
    ParrotError,
    SessionGone,
    Unavailable,
)
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    ModelsResponse,
    NativeCallRequest,
    ReadyResponse,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
    VarGetRequest,
    VarListResponse,
    VarValue,
)
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.graph import GraphIds, SessionGraph
from parrot.serve.graph.links import VariableNode
from parrot.serve.graph.nodes import Completion, CompletionState, NativeCall, Task
from parrot.serve.graph.variable import VariableState
from parrot.serve.metrics import CoreCollector, CoreMetrics
from parrot.serve.native import NativeRunner, Sandbox, check_call
from parrot.serve.observers import Observer, Observers
from parrot.serve.quotas import Usage, num_bytes, require_share, usage_of
from parrot.serve.readers import Reads
from parrot.serve.sessions import Session, SessionExpiry, SessionRegistry, tenant_labels, tenant_of
from parrot.serve.views import engine_view, session_view, value_view, variables_view
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.ids import IdCounter
from parrot.utils.timers import TimerQueue


class ServeCore:
    """One service. Use from one event loop; `close` when done. Its sessions' ids are
    `first_session_id` and up.

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
        self._clock = clock or MonotonicClock()
        self._timers = TimerQueue(self._clock)
        self._sessions = SessionRegistry(config, self._clock, first_session_id)
        self._dispatcher = dispatcher or Dispatcher(config, self._clock)
        self._native = NativeRunner(config, self._clock, sandbox)
        self._metrics = CoreMetrics(tenant_labels(config.api_keys))
        self._observers = Observers(observers)
        self._runner = _TaskRunner(
            self._clock, self._sessions, self._dispatcher, self._native, self._metrics
        )
        self._expiry = SessionExpiry(
            self._timers, self._clock, config.session_life_span, self._expire
        )
        self._reads = Reads(self._timers, self._clock)
        self._ids = GraphIds(IdCounter(1), IdCounter(1))
        self._collector = CoreCollector(self._metrics, self._sessions, self._dispatcher)

    # Sessions

    def create_session(self, request: SessionCreateRequest) -> SessionCreateResponse:
        """Raises `AuthenticationFailed`, `QuotaExceeded`."""
        self._require_open()
        tenant = tenant_of(request.api_key, self.config.api_keys)
        session = self._sessions.create(
            tenant,
            request.apps or (),
            lambda session_id: self._make_graph(session_id, tenant, request.on_demand),
        )
        self._expiry.watch(session)
        self._observers.tell(lambda one: one.session_created(session, request))
        return SessionCreateResponse(session_id=session.id, session_auth=session.auth)

    def session_info(self, session_id: int, session_auth: str | None) -> SessionInfo:
        session = self._sessions.authenticate(session_id, session_auth)
        return session_view(session, self._clock.now(), self._expiry.remaining_s(session))

    def delete_session(self, session_id: int, session_auth: str | None) -> None:
        session = self._sessions.authenticate(session_id, session_auth)
        self._observers.tell(lambda one: one.session_deleted(session))
        self._end(session, SessionGone(f"session {session_id} was deleted"))

    # Calls

    def submit_call(self, request: SemanticCallRequest) -> CallResponse:
        """Raises `InvalidRequest`, `CyclicGraph`, `QueueFull`, `QuotaExceeded` and what bindings
        may raise."""
        return self._submit(request, lambda graph: graph.submit_semantic(request))

    def submit_native(self, request: NativeCallRequest) -> CallResponse:
        """Raises as `submit_call` does."""
        return self._submit(request, lambda graph: graph.submit_native(request))

    def _submit(
        self,
        request: SemanticCallRequest | NativeCallRequest,
        add: Callable[[SessionGraph], CallResponse],
    ) -> CallResponse:
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        if isinstance(request, NativeCallRequest):
            check_call(request)
        if session.graph.is_known(request):
            return add(session.graph)
        self._require_room(session)
        usage = usage_of(request)
        session.account.require(usage)
        response = add(session.graph)
        session.account.add(usage)
        self._observers.tell(lambda one: one.call_submitted(session, request, response))
        return response

    def cancel_call(self, session_id: int, session_auth: str | None, request_id: int) -> None:
        session = self._sessions.authenticate(session_id, session_auth)
        session.graph.cancel_call(request_id)
        self._observers.tell(lambda one: one.cancel_asked(session, request_id=request_id))

    # Variables

    def create_var(
        self, session_id: int, session_auth: str | None, var_name: str, content: str | None
    ) -> str:
        """Raises `QuotaExceeded`."""
        session = self._sessions.authenticate(session_id, session_auth)
        usage = Usage(variables=1, text_bytes=num_bytes([content or ""]))
        session.account.require(usage)
        session.account.add(usage)
        var_id = session.graph.add_variable(var_name, content).variable.id
        self._observers.tell(lambda one: one.variable_created(session, var_id, var_name, content))
        return var_id

    def list_vars(self, session_id: int, session_auth: str | None) -> VarListResponse:
        session = self._sessions.authenticate(session_id, session_auth)
        return VarListResponse(vars=variables_view(session))

    def set_var(self, session_id: int, session_auth: str | None, var_id: str, content: str) -> None:
        """Raises `QuotaExceeded`, `AlreadySet`, or `Conflict` if a call makes the variable."""
        session = self._sessions.authenticate(session_id, session_auth)
        usage = Usage(text_bytes=num_bytes([content]))
        session.account.require(usage)
        session.graph.set_variable(var_id, content)
        session.account.add(usage)
        self._observers.tell(lambda one: one.variable_set(session, var_id, content))

    def cancel_var(self, session_id: int, session_auth: str | None, var_id: str) -> None:
        session = self._sessions.authenticate(session_id, session_auth)
        session.graph.cancel_variable(var_id)
        self._observers.tell(lambda one: one.cancel_asked(session, var_id=var_id))

    def node(self, request: VarGetRequest, var_id: str) -> VariableNode:
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        return session.graph.node(var_id)

    def settled(self, request: VarGetRequest, var_id: str) -> str | None:
        """The value if it is there, None if it has yet to come. Raises the variable's error."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        node = session.graph.node(var_id)
        if not node.is_settled:
            return None
        with self._observers.reading(session, request, [var_id]):
            return node.variable.result()

    async def read(self, request: VarGetRequest, var_id: str) -> str:
        """Wait for the value, and meanwhile want it. Raises the variable's error, `TimedOut`, or
        `QueueFull` (to this reader alone). Cancelling withdraws the read."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        node = session.graph.node(var_id)
        if node.is_idle:
            self._require_room(session)
        with self._observers.reading(session, request, [var_id]):
            return await self._reads.value(session, node, request)

    async def first(self, request: FirstVarsRequest) -> FirstVarsResponse:
        """Wait for the first `k` of the variables to be ready, and meanwhile want all. Raises as
        `read` does; the error of a variable only when fewer than `k` are left."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        nodes = [session.graph.node(var_id) for var_id in request.var_ids]
        num_ready = sum(node.variable.state is VariableState.READY for node in nodes)
        if num_ready < request.k and any(node.is_idle for node in nodes):
            self._require_room(session)
        with self._observers.reading(session, request, request.var_ids, k=request.k):
            winners = await self._reads.first(session, nodes, request)
        by_id = {node.variable.id: node for node in nodes}
        return FirstVarsResponse(
            values=[
                VarValue(var_id=winner.id, **dict(value_view(by_id[winner.id])))
                for winner in winners
            ]
        )

    def stream(self, request: VarGetRequest, var_id: str) -> AsyncGenerator[str]:
        """All the text in deltas, the past ones first. Raises at once what `read` raises before it
        waits; the iterator raises the rest."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        node = session.graph.node(var_id)
        if node.is_idle:
            self._require_room(session)
        return self._stream(session, node, request)

    async def _stream(
        self, session: Session, node: VariableNode, request: VarGetRequest
    ) -> AsyncGenerator[str]:
        with self._observers.reading(session, request, [node.variable.id], is_stream=True):
            async with aclosing(self._reads.stream(session, node, request)) as deltas:
                async for delta in deltas:
                    yield delta

    # Engines and the service itself

    async def register_engine(self, request: RegisterRequest) -> RegisterResponse:
        self._require_open()
        engine_id = await self._dispatcher.register_engine(request.engine_config)
        self._observers.tell(lambda one: one.engine_registered(request.engine_config))
        return RegisterResponse(engine_id=engine_id)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        return self._dispatcher.heartbeat(request)

    def models(self) -> ModelsResponse:
        return self._dispatcher.models()

    @property
    def is_ready(self) -> bool:
        """An engine is registered and the service is not going down."""
        return not self.is_closing and bool(self._dispatcher.engines())

    def readiness(self) -> ReadyResponse:
        """Raises `NoEngine`, or `Unavailable` when the service is going down."""
        self._require_open()
        if not (engines := self._dispatcher.engines()):
            raise NoEngine("no engine is registered")
        return ReadyResponse(
            num_queued=self.num_queued, engines=[engine_view(engine) for engine in engines]
        )

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    def metrics(self) -> bytes:
        return self._collector.render()

    def check_integrity(self) -> None:
        """Recount every book. Only between events of the loop."""
        for session in self._sessions:
            session.graph.check_integrity()
        self._dispatcher.check_integrity()

    def shut_down(self) -> None:
        """Admit nothing more, and end every session: open reads get `Unavailable` now."""
        self.is_closing = True
        for session in self._sessions:
            self._end(session, Unavailable("ServeCore is shutting down"))

    async def close(self) -> None:
        self.shut_down()
        await self._native.close()
        await self._dispatcher.close()
        await self._timers.close()
        self._observers.tell(lambda one: one.core_closed(self._dispatcher.kv_counts()))

    def _make_graph(self, session_id: int, tenant: str, on_demand: bool) -> SessionGraph:
        return SessionGraph(
            session_id,
            tenant,
            on_demand=on_demand,
            runner=self._runner,
            predictor=self._dispatcher.estimates,
            clock=self._clock,
            ids=self._ids,
        )

    def _require_open(self) -> None:
        if self.is_closing:
            raise Unavailable("ServeCore is shutting down")

    def _require_room(self, session: Session) -> None:
        """Before anything that may set work going. What one read sets going is queued all at once,
        however much it is: it exists already, and refusing a part of it would fail the whole."""
        limit = self.config.global_scheduler.max_queue_size
        if self._dispatcher.num_queued + self._native.num_waiting >= limit:
            queues = (self._dispatcher.queued_by_tenant, self._native.waiting_by_tenant)
            require_share(session.tenant, limit, *queues)

    def _expire(self, session: Session) -> None:
        self._end(session, SessionGone(f"session {session.id} has expired"))

    def _end(self, session: Session, error: ParrotError) -> None:
        self._expiry.forget(session)
        session.graph.close(error)
        self._dispatcher.release_session(session.id)
        self._sessions.remove(session)
        self._metrics.session_ended(self._clock.now() - session.created_at)
        self._observers.tell(lambda one: one.session_ended(session))


class _TaskRunner:
    """Implements `graph.links.Runner`. A task that ends is activity of its session."""

    def __init__(
        self,
        clock: Clock,
        sessions: SessionRegistry,
        dispatcher: Dispatcher,
        native: NativeRunner,
        metrics: CoreMetrics,
    ) -> None:
        self._clock = clock
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._native = native
        self._metrics = metrics

    def start(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._dispatcher.submit(task)
        else:
            self._native.start(task)

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        self._dispatcher.expect(completion, forecast)

    def unexpect(self, completion: Completion) -> None:
        self._dispatcher.unexpect(completion)

    def withdraw(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._dispatcher.withdraw(task)
        else:
            self._native.stop(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        if isinstance(task, Completion):
            self._dispatcher.cancel(task, error)
        else:
            self._cancel_native(task, error)

    def reprioritise(self, completion: Completion) -> None:
        self._dispatcher.reprioritise(completion)

    def finished(self, task: Task) -> None:
        session = self._sessions.find(task.session_id)
        if session is not None:
            session.last_active = self._clock.now()
            texts = [v.text for v in task.outputs() if v.state is VariableState.READY]
            session.account.add(Usage(text_bytes=num_bytes(texts)))
            self._metrics.task_finished(task, session.tenant)

    def progressed(self, session_id: int, remaining_s: float) -> None:
        self._dispatcher.progressed(session_id, remaining_s)

    def _cancel_native(self, task: NativeCall, error: ParrotError) -> None:
        self._native.stop(task)
        task.state = CompletionState.CANCELLED
        for variable in task.outputs():
            if not variable.is_settled:
                variable.fail(error)
