"""The annotations of parameters and return values."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Optional,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError

from parrot.frontend.pfunc import sampling
from parrot.protocol.sampling import CONSTRAINTS, SamplingConfig
from parrot.utils.config import ConfigError

T = TypeVar("T")

_BROKEN_REGEX = ("missing ), unterminated", "unbalanced paren", "unterminated", "nothing to repeat")
_JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_ROLE_NAME = re.compile(r"\b(Input|Output|Returns)\b")


class Returned(Generic[T]):
    """The type of a function's outputs for type checkers. At run time it holds `kind`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


if TYPE_CHECKING:
    Input: TypeAlias = object
    # A function whose body is its docstring returns None.
    Returns: TypeAlias = Optional[Returned[T]]  # noqa: UP045
else:

    class Input:
        """Marks a parameter as an input. Its argument is a value or a variable."""

    class Returns:
        """`-> P.Returns[T]` gives a function one output of the type `T`, at the placeholder that
        is not a parameter. `T` is `str`, a `Literal` of strings, or a JSON type of pydantic, such
        as a model class or `list[int]`. `P.Returns[tuple[A, B]]` gives it two outputs.
        `Annotated[P.Returns[T], P.Output(...)]` adds options."""

        def __class_getitem__(cls, kind: Any) -> Returned:
            return Returned(kind)


class Output:
    """Marks a parameter as an output. `P.Output` equals `P.Output(P.SamplingConfig())`."""

    def __init__(
        self,
        sampling_config: SamplingConfig | None = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        logprobs: int | None = None,
    ) -> None:
        """At most one of `json_schema`, `regex`, `grammar` (Lark) and `choices` restricts the
        output. If `json_schema` is a type, such as a pydantic model class or `list[int]`, `get`
        returns an object of this type. `logprobs`: number of most likely tokens whose log
        probabilities are returned for each position. Raises `ValueError` for two constraints, and
        `TypeError` for a type that has no JSON schema."""
        if sampling_config is not None and not isinstance(sampling_config, SamplingConfig):
            raise TypeError("P.Output takes a P.SamplingConfig")
        self.model: Any = None
        if not isinstance(json_schema, dict | str | None):
            self.model, json_schema = json_schema, _schema_of(json_schema)
        given: dict[str, Any] = {
            "json_schema": json_schema,
            "regex": regex,
            "grammar": grammar,
            "choices": choices,
        }
        given["logprobs"] = logprobs
        wanted = {name: value for name, value in given.items() if value is not None}
        base = sampling_config or sampling.SamplingConfig()
        self.sampling_config = sampling.SamplingConfig(**dict(base) | wanted) if wanted else base


def _schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises `TypeError` if pydantic has none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        schema: dict[str, Any] = _closed(kind.model_json_schema())
        return schema
    try:
        schema = _closed(TypeAdapter(kind).json_schema())
    except PydanticUserError as error:
        problem = error.message.partition(". ")[0]
        raise TypeError(f"{kind!r} cannot be described by a JSON schema: {problem}") from None
    return schema


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties` False. The model class would drop further
    properties."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        parts.setdefault("additionalProperties", False)
    return parts


def constraint_problem(sampling: SamplingConfig) -> str | None:
    """The error in the regular expression or in the schema, if no engine could accept it."""
    if sampling.regex is not None:
        try:
            re.compile(sampling.regex)
        except re.error as error:
            # Engines accept syntax that Python lacks, such as `\\p{L}`. No engine accepts these.
            if error.msg.startswith(_BROKEN_REGEX):
                return f"regex `{sampling.regex}`: {error}"
    schema: Any = sampling.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            return f"json_schema is not JSON: {error}"
    if not isinstance(schema, dict | None):
        return "json_schema must be a JSON object"
    return None if schema is None else _schema_problem(schema)


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """An unknown `type` in the schema, or in one of its properties or items."""
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _JSON_TYPES:
            near = get_close_matches(str(kind), _JSON_TYPES, 1, cutoff=0.3)
            hint = f": did you mean `{near[0]}`?" if near else ""
            return f"json_schema has the unknown type `{kind}`{hint}"
    properties = schema.get("properties")
    parts = [*(properties.values() if isinstance(properties, dict) else ()), schema.get("items")]
    found = (_schema_problem(part) for part in parts if isinstance(part, dict))
    return next(filter(None, found), None)


def role_of(annotation: Any, pyfunc: Callable[..., Any], name: str) -> Any:
    """`Input`, an `Output`, or any other annotation unchanged. Raises `ConfigError` for a
    postponed annotation with a wrong sampling config."""
    try:
        role = _only_role(_evaluated(annotation, pyfunc), name)
    except ConfigError as error:
        raise ConfigError(f"output `{name}`: {error}") from None
    return Output() if role is Output else role


def returned_outputs(annotation: Any, pyfunc: Callable[..., Any]) -> list[Output] | None:
    """The outputs of a return annotation. None if it is not a `P.Returns`. Raises `TypeError` or
    `ValueError` for a wrong one."""
    annotation = _evaluated(annotation, pyfunc)
    parts = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    returned, *options = parts
    if not isinstance(returned, Returned):
        return None
    given = [one for one in options if isinstance(one, Output | SamplingConfig)]
    kinds = get_args(returned.kind) if get_origin(returned.kind) is tuple else (returned.kind,)
    if len(given) > 1 or (given and len(kinds) > 1):
        raise ValueError("options of P.Returns need exactly one output")
    return [_typed_output(kind, given[0] if given else Output()) for kind in kinds]


def _typed_output(kind: Any, options: Output | SamplingConfig) -> Output:
    """An output whose value has this type."""
    if isinstance(options, SamplingConfig):
        options = Output(options)
    if kind is str and options.model is None:
        return options
    sampling = options.sampling_config
    if any(getattr(sampling, name) is not None for name in CONSTRAINTS):
        raise ValueError(
            f"P.Returns[{kind!r}] constrains the output, so its options must not constrain it too"
        )
    if get_origin(kind) is not Literal:
        return Output(sampling, json_schema=kind)
    choices = get_args(kind)
    if not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"{kind!r} has choices that are not strings")
    return Output(sampling, choices=choices)


def _only_role(annotation: Any, name: str) -> Any:
    """The role in an `Annotated[str, P.Output(...)]`, which type checkers see as `str`."""
    if get_origin(annotation) is not Annotated:
        return annotation
    parts = annotation.__metadata__
    roles = [part for part in parts if part is Input or part is Output or isinstance(part, Output)]
    if len(roles) > 1:
        raise ValueError(f"parameter `{name}` is annotated with {len(roles)} roles; give it one")
    return roles[0] if roles else annotation


def _evaluated(annotation: Any, pyfunc: Callable[..., Any]) -> Any:
    """The value of a postponed annotation (`from __future__ import annotations`). An annotation
    without a role may be unknown at run time, and stays text."""
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
