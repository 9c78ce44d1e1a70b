"""One session's graph: its variables, the calls that make and take them, what is wanted of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
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
from parrot.serve.graph.build import Ancestor, Prompt, build_completions, index_parameters
from parrot.serve.graph.flow import Flow
from parrot.serve.graph.links import link
from parrot.serve.graph.nodes import CallOptions, Completion, NativeCall, Reader, Task
from parrot.serve.graph.replays import CallRequest, Replays
from parrot.serve.graph.runner import Predictor, Runner
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter, new_token

Bound = dict[str, SemanticVariable]  # by parameter name


@dataclass(frozen=True, slots=True)
class Call:
    """A submitted call. `successor`: where a stateful call that follows it continues; None for a
    native call."""

    tasks: tuple[Task, ...]
    successor: Ancestor | None


@dataclass(frozen=True, slots=True)
class GraphIds:
    """Counters that all sessions of a ServeCore share."""

    tasks: IdCounter = field(default_factory=lambda: IdCounter(1))
    requests: IdCounter = field(default_factory=lambda: IdCounter(1))


class SessionGraph:
    """Owns the session's variables and tasks. A verb that raises leaves the graph unchanged.

    Tasks run by way of `runner`, when `activation` says that somebody wants them; their results
    come back through the variables alone. `on_demand` holds for calls that do not say it
    themselves: nothing but a reader makes them run."""

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
        self.variables: dict[str, SemanticVariable] = {}
        self.calls: dict[int, Call] = {}
        self.activation = Activation(clock, runner, predictor)
        self._tenant = tenant
        self._on_demand = on_demand
        self._clock = clock
        self._ids = ids
        self._flow = Flow(clock, runner, self.activation)
        self._replays = Replays()

    def num_variables(self, state: VariableState) -> int:
        if state is VariableState.EMPTY:
            return len(self.variables) - sum(self._flow.num_settled.values())
        return self._flow.num_settled[state]

    def variable(self, var_id: str) -> SemanticVariable:
        try:
            return self.variables[var_id]
        except KeyError:
            raise NotFound(f"no variable `{var_id:.80}` in this session") from None

    def add_variable(self, name: str, text: str | None = None) -> SemanticVariable:
        variable = self._new_variable(name, text)
        self._register(variable)
        return variable

    def set_variable(self, var_id: str, text: str) -> None:
        """The program gives the value. Raises `AlreadySet`, or `Conflict` if a call makes it."""
        variable = self.variable(var_id)
        if variable.producer is not None and not variable.is_settled:
            raise Conflict(f"variable `{variable.name}` is the output of a call")
        variable.set(text)

    def answered(self, request: CallRequest) -> CallResponse | None:
        """The answer that the request got before, by its idempotency key; None if it is new. Raises
        `Conflict` if the key was used for another request."""
        return self._replays.find(request)

    def submit(self, request: CallRequest) -> CallResponse:
        """Add a call that was not `answered` before. Raises `InvalidRequest`, `CyclicGraph`,
        `Conflict`, `NotFound` or `AlreadySet`."""
        index_parameters(request.parameters)
        if isinstance(request, NativeCallRequest):
            request_id, bound, call = self._native_call(request)
        else:
            request_id, bound, call = self._semantic_call(request)
        on_demand = self._on_demand if request.on_demand is None else request.on_demand
        for task in call.tasks:
            task.is_held = not on_demand
        self._add_call(request_id, call, bound.values(), request.output_criteria)
        response = _describe(request_id, request.parameters, bound)
        self._replays.remember(request, response)
        return response

    def submit_prompt(self, prompt: Prompt) -> tuple[int, list[Completion]]:
        """Add a call that has no template, and return its id with a completion for each output.
        Only readers make it run."""
        request_id = self._ids.requests.next()
        completions = [
            Completion(
                id=self._ids.tasks.next(),
                request_id=request_id,
                session_id=self.session_id,
                options=prompt.options,
                fill=prompt.fill,
                output=self._new_variable(f"answer_{i}", None),
                sampling=sampling,
                previous=prompt.previous,
                is_held=False,
            )
            for i, sampling in enumerate(prompt.samplings)
        ]
        outputs = [completion.output for completion in completions]
        self._add_call(request_id, Call(tuple(completions), None), outputs)
        return request_id, completions

    def cancel_variable(self, var_id: str) -> None:
        """Stop its producer, if it has one, and fail it. Nothing happens if it is settled."""
        variable = self.variable(var_id)
        error = Cancelled(f"variable `{variable.name}` was cancelled")
        if variable.is_settled:
            return
        if variable.producer is not None:
            self._flow.cancel(variable.producer, error)
        else:
            variable.fail(error)

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
        for variable in self.variables.values():
            if not variable.is_settled:
                variable.fail(error)

    def check_integrity(self) -> None:
        """Recount what is kept incrementally. Only between events of the loop."""
        tasks = [task for call in self.calls.values() for task in call.tasks]
        self.activation.check_integrity(tasks)
        for task in tasks:
            assert task.missing == sum(not variable.is_settled for variable in task.inputs), task
            assert task.is_finished == all(variable.is_settled for variable in task.outputs), task
        for state in VariableState:
            count = sum(variable.state is state for variable in self.variables.values())
            assert count == self.num_variables(state), (state, count)

    def _call(self, request_id: int) -> Call:
        call = self.calls.get(request_id)
        if call is None:
            raise NotFound(f"no request {request_id} in this session")
        return call

    def _ancestor(self, request_id: int | None) -> Ancestor:
        if request_id is None:
            return Ancestor()
        call = self._call(request_id)
        if call.successor is None:
            raise InvalidRequest("a native call has no context to continue", param="successor_of")
        return call.successor

    def _semantic_call(self, request: SemanticCallRequest) -> tuple[int, Bound, Call]:
        ancestor = self._ancestor(request.successor_of)
        bound = self._bind(request.parameters)
        request_id = self._ids.requests.next()
        completions, successor = build_completions(
            request,
            bound,
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
        return request_id, bound, Call(tuple(completions), successor)

    def _native_call(self, request: NativeCallRequest) -> tuple[int, Bound, Call]:
        if not any(parameter.is_output for parameter in request.parameters):
            raise InvalidRequest(f"native function `{request.func_name}` has no output")
        bound = self._bind(request.parameters)
        request_id = self._ids.requests.next()
        task = NativeCall(
            id=self._ids.tasks.next(),
            request_id=request_id,
            session_id=self.session_id,
            options=CallOptions(request.func_name, tenant=self._tenant),
            source=request.func_source,
            timeout_s=request.timeout,
            arguments=tuple((p.name, bound[p.name]) for p in request.parameters if not p.is_output),
            results=tuple((p.name, bound[p.name]) for p in request.parameters if p.is_output),
        )
        return request_id, bound, Call((task,), None)

    def _new_variable(self, name: str, text: str | None) -> SemanticVariable:
        variable = SemanticVariable(new_token(), name, self.session_id)
        if text is not None:
            variable.set(text)
        return variable

    def _register(self, variable: SemanticVariable) -> None:
        self.variables[variable.id] = variable
        if variable.is_settled:  # born with its value: those who need it never waited for it
            self._flow.num_settled[variable.state] += 1
        else:
            variable.on_settled(self._flow.settled)

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

    def _existing(self, var_id: str, parameter: CallParameter) -> SemanticVariable:
        name = parameter.name
        variable = self.variables.get(var_id)
        if variable is None:
            raise NotFound(f"no variable `{var_id:.80}` for parameter `{name}`", param=name)
        if parameter.is_output and variable.is_settled:
            raise AlreadySet(f"the variable of output `{name}` is already set", param=name)
        if parameter.is_output and variable.producer is not None:
            raise Conflict(f"the variable of output `{name}` has a producer", param=name)
        return variable

    def _add_call(
        self,
        request_id: int,
        call: Call,
        variables: Iterable[SemanticVariable],
        criteria: PerformanceCriteria | None = None,
    ) -> None:
        """Make a call and its variables part of the graph, and begin what others want of it. A
        reader with the `criteria` wants its last output. Raises `CyclicGraph`."""
        link(call.tasks)
        for variable in variables:
            if variable.id not in self.variables:
                self._register(variable)
        self.calls[request_id] = call
        now = self._clock.now()
        for task in call.tasks:
            task.times.submitted = now
        for task in call.tasks:
            self._flow.enter(task)
        if criteria is not None and call.tasks:
            last = call.tasks[-1].outputs[-1]
            if not last.is_settled:
                self.activation.add_reader(Reader(last, criteria))


def _describe(request_id: int, parameters: Sequence[CallParameter], bound: Bound) -> CallResponse:
    return CallResponse(
        request_id=request_id,
        param_info=[
            ParameterInfo(
                parameter_name=parameter.name,
                is_output=parameter.is_output,
                var_name=bound[parameter.name].name,
                var_id=bound[parameter.name].id,
            )
            for parameter in parameters
        ],
    )
