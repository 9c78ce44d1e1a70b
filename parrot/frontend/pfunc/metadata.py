"""The options of functions, as decorators and `define_function` take them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
)

from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.template import TemplateText, parse_template

Criteria = PerformanceCriteria | str


def parse_criteria(value: Criteria) -> PerformanceCriteria:
    """Raises `ValueError` that lists the criteria."""
    try:
        return PerformanceCriteria(value)
    except ValueError:
        allowed = ", ".join(PerformanceCriteria)
        raise ValueError(f"{value!r} is no performance criteria, use one of {allowed}") from None


def _without_placeholder(text: str) -> str:
    if not all(isinstance(piece, TemplateText) for piece in parse_template(text)):
        raise ValueError("it must not contain a placeholder")
    return text


ParsedCriteria = Annotated[PerformanceCriteria, BeforeValidator(parse_criteria)]


class FuncMetadata(BaseModel, frozen=True):
    """`output_criteria`: run at once, as if a reader wanted the last output so. `on_demand`: only a
    reader makes its calls run (None: as the session says)."""

    output_criteria: ParsedCriteria | None = None
    on_demand: StrictBool | None = None

    def to_payload(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"sep"})


class SemanticFuncMetadata(FuncMetadata):
    """`models`: names of the models that may serve it (empty: any). `model_type`: a hint.
    `remove_pure_fill`: drop the text after the last output. `cache_prefix`: let other calls reuse
    the KV of the constant beginning. `sep`: text between the parts of a list of variables.
    `fuse_fill`: a hint. `reuse`: when greedy or seeded, the result of an identical call may be
    taken. `chat` and its `system` message: set by `chat_template`, no options."""

    models: tuple[StrictStr, ...] = ()
    model_type: Literal["token_id", "text"] = "token_id"
    remove_pure_fill: StrictBool = True
    cache_prefix: StrictBool = True
    fuse_fill: StrictBool = False
    reuse: StrictBool = True
    sep: Annotated[StrictStr, AfterValidator(_without_placeholder)] = "\n"
    chat: StrictBool = False
    system: StrictStr | None = None


class NativeFuncMetadata(FuncMetadata):
    """`timeout` in seconds, for one run in ServeCore."""

    timeout: float = Field(1.0, gt=0, le=60)


Metadata = TypeVar("Metadata", bound=FuncMetadata)


def parse_metadata(kind: type[Metadata], options: Mapping[str, Any]) -> Metadata:
    """Raises `TypeError` for an unknown option or a value of the wrong type, `ValueError` for a
    wrong value."""
    known = [name for name in kind.model_fields if name not in ("chat", "system")]
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"unknown option `{unknown[0]}`, allowed are {', '.join(known)}")
    try:
        return kind(**options)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        error = TypeError if first["type"].endswith("_type") else ValueError
        reason = first["msg"].removeprefix("Value error, ")
        raise error(f"option `{first['loc'][0]}`: {reason}") from None
