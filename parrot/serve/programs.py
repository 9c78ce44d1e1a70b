"""The requests of programs in a session: calls, variables and reads, each from its request to its
answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    GraphRequest,
    GraphResponse,
    NativeCallRequest,
    SemanticCallRequest,
    VarGetRequest,
    VarGetResponse,
    VarListResponse,
    VarValue,
)
from parrot.serve.graph.graph import ResolvedGraph, naming_call, resolve
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.serve.journal.record import Kind, Payload
from parrot.serve.journal.replay import replay_attempt, replay_settled
from parrot.serve.observers import Observers
from parrot.serve.readers import Reads
from parrot.serve.sessions import Session, SessionRegistry
from parrot.serve.tasks import TaskRunner
from parrot.serve.tenants.quotas import num_bytes, usage_of, usage_of_graph
from parrot.serve.views import read_view, variables_view
from parrot.utils.clock import Clock
from parrot.utils.timers import TimerQueue


class Programs:
    """The verbs of one ServeCore's sessions. Each raises `NotFound`, `SessionGone` or
    `AuthenticationFailed` first of all, and changes nothing when it raises."""

    def __init__(
        self,
        sessions: SessionRegistry,
        runner: TaskRunner,
        observers: Observers,
        timers: TimerQueue,
        clock: Clock,
    ) -> None:
        self._sessions = sessions
        self._runner = runner
        self._observers = observers
        self._clock = clock
        self._reads = Reads(timers, clock)

    def submit_call(self, request: SemanticCallRequest) -> CallResponse:
        """Raises `InvalidRequest`, `CyclicGraph`, `QueueFull`, `QuotaExceeded` and what bindings
        may raise."""
        return self._submit(request)

    def submit_native(self, request: NativeCallRequest) -> CallResponse:
        """Raises as `submit_call` does."""
        return self._submit(request)

    def _submit(self, request: SemanticCallRequest | NativeCallRequest) -> CallResponse:
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        if isinstance(request, NativeCallRequest):
            self._runner.check_native(request)
        if (answer := session.graph.replays.find(request, CallResponse)) is not None:
            return answer
        session.require_room()
        self._runner.require_room(session.tenant)
        session.account.require(**usage_of(request))
        response = self._add_call(session, request)
        self._reads.wake_soon(session)
        self._submitted(session, request, response)
        return response

    def _add_call(
        self, session: Session, request: SemanticCallRequest | NativeCallRequest
    ) -> CallResponse:
        kind = Kind.NATIVE if isinstance(request, NativeCallRequest) else Kind.CALL
        with session.written(kind, request):
            response = session.graph.submit(request)
        session.graph.replays.remember(request, response)
        session.account.add(**usage_of(request))
        return response

    def submit_graph(self, request: GraphRequest) -> GraphResponse:
        """All of a graph for a session that is there, or nothing: then observers are told of its
        variables with names, and of each call. Raises as `submit_call` does; the error names the
        call and its field."""
        assert request.session_id is not None
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        if (answer := session.graph.replays.find(request, GraphResponse)) is not None:
            return answer
        session.require_room()
        with session.written(Kind.GRAPH, request):
            graph = resolve(request, session.id, session.graph.new_variable)
            for index, call in enumerate(graph.calls):
                if isinstance(call, NativeCallRequest):
                    with naming_call(index, call.func_name):
                        self._runner.check_native(call)
            self._runner.require_room(session.tenant)
            session.account.require(**_usage(request, graph))
            answer = self._add_graph(session, request, graph)
        self._reads.wake_soon(session)
        contents = {declared.name: declared.content for declared in request.variables}
        for name, variable in graph.variables.items():
            self._created(session, variable, contents.get(name))
        for call, response in zip(graph.calls, answer.calls, strict=True):
            self._submitted(session, call, response)
        return answer

    def _add_graph(
        self, session: Session, request: GraphRequest, graph: ResolvedGraph
    ) -> GraphResponse:
        responses = session.graph.submit_all(graph.calls, list(graph.variables.values()))
        answer = GraphResponse(
            session_id=session.id,
            variables={name: variable.id for name, variable in graph.variables.items()},
            calls=responses,
        )
        session.graph.replays.remember(request, answer)
        session.account.add(**_usage(request, graph))
        return answer

    def _created(self, session: Session, variable: SemanticVariable, content: str | None) -> None:
        var_id, name = variable.id, variable.name
        self._observers.tell(lambda one: one.variable_created(session, var_id, name, content))

    def _submitted(
        self,
        session: Session,
        request: SemanticCallRequest | NativeCallRequest,
        response: CallResponse,
    ) -> None:
        self._observers.tell(lambda one: one.call_submitted(session, request, response))

    def cancel_call(self, session_id: int, session_auth: str | None, request_id: int) -> None:
        session = self._sessions.authenticate(session_id, session_auth)
        session.graph.cancel_call(request_id)
        self._observers.tell(lambda one: one.cancel_asked(session, request_id=request_id))

    def create_var(
        self, session_id: int, session_auth: str | None, var_name: str, content: str | None
    ) -> str:
        """Raises `QuotaExceeded`."""
        session = self._sessions.authenticate(session_id, session_auth)
        session.require_room()
        session.account.require(**_usage_of_variable(content))
        variable = self._add_variable(session, var_name, content)
        self._created(session, variable, content)
        return variable.id

    def _add_variable(self, session: Session, name: str, content: str | None) -> SemanticVariable:
        session.account.add(**_usage_of_variable(content))
        return session.add_variable(name, content)

    async def list_vars(self, session_id: int, session_auth: str | None) -> VarListResponse:
        session = self._sessions.authenticate(session_id, session_auth)
        found = await variables_view(session)
        self._sessions.authenticate(session_id, session_auth)  # else it was taken apart meanwhile
        return VarListResponse(vars=found)

    def set_var(self, session_id: int, session_auth: str | None, var_id: str, content: str) -> None:
        """Raises `QuotaExceeded`, `AlreadySet`, or `Conflict` if a call makes the variable."""
        session = self._sessions.authenticate(session_id, session_auth)
        session.require_room()
        size = num_bytes([content])
        session.account.require(text_bytes=size)
        session.graph.set_variable(var_id, content)
        session.account.add(text_bytes=size)
        self._observers.tell(lambda one: one.variable_set(session, var_id, content))

    def cancel_var(self, session_id: int, session_auth: str | None, var_id: str) -> None:
        session = self._sessions.authenticate(session_id, session_auth)
        session.graph.cancel_variable(var_id)
        self._observers.tell(lambda one: one.cancel_asked(session, var_id=var_id))

    def variable(self, request: VarGetRequest, var_id: str) -> SemanticVariable:
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        return session.graph.variable(var_id)

    async def read(self, request: VarGetRequest, var_id: str) -> VarGetResponse:
        """Wait for the value, and meanwhile want it. Does not suspend if it is there. Raises the
        variable's error, `TimedOut`, or `QueueFull` (to this reader alone). Cancelling withdraws
        the read."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self._runner.require_room(session.tenant)
        async with session.published():
            with self._observers.reading(session, request, [var_id]):
                await self._reads.value(session, variable, request)
        return await read_view(variable)

    async def first(self, request: FirstVarsRequest) -> FirstVarsResponse:
        """Wait for the first `k` of the variables to be ready, and meanwhile want all. Raises as
        `read` does; the error of a variable only when fewer than `k` are left."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        variables = [session.graph.variable(var_id) for var_id in request.var_ids]
        num_ready = sum(variable.state is VariableState.READY for variable in variables)
        if num_ready < request.k and any(variable.is_idle for variable in variables):
            self._runner.require_room(session.tenant)
        async with session.published():
            with self._observers.reading(session, request, request.var_ids, k=request.k):
                winners = await self._reads.first(session, variables, request)
        read = [(winner.id, await read_view(winner)) for winner in winners]
        return FirstVarsResponse(
            values=[VarValue(var_id=var_id, **dict(value)) for var_id, value in read]
        )

    def stream(self, request: VarGetRequest, var_id: str) -> AsyncGenerator[str]:
        """All the text in deltas, the past ones first. Raises at once what `read` raises before it
        waits; the iterator raises the rest."""
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        variable = session.graph.variable(var_id)
        if variable.is_idle:
            self._runner.require_room(session.tenant)
        return self._stream(session, variable, request)

    async def _stream(
        self, session: Session, variable: SemanticVariable, request: VarGetRequest
    ) -> AsyncGenerator[str]:
        async with session.published():
            with self._observers.reading(session, request, [variable.id], is_stream=True):
                async with aclosing(self._reads.stream(session, variable, request)) as deltas:
                    async for delta in deltas:
                        yield delta

    # From the journal

    def restore(self, session: Session, kind: Kind, fields: Payload) -> None:
        """Do again what a record of the session tells."""
        graph = session.graph
        if "upcoming" in fields:
            graph.ids.upcoming = fields["upcoming"]
        match kind:
            case Kind.CALL:
                self._add_call(session, SemanticCallRequest.model_validate(fields["request"]))
            case Kind.NATIVE:
                self._add_call(session, NativeCallRequest.model_validate(fields["request"]))
            case Kind.GRAPH:
                request = GraphRequest.model_validate(fields["request"])
                made = resolve(request, session.id, graph.new_variable)
                self._add_graph(session, request, made)
            case Kind.VARIABLE:
                self._add_variable(session, fields["name"], fields["content"])
            case Kind.SETTLED:
                variable = replay_settled(graph, fields)
                if variable.producer is None and variable.state is VariableState.READY:
                    session.account.add(text_bytes=num_bytes([variable.text]))
            case Kind.ATTEMPT:
                replay_attempt(graph, fields, self._clock)
            case Kind.READ:
                session.was_read = True

    def restored(self, session: Session) -> None:
        """It goes on: what its program holds runs, if anything was read."""
        self._reads.wake_soon(session)


def _usage(request: GraphRequest, graph: ResolvedGraph) -> dict[str, int]:
    return dict(usage_of_graph(request.variables, len(graph.variables), graph.calls))


def _usage_of_variable(content: str | None) -> dict[str, int]:
    return {"variables": 1, "text_bytes": num_bytes([content or ""])}
