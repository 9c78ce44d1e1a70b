"""The decorators that make functions, and the annotations of their parameters."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_origin

from pydantic import BaseModel

from parrot.frontend.pfunc.function import PyNativeFunction, SemanticFunction
from parrot.frontend.pfunc.function_body import Parameter, ParamType
from parrot.frontend.pfunc.metadata import Criteria, NativeFuncMetadata, parse_metadata
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, batch_of, current_session
from parrot.frontend.pfunc.template_errors import TemplateError
from parrot.frontend.pfunc.transforms import FuncMutator
from parrot.frontend.pfunc.transforms.prompt_formatter import standard_formatter
from parrot.protocol.sampling import SamplingConfig

_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NO_RETURNS = (inspect.Signature.empty, None, "None")
_ROLE_NAME = re.compile(r"\b(Input|Output)\b")


class Input:
    """Annotates an input: text, or a variable."""


class Output:
    """Annotates an output. `P.Output` is `P.Output(P.SamplingConfig())`.

    At most one of the others says which texts it may be: JSON of a schema, a match of a regular
    expression or of a Lark grammar, one of some choices. Reading an output whose schema is a
    pydantic model class gives an object of that class. `logprobs`: its variable tells how likely
    its tokens were, and so many of the likeliest in their places."""

    def __init__(
        self,
        sampling_config: SamplingConfig | None = None,
        *,
        json_schema: type[BaseModel] | dict[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Raises `TypeError`, or `ValueError` for more than one constraint."""
        if sampling_config is not None and not isinstance(sampling_config, SamplingConfig):
            raise TypeError("P.Output takes a P.SamplingConfig")
        self.model: type[BaseModel] | None = None
        if isinstance(json_schema, type):
            if not issubclass(json_schema, BaseModel):
                raise TypeError(f"{json_schema.__name__} is no pydantic model class")
            self.model, json_schema = json_schema, _closed(json_schema.model_json_schema())
        given: dict[str, Any] = {
            "json_schema": json_schema,
            "regex": regex,
            "grammar": grammar,
            "choices": choices,
        }
        given["logprobs"] = logprobs
        wanted = {name: value for name, value in given.items() if value is not None}
        base = sampling_config or SamplingConfig()
        self.sampling_config = SamplingConfig(**dict(base) | wanted) if wanted else base


def _closed(schema: Any) -> Any:
    """The schema without objects that may have more than their properties, which the model class
    would only drop."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        parts.setdefault("additionalProperties", False)
    return parts


def semantic_function(
    formatter: FuncMutator | None = standard_formatter,
    conversation_template: FuncMutator | None = None,
    try_register: bool = True,
    **metadata: Any,
) -> Callable[[Callable[..., Any]], SemanticFunction]:
    """Make a semantic function of a `def` whose docstring is a prompt with `{{placeholders}}`.

    Raises `ValueError` at decoration for: a return annotation but None, no docstring, a placeholder
    that is no parameter, an output that is first, adjacent to another, filled twice or nowhere;
    `TypeError` for unknown metadata (see docs/pfunc.md for what there is)."""
    mutators = [m for m in (formatter, conversation_template) if m is not None]
    for mutator in mutators:
        if not isinstance(mutator, FuncMutator):
            raise TypeError(f"{mutator!r} is no transform: write `@P.semantic_function()`, with ()")

    def decorate(pyfunc: Callable[..., Any]) -> SemanticFunction:
        name, params = _read_signature(pyfunc)
        if not pyfunc.__doc__:
            raise ValueError(f"`{name}` has no docstring, which is to be its prompt")
        try:
            func = SemanticFunction(name, params, pyfunc.__doc__, try_register, **metadata)
        except TemplateError as error:
            raise ValueError(f"semantic function `{name}`: {error.shown(pyfunc)}") from None
        except (TypeError, ValueError) as error:
            raise type(error)(f"semantic function `{name}`: {error}") from None
        func.pyfunc = pyfunc
        for mutator in mutators:
            func = mutator.transform(func)
        return func

    return decorate


def native_function(
    timeout: float = 1.0,
    output_criteria: Criteria | None = None,
    on_demand: bool | None = None,
) -> Callable[[Callable[..., Any]], PyNativeFunction]:
    """Make a native function of a `def` that takes strings and sets its outputs: `out.set(text)`.

    ServeCore runs it in a sandbox, within `timeout` seconds. Raises `ValueError` at decoration for
    code that cannot run there: a lambda, `async`, no source text, names from outside itself."""
    if not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds, not {timeout!r}: write `@P.native_function()`")
    options = {"timeout": timeout, "output_criteria": output_criteria, "on_demand": on_demand}
    metadata = parse_metadata(NativeFuncMetadata, options)

    def decorate(pyfunc: Callable[..., Any]) -> PyNativeFunction:
        name, params = _read_signature(pyfunc)
        return PyNativeFunction(name, pyfunc, params, metadata)

    return decorate


def variable(name: str | None = None, content: str | None = None) -> SemanticVariable:
    """A variable that the program sets, now (`content`) or later, or that a call is to produce.
    Registered with the current session; outside any, with the one that first uses it."""
    var = SemanticVariable(name, None if content is None else str(content))
    if (session := current_session.get()) is not None:
        batch = batch_of(session)
        session.loop.run(session.register(var) if batch is None else batch.declare(var))
    return var


def _read_signature(pyfunc: Callable[..., Any]) -> tuple[str, list[Parameter]]:
    signature = inspect.signature(pyfunc)
    name = getattr(pyfunc, "__name__", repr(pyfunc))
    if signature.return_annotation not in _NO_RETURNS:
        raise ValueError(f"`{name}` has a return annotation: outputs are parameters")
    params = []
    for param in signature.parameters.values():
        if param.kind not in _NAMED_KINDS:
            raise ValueError(f"`{name}`: parameter `{param}` must have a name of its own")
        params.append(_read_parameter(param, pyfunc))
    return name, params


def _read_parameter(param: inspect.Parameter, pyfunc: Callable[..., Any]) -> Parameter:
    annotation = _role(_evaluated(param.annotation, pyfunc), param.name)
    if annotation is Output:
        annotation = Output()
    if isinstance(annotation, Output):
        sampling = annotation.sampling_config
        return Parameter(
            param.name, ParamType.OUTPUT_LOC, sampling, param.default, annotation.model
        )
    typ = ParamType.INPUT_LOC if annotation is Input else ParamType.INPUT_PYOBJ
    return Parameter(param.name, typ, default=param.default)


def _role(annotation: Any, name: str) -> Any:
    """The role in an `Annotated[str, P.Output(...)]`, which type checkers take for a `str`."""
    if get_origin(annotation) is not Annotated:
        return annotation
    parts = annotation.__metadata__
    roles = [part for part in parts if part is Input or part is Output or isinstance(part, Output)]
    if len(roles) > 1:
        raise ValueError(f"parameter `{name}` is annotated with {len(roles)} roles; give it one")
    return roles[0] if roles else annotation


def _evaluated(annotation: Any, pyfunc: Callable[..., Any]) -> Any:
    """The object that a postponed annotation (`from __future__ import annotations`) names. Other
    types may be known to type checkers only; they mean a Python object anyway."""
    if not isinstance(annotation, str):
        return annotation
    scope = inspect.getclosurevars(pyfunc).nonlocals
    try:
        return eval(annotation, getattr(pyfunc, "__globals__", {}), dict(scope))
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        if _ROLE_NAME.search(annotation):
            raise ValueError(
                f"the annotation `{annotation}` of `{pyfunc.__name__}` cannot be evaluated: {error}"
            ) from None
        return annotation
