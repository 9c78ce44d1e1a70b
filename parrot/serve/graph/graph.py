"""One session's graph: its variables, the calls that make and take them, what is wanted of it."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
    CyclicGraph,
    InvalidRequest,
    NotFound,
    ParrotError,
)
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    NativeCallRequest,
    ParameterInfo,
    SemanticCallRequest,
)
from parrot.serve.graph.activation import Activation
from parrot.serve.graph.build import (
    NO_ANCESTOR,
    Ancestor,
    build_completions,
    continue_from,
    index_parameters,
    plan_call,
)
from parrot.serve.graph.cycles import find_cycle
from parrot.serve.graph.flow import Flow
from parrot.serve.graph.links import (
    Predictor,
    Reader,
    Runner,
    TaskNode,
    VariableNode,
    link,
    unlink,
)
from parrot.serve.graph.nodes import CallOptions, NativeCall, Task
from parrot.serve.graph.replays import Replays
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter, new_token

CallRequest = SemanticCallRequest | NativeCallRequest
Bound = dict[str, VariableNode]  # by parameter name


@dataclass(frozen=True, slots=True)
class Call:
    """A submitted call. `successor`: where a stateful call that follows it continues; None for a
    native call."""

    request_id: int
    tasks: tuple[TaskNode, ...]
    successor: Ancestor | None


@dataclass(frozen=True, slots=True)
class GraphIds:
    """Counters that all sessions of a ServeCore share."""

    tasks: IdCounter = field(default_factory=lambda: IdCounter(1))
    requests: IdCounter = field(default_factory=lambda: IdCounter(1))


class SessionGraph:
    """Owns the session's variables and tasks. A verb that raises leaves the graph unchanged.

    Tasks run by way of `runner`; their results come back through the variables alone. `on_demand`
    holds for calls that do not say it themselves: nothing but a reader makes them run."""

    def __init__(
        self,
        session_id: int,
        tenant: str,
        *,
        on_demand: bool = False,
        runner: Runner,
        predictor: Predictor,
        clock: Clock,
        ids: GraphIds,
    ) -> None:
        self.session_id = session_id
        self.variables: dict[str, VariableNode] = {}
        self.calls: dict[int, Call] = {}
        self._tenant = tenant
        self._on_demand = on_demand
        self._clock = clock
        self._ids = ids
        self._activation = Activation(clock, runner, predictor)
        self._flow = Flow(clock, runner, self._activation)
        self._replays = Replays()

    @property
    def num_started(self) -> int:
        """Tasks that are with the dispatcher or the sandbox now."""
        return self._activation.num_started

    def num_variables(self, state: VariableState) -> int:
        if state is VariableState.EMPTY:
            return len(self.variables) - sum(self._flow.num_settled.values())
        return self._flow.num_settled[state]

    def node(self, var_id: str) -> VariableNode:
        try:
            return self.variables[var_id]
        except KeyError:
            raise NotFound(f"no variable `{var_id:.80}` in this session") from None

    def add_variable(self, name: str, text: str | None = None) -> VariableNode:
        node = self._new_variable(name, text)
        self._register(node)
        return node

    def set_variable(self, var_id: str, text: str) -> None:
        """The program gives the value. Raises `AlreadySet`, or `Conflict` if a call makes it."""
        node = self.node(var_id)
        if node.producer is not None and not node.is_settled:
            raise Conflict(f"variable `{node.variable.name}` is the output of a call")
        node.variable.set(text)

    def is_known(self, request: CallRequest) -> bool:
        """Whether its idempotency key was used before, so that submitting it adds no call."""
        return request.idempotency_key in self._replays

    def submit_semantic(self, request: SemanticCallRequest) -> CallResponse:
        if (replay := self._replays.find(request)) is not None:
            return replay
        ancestor = self._ancestor(request.successor_of)
        plan = plan_call(request, follows_text=bool(ancestor.tail))
        bound = self._bind(request.parameters)
        variables = {name: node.variable for name, node in bound.items()}
        request_id = self._ids.requests.next()
        completions = build_completions(
            plan,
            variables,
            ancestor,
            options=CallOptions(
                func_name=request.func_name or f"call_{request_id}",
                models=tuple(request.models),
                cache_prefix=request.cache_prefix,
                chat=request.chat,
                tenant=self._tenant,
                reuse=request.reuse,
            ),
            session_id=self.session_id,
            request_id=request_id,
            next_id=self._ids.tasks.next,
        )
        successor = continue_from(plan, completions, variables, ancestor)
        return self._add_call(request, request_id, completions, bound, successor)

    def submit_native(self, request: NativeCallRequest) -> CallResponse:
        if (replay := self._replays.find(request)) is not None:
            return replay
        index_parameters(request.parameters)
        if not any(parameter.is_output for parameter in request.parameters):
            raise InvalidRequest(f"native function `{request.func_name}` has no output")
        bound = self._bind(request.parameters)
        request_id = self._ids.requests.next()
        task = NativeCall(
            id=self._ids.tasks.next(),
            request_id=request_id,
            session_id=self.session_id,
            func_name=request.func_name,
            source=request.func_source,
            timeout_s=request.timeout,
            tenant=self._tenant,
            arguments=_select(request.parameters, bound, is_output=False),
            results=_select(request.parameters, bound, is_output=True),
        )
        return self._add_call(request, request_id, [task], bound, None)

    def add_reader(
        self,
        node: VariableNode,
        criteria: PerformanceCriteria,
        *,
        deadline: float | None = None,
        wants_stream: bool = False,
        may_lose: bool = False,
    ) -> Reader:
        """Want an unsettled variable until `remove_reader`."""
        reader = Reader(node, criteria, deadline, wants_stream, may_lose)
        self._activation.add_reader(reader)
        return reader

    def remove_reader(self, reader: Reader) -> None:
        self._activation.remove_reader(reader)

    def wake(self, until: float = inf) -> bool:
        """Run in the background what the program holds and has submitted `until` then: every call
        that is not on demand, until its outputs are cancelled or released, or a reader leaves one
        of them. False if nothing is left to be woken later."""
        return self._activation.wake(until)

    def release(self, node: VariableNode) -> None:
        """The program has decided against the variable: do not make it in the background."""
        if node.producer is not None:
            self._activation.release(node.producer)

    def cancel_variable(self, var_id: str) -> None:
        """Stop its producer, if it has one, and fail it. Nothing happens if it is settled."""
        node = self.node(var_id)
        error = Cancelled(f"variable `{node.variable.name}` was cancelled")
        if node.is_settled:
            return
        if node.producer is not None:
            self._flow.cancel(node.producer, error)
        else:
            node.variable.fail(error)

    def cancel_call(self, request_id: int) -> None:
        """Cancel every output of the call that is not settled."""
        error = Cancelled(f"request {request_id} was cancelled")
        for task in reversed(self._call(request_id).tasks):
            self._flow.cancel(task, error)

    def close(self, error: ParrotError) -> None:
        """The session ends: stop all work, fail every variable that is not settled."""
        for call in reversed(self.calls.values()):
            for task in reversed(call.tasks):
                self._flow.cancel(task, error)
        for node in self.variables.values():
            if not node.is_settled:
                node.variable.fail(error)

    def check_integrity(self) -> None:
        """Recount what is kept incrementally. Only between events of the loop."""
        self._flow.check_integrity()
        tasks = [task for call in self.calls.values() for task in call.tasks]
        self._activation.check_integrity(tasks)
        for task in tasks:
            assert task.missing == sum(not node.is_settled for node in task.inputs), task.task
            assert task.is_finished == all(node.is_settled for node in task.outputs), task.task
        for state in VariableState:
            count = sum(node.variable.state is state for node in self.variables.values())
            assert count == self.num_variables(state), (state, count)

    def _call(self, request_id: int) -> Call:
        call = self.calls.get(request_id)
        if call is None:
            raise NotFound(f"no request {request_id} in this session")
        return call

    def _ancestor(self, request_id: int | None) -> Ancestor:
        if request_id is None:
            return NO_ANCESTOR
        call = self._call(request_id)
        if call.successor is None:
            raise InvalidRequest("a native call has no context to continue", param="successor_of")
        return call.successor

    def _new_variable(self, name: str, text: str | None) -> VariableNode:
        node = VariableNode(SemanticVariable(new_token(), name, self.session_id))
        if text is not None:
            node.variable.set(text)
        return node

    def _register(self, node: VariableNode) -> None:
        self.variables[node.variable.id] = node
        if node.is_settled:  # born with its value: those who need it never waited for it
            self._flow.num_settled[node.variable.state] += 1
        else:
            node.variable.on_settled(self._on_settled)

    def _on_settled(self, variable: SemanticVariable) -> None:
        self._flow.settled(self.variables[variable.id])

    def _bind(self, parameters: Sequence[CallParameter]) -> Bound:
        """The variable of each parameter; new ones are not registered yet."""
        bound: Bound = {}
        for parameter in parameters:
            if parameter.var_id is not None:
                bound[parameter.name] = self._existing(parameter.var_id, parameter)
            else:
                bound[parameter.name] = self._new_variable(parameter.name, parameter.value)
        outputs = [bound[parameter.name] for parameter in parameters if parameter.is_output]
        if len(set(outputs)) < len(outputs):
            raise InvalidRequest("two outputs name the same variable")
        return bound

    def _existing(self, var_id: str, parameter: CallParameter) -> VariableNode:
        name = parameter.name
        node = self.variables.get(var_id)
        if node is None:
            raise NotFound(f"no variable `{var_id:.80}` for parameter `{name}`", param=name)
        if parameter.is_output and node.is_settled:
            raise AlreadySet(f"the variable of output `{name}` is already set", param=name)
        if parameter.is_output and node.producer is not None:
            raise Conflict(f"the variable of output `{name}` has a producer", param=name)
        return node

    def _add_call(
        self,
        request: CallRequest,
        request_id: int,
        tasks: Sequence[Task],
        bound: Bound,
        successor: Ancestor | None,
    ) -> CallResponse:
        fresh = {node.variable.id: node for node in bound.values()}
        known = ChainMap(fresh, self.variables)
        on_demand = self._on_demand if request.on_demand is None else request.on_demand
        nodes = tuple(_task_node(task, known, is_held=not on_demand) for task in tasks)
        _link_all(nodes)
        for node in bound.values():
            if node.variable.id not in self.variables:
                self._register(node)
        self.calls[request_id] = Call(request_id, nodes, successor)
        response = _describe(request_id, request.parameters, bound)
        self._replays.remember(request, response)
        self._enter(nodes, request.output_criteria)
        return response

    def _enter(self, nodes: Sequence[TaskNode], criteria: PerformanceCriteria | None) -> None:
        """The call is part of the graph now; whatever it owes to others may begin."""
        now = self._clock.now()
        for node in nodes:
            node.task.times.submitted = now
        for node in nodes:
            self._flow.enter(node)
        if criteria is not None and nodes and not nodes[-1].outputs[-1].is_settled:
            self._activation.add_reader(Reader(nodes[-1].outputs[-1], criteria))


def _select(
    parameters: Sequence[CallParameter], bound: Bound, *, is_output: bool
) -> tuple[tuple[str, SemanticVariable], ...]:
    return tuple(
        (parameter.name, bound[parameter.name].variable)
        for parameter in parameters
        if parameter.is_output is is_output
    )


def _task_node(task: Task, known: Mapping[str, VariableNode], *, is_held: bool) -> TaskNode:
    inputs = dict.fromkeys(known[variable.id] for variable in task.inputs())
    outputs = tuple(known[variable.id] for variable in task.outputs())
    return TaskNode(task, tuple(inputs), outputs, is_held=is_held)


def _link_all(nodes: Sequence[TaskNode]) -> None:
    """Link all, or none and raise `CyclicGraph`."""
    for count, node in enumerate(nodes, start=1):
        link(node)
        if (cycle := find_cycle(node)) is not None:
            for linked in reversed(nodes[:count]):
                unlink(linked)
            names = " -> ".join(f"`{part.variable.name}`" for part in [*cycle, cycle[0]])
            raise CyclicGraph(f"the call would close a cycle: {names}")


def _describe(request_id: int, parameters: Sequence[CallParameter], bound: Bound) -> CallResponse:
    return CallResponse(
        request_id=request_id,
        param_info=[
            ParameterInfo(
                parameter_name=parameter.name,
                is_output=parameter.is_output,
                var_name=bound[parameter.name].variable.name,
                var_id=bound[parameter.name].variable.id,
            )
            for parameter in parameters
        ],
    )
