"""A call: a function with bound arguments, and its request."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parrot.frontend.pfunc.definitions import NativeDefinition, SemanticDefinition
from parrot.frontend.pfunc.function_body import (
    Constant,
    FuncBodyPiece,
    Parameter,
    Signature,
    no_parameter,
)
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, current_session, register
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.template import placeholder

if TYPE_CHECKING:
    from parrot.frontend.pfunc.session import Session
    from parrot.protocol.public import CallResponse

logger = logging.getLogger("parrot.frontend.pfunc")

Single = str | SemanticVariable
Value = Single | tuple[Single, ...]
Names = Mapping[SemanticVariable, str]  # Names of variables in a request.
Returned = SemanticVariable | tuple[SemanticVariable, ...]


class BasicCall(ABC):
    """A function with bound arguments.

    Raises `ValueError` for too many positional arguments. Raises `TypeError` for an argument that
    is unknown, missing or given twice, for an output that is not a variable, and for a collection
    that contains variables but is not a list of variables."""

    joins_lists = False  # Whether an input accepts a list of variables.

    def __init__(self, func: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.request_id: int | None = None  # Set when the call is submitted.
        self.bindings: dict[str, Value] = {}
        self._bind(args, kwargs)
        self.new_outputs = [p for p in func.outputs if p.name not in self.bindings]
        for param in self.new_outputs:
            self.bindings[param.name] = SemanticVariable(param.name, model=param.model)
        if len(set(map(id, self.output_vars))) < len(func.outputs):
            raise TypeError(f"{func.name}() got the same variable for two outputs")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.func.name}, {self.bindings})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain the error of a program that uses the call as an output variable, for example
            in a new thread."""
            raise AttributeError(
                f"a {type(self).__name__} has no `{name}`: it was called outside any session, so "
                "nothing was sent; call it inside vm.running_scope() (also in each new thread)"
            )

    @property
    def output_vars(self) -> list[SemanticVariable]:
        """The output variables in the order of declaration."""
        outputs = (self.bindings[param.name] for param in self.func.outputs)
        return [var for var in outputs if isinstance(var, SemanticVariable)]

    @property
    def returned(self) -> Returned:
        """The result for the caller: one variable, or a tuple of them."""
        variables = self.output_vars
        return variables[0] if len(variables) == 1 else tuple(variables)

    def given_variables(self) -> Iterator[tuple[Parameter, SemanticVariable]]:
        """The variables that the caller passed, with their parameters."""
        for param in self.func.params:
            value = self.bindings[param.name]
            if param not in self.new_outputs:
                parts = value if isinstance(value, tuple) else (value,)
                yield from ((param, part) for part in parts if isinstance(part, SemanticVariable))

    def new_variables(self) -> list[SemanticVariable]:
        """The variables that the call created for its outputs."""
        made = (self.bindings[param.name] for param in self.new_outputs)
        return [var for var in made if isinstance(var, SemanticVariable)]

    def unregistered_variables(self) -> list[SemanticVariable]:
        """Passed variables that must be registered with ServeCore first."""
        return [
            var
            for param, var in self.given_variables()
            if not var.is_registered and (param.is_output or not var.is_ready)
        ]

    @property
    def session(self) -> "Session | None":
        """The current session. Without one, for example in a new thread, an argument's session."""
        given = (var.session for _, var in self.given_variables())
        return current_session.get() or next(filter(None, given), None)

    @abstractmethod
    def to_request_payload(
        self, session: "Session | None" = None, names: Names | None = None
    ) -> dict[str, Any]:
        """The body of the request without the session's fields, or the call's entry in a draft.
        `names`: the draft's names of variables without an id."""

    def parameters(
        self, params: Iterable[Parameter], session: "Session | None", names: Names | None
    ) -> list[dict[str, Any]]:
        """The request's entries for these parameters."""
        payloads = []
        for param in params:
            for name, value in self.parts_of(param):
                payload = {"name": name, "is_output": param.is_output}
                if param.sampling_config is not None:
                    payload["sampling_config"] = param.sampling_config
                payloads.append(payload | _source(param, name, value, session, names))
        return payloads

    def parts_of(self, param: Parameter) -> Iterator[tuple[str, Single]]:
        """Yield name and value of the parameter, or of each item if its value is a list."""
        value = self.bindings[param.name]
        if not isinstance(value, tuple):
            yield param.name, value
            return
        for number, part in enumerate(value):
            name = f"{param.name}_{number}"
            while name in self.func.params_map:
                name += "_"
            yield name, part

    async def submit(self, session: "Session", overrides: dict[str, Any]) -> int:
        """Submit the call, register its variables and return the request id. `overrides` replace
        fields of the request."""
        await self._register_variables(session)
        response = await self._send(session, self.to_request_payload(session) | overrides)
        self.request_id = response.request_id
        for info in response.param_info:
            var = self.bindings.get(info.parameter_name)
            if isinstance(var, SemanticVariable) and not var.is_registered:
                var.attach(session, info.var_id)
        logger.debug("session %d: request %d is %s", session.session_id, self.request_id, self)
        return response.request_id

    @abstractmethod
    async def _send(self, session: "Session", payload: dict[str, Any]) -> "CallResponse": ...

    async def _register_variables(self, session: "Session") -> None:
        """Register variables that belong to no session yet. They then belong to this session."""
        loose = self.unregistered_variables()
        if loose:
            async with session.registering:
                for var in loose:
                    if var.draft is not None:
                        await var.draft.send()
                    elif not var.is_registered:
                        await register(session, var)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        func = self.func
        if len(args) > len(func.inputs):
            raise ValueError(
                f"{func.name}() takes at most {len(func.inputs)} positional arguments "
                f"({len(args)} given); outputs are given by keyword"
            )
        for param, value in zip(func.inputs, args, strict=False):
            self.bindings[param.name] = self._bound(param, value)
        for name, value in kwargs.items():
            if name not in func.params_map:
                raise TypeError(f"{func.name}() {no_parameter(name, func.params_map)}")
            if name in self.bindings:
                raise TypeError(f"{func.name}() got two values for `{name}`")
            self.bindings[name] = self._bound(func.params_map[name], value)
        for param in func.inputs:
            if param.name not in self.bindings:
                if param.is_required:
                    where = func.line_of(param)
                    raise TypeError(f"{func.name}() needs a value for `{param.name}`{where}")
                self.bindings[param.name] = self._bound(param, param.default)

    def _bound(self, param: Parameter, value: Any) -> Value:
        if isinstance(value, SemanticVariable):
            if param.model is not None:
                value.model = param.model
            return value
        if param.is_output:
            raise TypeError(
                f"output `{param.name}` takes a SemanticVariable, not {type(value).__name__}"
            )
        if not _holds_variable(value):
            return str(value)
        parts = value if isinstance(value, list | tuple) else ()
        if not (parts and self.joins_lists) or any(
            _holds_variable(part) and not isinstance(part, SemanticVariable) for part in parts
        ):
            raise TypeError(
                f"{self.func.name}(): `{param.name}` takes a variable"
                + (", or a list of variables" if self.joins_lists else "")
                + f", not a {type(value).__name__} with variables somewhere in it"
            )
        return tuple(part if isinstance(part, SemanticVariable) else str(part) for part in parts)


class SemanticCall(BasicCall):
    func: SemanticDefinition
    joins_lists = True

    def to_request_payload(
        self, session: "Session | None" = None, names: Names | None = None
    ) -> dict[str, Any]:
        places = self.func.locations
        used = [param for param in self.func.params if param in places]
        return self.func.metadata.to_payload() | {
            "func_name": self.func.name,
            "template": "".join(map(self._render, self.func.body)),
            "parameters": self.parameters(used, session, names),
        }

    async def _send(self, session: "Session", payload: dict[str, Any]) -> "CallResponse":
        return await session.semantic_call(f"{self.func.name}()", payload)

    def _render(self, piece: FuncBodyPiece) -> str:
        if isinstance(piece, Constant) or not isinstance(self.bindings[piece.param.name], tuple):
            return piece.text
        separator = self.func.metadata.sep
        return separator.join(placeholder(name) for name, _ in self.parts_of(piece.param))


class PyNativeCall(BasicCall):
    func: NativeDefinition

    def to_request_payload(
        self, session: "Session | None" = None, names: Names | None = None
    ) -> dict[str, Any]:
        return self.func.metadata.to_payload() | {
            "func_name": self.func.name,
            "func_source": self.func.source,
            "parameters": self.parameters(self.func.params, session, names),
        }

    async def _send(self, session: "Session", payload: dict[str, Any]) -> "CallResponse":
        return await session.native_call(f"{self.func.name}()", payload)


def _holds_variable(value: Any) -> bool:
    """Whether the value contains variables. Its `str` would then not contain their values."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_variable, value))
    return isinstance(value, SemanticVariable)


def _source(
    param: Parameter,
    name: str,
    value: Single,
    session: "Session | None",
    names: Names | None,
) -> dict[str, str | None]:
    """The reference to the value in the request: text, id or name in the draft. For a variable of
    another session, only a known value can be sent."""
    if isinstance(value, str):
        return {"value": value}
    if names is not None and (drafted := names.get(value)) is not None:
        return {"var": drafted}
    if value.is_registered and session in (None, value.session):
        return {"var_id": value.id}
    given = f"variable `{value.name}`, given for "
    if param.is_output:
        if not value.is_registered:
            return {}  # ServeCore creates the variable.
        raise InvalidRequest(f"{given}output `{name}`, belongs to another session", param=name)
    if value.content is not None:
        return {"value": value.content}
    raise InvalidRequest(
        f"{given}`{name}`, has no value and does not belong to this session", param=name
    )
