"""From a graph whose calls name each other's variables to calls that name them by id. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from parrot.protocol.errors import InvalidRequest, ParrotError
from parrot.protocol.public import (
    CallParameter,
    GraphParameter,
    GraphRequest,
    NativeCallRequest,
    NativeGraphCall,
    SemanticCallRequest,
    SemanticGraphCall,
)
from parrot.serve.graph.variable import SemanticVariable

Scope = dict[str, int | str | None]
NewVariable = Callable[[str, str | None], SemanticVariable]
"""Makes a variable of a name and its value, if it has one."""


@dataclass(frozen=True, slots=True)
class ResolvedGraph:
    """`variables`: the new ones that have a name in the request, by that name."""

    variables: dict[str, SemanticVariable] = field(default_factory=dict)
    calls: list[SemanticCallRequest | NativeCallRequest] = field(default_factory=list)


def resolve(request: GraphRequest, session_id: int, new_variable: NewVariable) -> ResolvedGraph:
    """Raises `InvalidRequest` that names the field for a name that is declared twice, made by two
    calls, or never declared."""
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
                    f"another call makes the variable of output `{parameter.name}`, too",
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
            raise _error(f"nothing in the request declares `{parameter.var}`", where)
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
    """The request for the call alone."""
    fields = dict(call) | scope | {"parameters": parameters}
    if isinstance(call, NativeGraphCall):
        return NativeCallRequest(**fields)
    return SemanticCallRequest(**fields)


def _error(message: str, param: str) -> ParrotError:
    return InvalidRequest(message, param=param)
