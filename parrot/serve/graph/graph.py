"""The graph of one session: its variables, and the calls that produce and consume them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
    InvalidRequest,
    NotFound,
    ParrotError,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    GraphParameter,
    GraphRequest,
    NativeCallRequest,
    NativeGraphCall,
    ParameterInfo,
    SemanticCallRequest,
    SemanticGraphCall,
)
from parrot.serve.graph.activation import Activation, Propagation
from parrot.serve.graph.build import (
    Ancestor,
    Prompt,
    build_completions,
    index_parameters,
    link,
    link_all,
)
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Executor,
    NativeCall,
    Predictor,
    Reader,
    SemanticVariable,
    Task,
    VariableState,
    default_func_name,
)
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter, SecretIds
from parrot.utils.tasks import Backlog
from parrot.utils.traceparent import SessionSpans

Repeatable = SemanticCallRequest | NativeCallRequest | GraphRequest
Answer = TypeVar("Answer", bound=BaseModel)


class IdempotentResponses:
    """The responses of one session to requests with an idempotency key."""

    def __init__(self) -> None:
        self._answers: dict[str | None, tuple[bytes, BaseModel]] = {}

    def find(self, request: Repeatable, kind: type[Answer]) -> Answer | None:
        key = request.idempotency_key
        if key not in self._answers:
            return None
        fingerprint, response = self._answers[key]
        if fingerprint != _fingerprint(request):
            raise Conflict("the idempotency key was used for another request; send a new key")
        assert isinstance(response, kind)
        return response

    def remember(self, request: Repeatable, response: BaseModel) -> None:
        self._answers[request.idempotency_key] = (_fingerprint(request), response)


def _fingerprint(request: Repeatable) -> bytes:
    content = request.model_dump_json(exclude={"session_auth"})
    return hashlib.sha256(f"{type(request).__name__} {content}".encode()).digest()


@dataclass(frozen=True, slots=True)
class Shared:
    """The counters and the backlog that all graphs of a ServeCore share."""

    tasks: IdCounter = field(default_factory=lambda: IdCounter(1))
    backlog: Backlog = field(default_factory=Backlog)


@dataclass(frozen=True, slots=True)
class GraphServices:
    """The services that a graph uses."""

    executor: Executor
    predictor: Predictor
    clock: Clock
    backlog: Backlog  # Runs walks through the graph in slices.


class SessionIds:
    """Creates the ids of one session: task ids from the shared counter, request ids from a counter
    of the session, so that no program can count others' requests, and variable ids from the
    session's secret."""

    def __init__(self, shared: Shared, secret: str) -> None:
        self.tasks, self.requests = shared.tasks, IdCounter(1)
        self.variables = SecretIds(secret)

    @property
    def upcoming(self) -> list[int]:
        """The numbers of the next ids. Setting an earlier value creates the same ids again."""
        return [self.tasks.upcoming, self.requests.upcoming, self.variables.upcoming]

    @upcoming.setter
    def upcoming(self, numbers: Sequence[int]) -> None:
        self.tasks.upcoming, self.requests.upcoming, self.variables.upcoming = numbers


CallRequest = SemanticCallRequest | NativeCallRequest
Bound = dict[str, SemanticVariable]  # By parameter name.


@dataclass(frozen=True, slots=True)
class Call:
    """A submitted call."""

    tasks: tuple[Task, ...]
    successor: Ancestor | None  # Where a stateful successor continues. None: a native call.


@dataclass(frozen=True, slots=True)
class _Draft:
    """A call that is not part of the graph yet."""

    request_id: int
    call: Call
    variables: Sequence[SemanticVariable]  # The variables of all parameters, new or existing.
    criteria: PerformanceCriteria | None = None


class SessionGraph:
    """Owns the variables and tasks of a session. A method that raises leaves the graph unchanged.

    `activation` starts tasks on `services.executor`. The executor reports results only by settling
    variables, and `propagation` handles settled variables."""

    def __init__(
        self,
        session_id: int,
        tenant: str,
        ids: SessionIds,
        services: GraphServices,
        *,
        cache_salt: str = "",
        on_demand: bool = False,
        trace_id: str | None = None,
    ) -> None:
        """`on_demand`: the default for calls without this option. Such calls run only with a
        reader.

        `trace_id`: None if tracing is off. Empty: only calls with a caller's span are traced."""
        clock, executor, backlog = services.clock, services.executor, services.backlog
        self.session_id = session_id
        self.spans = None if trace_id is None else SessionSpans(trace_id, session_id)
        self.variables: dict[str, SemanticVariable] = {}
        self.calls: dict[int, Call] = {}
        self.activation = Activation(clock, executor, services.predictor, backlog)
        # Created for the first request with an idempotency key.
        self._responses: IdempotentResponses | None = None
        self._tenant = tenant
        self.cache_salt = cache_salt
        self._on_demand = on_demand
        self._clock = clock
        self.ids = ids
        self.propagation = Propagation(clock, executor, self.activation, backlog)

    def num_variables(self, state: VariableState) -> int:
        if state is VariableState.EMPTY:
            return len(self.variables) - sum(self.propagation.num_settled.values())
        return self.propagation.num_settled[state]

    def variable(self, var_id: str) -> SemanticVariable:
        try:
            return self.variables[var_id]
        except KeyError:
            raise NotFound(f"no variable `{var_id:.80}` in this session") from None

    def completion(self, request_id: int, task_id: int) -> Completion:
        """A completion of a call. Raises `NotFound` if the session has no such call, and `KeyError`
        if the call has no such completion."""
        for task in self._call(request_id).tasks:
            if task.id == task_id and isinstance(task, Completion):
                return task
        raise KeyError(f"no completion {task_id} of request {request_id}")

    def answered(self, request: Repeatable, kind: type[Answer]) -> Answer | None:
        """The response to an earlier request with this idempotency key. Raises `Conflict` if the
        requests differ."""
        return None if self._responses is None else self._responses.find(request, kind)

    def remember(self, request: Repeatable, response: BaseModel) -> None:
        """Keep the response if the request has an idempotency key."""
        if request.idempotency_key is not None:
            self._responses = self._responses or IdempotentResponses()
            self._responses.remember(request, response)

    def add_variable(self, name: str, text: str | None = None) -> SemanticVariable:
        variable = self.new_variable(name, text)
        self._register(variable)
        return variable

    def new_variable(self, name: str, text: str | None = None) -> SemanticVariable:
        """Create a variable that is not part of the graph, and set it to `text` if given."""
        variable = SemanticVariable(self.ids.variables.next(), name, self.session_id)
        if text is not None:
            variable.set(text)
            variable.set_at = self._clock.now()
        return variable

    def set_variable(self, var_id: str, text: str) -> None:
        """Set a variable for the program. Raises `AlreadySet`, or `Conflict` if the variable is the
        output of a call."""
        variable = self.variable(var_id)
        if variable.producer is not None and not variable.is_settled:
            raise Conflict(f"variable `{variable.name}` is the output of a call")
        variable.set(text)
        variable.set_at = self._clock.now()

    def submit(self, request: CallRequest) -> CallResponse:
        """Add a call. Raises `InvalidRequest`, `CyclicGraph`, `Conflict`, `NotFound` or
        `AlreadySet`."""
        draft = self._draft(request, {})
        link(draft.call.tasks)
        self._add([draft], draft.call.tasks)
        return _describe(draft, request)

    def submit_all(
        self, requests: Sequence[CallRequest], variables: Sequence[SemanticVariable]
    ) -> list[CallResponse]:
        """Add new variables and calls that may use them. Raises the errors of `submit`, with the
        index of the call. After an error nothing has been added."""
        new = {variable.id: variable for variable in variables}
        made: set[SemanticVariable] = set()
        drafts = []
        for index, request in enumerate(requests):
            with naming_call(index, request.func_name):
                draft = self._draft(request, new)
                _add_outputs(draft, made)
            drafts.append(draft)
        tasks = link_all([task for draft in drafts for task in draft.call.tasks])
        for variable in variables:
            self._register(variable)
        self._add(drafts, tasks)
        return [_describe(*pair) for pair in zip(drafts, requests, strict=True)]

    def submit_prompt(self, prompt: Prompt) -> tuple[int, list[Completion]]:
        """Add a call without a template. Returns its request id and a completion for each output.
        Raises `CyclicGraph`, and `AlreadySet` or `Conflict` for `prompt.output`."""
        if prompt.output is not None:
            _require_unset(prompt.output, prompt.output.name)
        request_id = self.ids.requests.next()
        completions = [
            Completion(
                id=self.ids.tasks.next(),
                request_id=request_id,
                session_id=self.session_id,
                options=prompt.options,
                fill=prompt.fill,
                output=prompt.output or self.new_variable(f"answer_{i}"),
                sampling=sampling,
                previous=prompt.previous,
                allows_background=prompt.allows_background and not self._on_demand,
                conversation=prompt.conversation,
                conversation_inputs=prompt.conversation_inputs,
            )
            for i, sampling in enumerate(prompt.samplings)
        ]
        call = Call(tuple(completions), None)
        link(call.tasks)
        outputs = [completion.output for completion in completions]
        self._add([_Draft(request_id, call, outputs)], call.tasks)
        return request_id, completions

    def cancel_variable(self, var_id: str) -> None:
        """Cancel the variable's producer, if any, and fail the variable. Does nothing if the
        variable is settled."""
        variable = self.variable(var_id)
        error = Cancelled(f"variable `{variable.name}` was cancelled")
        if variable.is_settled:
            return
        if variable.producer is not None:
            self.propagation.cancel(variable.producer, error)
        else:
            variable.fail(error)

    def cancel_call(self, request_id: int) -> None:
        """Cancel all unfinished tasks of the call."""
        unfinished = [task for task in self._call(request_id).tasks if not task.is_finished]
        for task in reversed(unfinished):
            self.propagation.cancel(task, Cancelled(f"request {request_id} was cancelled"))

    def close(self, error: ParrotError) -> Iterator[int]:
        """Close the graph: no task starts from now on. The steps of the result cancel all tasks and
        fail all unsettled variables."""
        tasks = (task for call in reversed(self.calls.values()) for task in reversed(call.tasks))
        return self.propagation.close(tasks, self.variables.values(), error)

    def free(self) -> Iterator[int]:
        """Free the memory of a closed graph, one variable or call per step."""
        # The objects form reference cycles. The garbage collector would free all of them in one
        # turn of the event loop.
        for variable in self.variables.values():
            variable.unlink()
            yield 1
        for parts in (self.calls, self.variables):
            while parts:
                parts.popitem()
                yield 1

    def check_integrity(self) -> None:
        """Recount the counters of the graph. Only between events of the loop."""
        tasks = [task for call in self.calls.values() for task in call.tasks]
        self.activation.check_integrity(tasks)
        self.propagation.check_integrity(tasks)
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

    def _draft(self, request: CallRequest, new: Mapping[str, SemanticVariable]) -> _Draft:
        """`new`: variables that are added to the graph together with the call, by id."""
        index_parameters(request.parameters)
        if isinstance(request, NativeCallRequest):
            draft = self._native_call(request, new)
        else:
            draft = self._semantic_call(request, new)
        on_demand = self._on_demand if request.on_demand is None else request.on_demand
        for task in draft.call.tasks:
            task.allows_background = not on_demand
        return draft

    def _semantic_call(
        self, request: SemanticCallRequest, new: Mapping[str, SemanticVariable]
    ) -> _Draft:
        ancestor = self._ancestor(request.successor_of)
        bound = self._bind(request.parameters, new)
        request_id = self.ids.requests.next()
        completions, successor = build_completions(
            request,
            bound,
            ancestor,
            options=CallOptions(
                func_name=request.func_name or default_func_name(request_id),
                models=tuple(request.models),
                cache_prefix=request.cache_prefix,
                chat=request.chat,
                tenant=self._tenant,
                cache_salt=self.cache_salt,
                reuse=request.reuse,
            ),
            session_id=self.session_id,
            request_id=request_id,
            next_id=self.ids.tasks.next,
        )
        call = Call(tuple(completions), successor)
        return _Draft(request_id, call, list(bound.values()), request.output_criteria)

    def _native_call(
        self, request: NativeCallRequest, new: Mapping[str, SemanticVariable]
    ) -> _Draft:
        if not any(parameter.is_output for parameter in request.parameters):
            raise InvalidRequest(f"native function `{request.func_name}` has no output")
        bound = self._bind(request.parameters, new)
        request_id = self.ids.requests.next()
        task = NativeCall(
            id=self.ids.tasks.next(),
            request_id=request_id,
            session_id=self.session_id,
            options=CallOptions(request.func_name, tenant=self._tenant),
            source=request.func_source,
            timeout_s=request.timeout,
            arguments=tuple((p.name, bound[p.name]) for p in request.parameters if not p.is_output),
            results=tuple((p.name, bound[p.name]) for p in request.parameters if p.is_output),
        )
        call = Call((task,), None)
        return _Draft(request_id, call, list(bound.values()), request.output_criteria)

    def _register(self, variable: SemanticVariable) -> None:
        self.variables[variable.id] = variable
        if variable.is_settled:  # It was created with its value, so no consumer has waited.
            self.propagation.num_settled[variable.state] += 1
        else:
            variable.on_settled(self.propagation.settled)

    def _bind(
        self, parameters: Sequence[CallParameter], new: Mapping[str, SemanticVariable]
    ) -> Bound:
        """The variable of each parameter. New variables are not registered yet."""
        bound: Bound = {}
        for parameter in parameters:
            if parameter.var_id is not None:
                variable = new.get(parameter.var_id) or self.variables.get(parameter.var_id)
                bound[parameter.name] = _checked(variable, parameter)
            else:
                bound[parameter.name] = self.new_variable(parameter.name, parameter.value)
        outputs = [bound[parameter.name] for parameter in parameters if parameter.is_output]
        if len(set(outputs)) < len(outputs):
            raise InvalidRequest("two outputs have the same variable; give each its own")
        return bound

    def _add(self, drafts: Iterable[_Draft], tasks: Iterable[Task]) -> None:
        """Add linked calls and their variables to the graph, and start their wanted tasks. `tasks`:
        the tasks of all calls, producers first. A call with `output_criteria` gets a permanent
        reader of its last output."""
        for draft in drafts:
            for variable in draft.variables:
                if variable.id not in self.variables:
                    self._register(variable)
            self.calls[draft.request_id] = draft.call
        now, spans = self._clock.now(), self.spans
        for task in tasks:
            task.times.submitted = now
            caller = task.options.traceparent
            task.traceparent = caller if spans is None else spans.header(caller, task.id)
        for task in tasks:
            self.propagation.add_task(task)
        for draft in drafts:
            if draft.criteria is not None and draft.call.tasks:
                last = draft.call.tasks[-1].outputs[-1]
                if not last.is_settled:
                    reader = Reader(last, draft.criteria, has_client=False)
                    self.activation.add_reader(reader)


@contextmanager
def naming_call(index: int, func_name: str | None) -> Iterator[None]:
    """Add the call's index and name to the errors that the block raises."""
    try:
        yield
    except ParrotError as error:
        name = "" if func_name is None else f" (`{func_name}`)"
        param = f"calls.{index}" if error.param is None else f"calls.{index}.{error.param}"
        raise type(error)(f"call {index}{name}: {error.message}", param=param) from None


def _checked(variable: SemanticVariable | None, parameter: CallParameter) -> SemanticVariable:
    """Return the variable of a parameter. Raises an error if the parameter cannot use it."""
    name = parameter.name
    if variable is None:
        raise NotFound(f"no variable `{parameter.var_id:.80}` for parameter `{name}`", param=name)
    if parameter.is_output:
        _require_unset(variable, name)
    return variable


def _require_unset(variable: SemanticVariable, name: str) -> None:
    """Raise `AlreadySet` or `Conflict` if the variable cannot be the output `name` of a call."""
    if variable.is_settled:
        raise AlreadySet(f"the variable of output `{name}` is already set", param=name)
    if variable.producer is not None:
        raise Conflict(f"the variable of output `{name}` is the output of a call", param=name)


def _add_outputs(draft: _Draft, made: set[SemanticVariable]) -> None:
    """Add the outputs of the call to `made`. Raises `Conflict` if another call of the same request
    makes one of them."""
    for task in draft.call.tasks:
        for output in task.outputs:
            if output in made:
                raise Conflict(f"`{output.name}` is already the output of another call")
            made.add(output)


def _describe(draft: _Draft, request: CallRequest) -> CallResponse:
    return CallResponse(
        request_id=draft.request_id,
        param_info=[
            ParameterInfo(
                parameter_name=parameter.name,
                is_output=parameter.is_output,
                var_name=variable.name,
                var_id=variable.id,
            )
            for parameter, variable in zip(request.parameters, draft.variables, strict=True)
        ],
    )


Scope = dict[str, int | str | None]
NewVariable = Callable[[str, str | None], SemanticVariable]
"""Creates a variable with a name and an optional value."""


@dataclass(frozen=True, slots=True)
class ResolvedGraph:
    """The variables and calls of a `GraphRequest`, with variable ids in place of names."""

    variables: dict[str, SemanticVariable] = field(default_factory=dict)  # New, by name.
    calls: list[SemanticCallRequest | NativeCallRequest] = field(default_factory=list)


def resolve(request: GraphRequest, session_id: int, new_variable: NewVariable) -> ResolvedGraph:
    """Create the variables of a request and bind its calls to them. Raises `InvalidRequest` with
    the field if a name is declared twice, made by two calls, or not declared."""
    graph = ResolvedGraph()
    _declare(request, new_variable, graph.variables)
    scope: Scope = {"session_id": session_id, "session_auth": request.session_auth}
    for i, call in enumerate(request.calls):
        parameters = [
            _resolved(parameter, graph.variables, f"calls.{i}.parameters.{j}.var")
            for j, parameter in enumerate(call.parameters)
        ]
        graph.calls.append(_call_request(call, scope, parameters))
    return graph


def _declare(
    request: GraphRequest, new_variable: NewVariable, variables: dict[str, SemanticVariable]
) -> None:
    for i, declared in enumerate(request.variables):
        name = declared.name
        if name in variables:
            raise _error(f"`{name}` is declared twice", f"variables.{i}.name")
        variables[name] = new_variable(declared.var_name or name, declared.content)
    made: set[str] = set()
    for i, call in enumerate(request.calls):
        for j, parameter in enumerate(call.parameters):
            name = parameter.var or ""
            if not name or not parameter.is_output:
                continue
            if name in made:
                raise _error(
                    f"the variable of `{parameter.name}` is already the output of another call",
                    f"calls.{i}.parameters.{j}.var",
                )
            made.add(name)
            if name not in variables:
                variables[name] = new_variable(parameter.name, None)


def _resolved(
    parameter: GraphParameter, variables: dict[str, SemanticVariable], where: str
) -> CallParameter:
    var_id = parameter.var_id
    if parameter.var is not None:
        if parameter.var not in variables:
            raise _error(f"the request does not declare `{parameter.var}`", where)
        var_id = variables[parameter.var].id
    return CallParameter(
        name=parameter.name,
        is_output=parameter.is_output,
        var_id=var_id,
        value=parameter.value,
        sampling_config=parameter.sampling_config,
    )


def _call_request(
    call: SemanticGraphCall | NativeGraphCall, scope: Scope, parameters: list[CallParameter]
) -> SemanticCallRequest | NativeCallRequest:
    """The request that submits this call without the others."""
    fields = dict(call) | scope | {"parameters": parameters}
    if isinstance(call, NativeGraphCall):
        return NativeCallRequest(**fields)
    return SemanticCallRequest(**fields)


def _error(message: str, param: str) -> ParrotError:
    return InvalidRequest(message, param=param)
