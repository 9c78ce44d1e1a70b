"""The options of functions, for decorators and `define_function`."""

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
    """Raises `ValueError` with the allowed criteria for an unknown value."""
    try:
        return PerformanceCriteria(value)
    except ValueError:
        allowed = ", ".join(PerformanceCriteria)
        raise ValueError(f"{value!r} is not one of the performance criteria {allowed}") from None


def _without_placeholder(text: str) -> str:
    if not all(isinstance(piece, TemplateText) for piece in parse_template(text)):
        raise ValueError("it must not contain a placeholder")
    return text


ParsedCriteria = Annotated[PerformanceCriteria, BeforeValidator(parse_criteria)]


class FuncMetadata(BaseModel, frozen=True):
    """Options of semantic and native functions."""

    # Run at once, as if the last output was read with these criteria.
    output_criteria: ParsedCriteria | None = None
    on_demand: StrictBool | None = None  # Run only for a reader. None: the session's setting.

    def to_payload(self) -> dict[str, Any]:
        """The fields of a request, without those with ServeCore's defaults."""
        return self.model_dump(mode="json", exclude={"sep"}, exclude_defaults=True)


class SemanticFuncMetadata(FuncMetadata):
    """Options of semantic functions. `chat` and `system` are set by `chat_template` only."""

    models: tuple[StrictStr, ...] = ()  # Models that may serve calls. Empty: any.
    model_type: Literal["token_id", "text"] = "token_id"  # Has no effect.
    remove_pure_fill: StrictBool = True  # Drop the text after the last output.
    cache_prefix: StrictBool = True  # Other calls may reuse the KV of the constant prefix.
    fuse_fill: StrictBool = False  # Has no effect.
    reuse: StrictBool = True  # A greedy or seeded call may take the result of an identical call.
    sep: Annotated[StrictStr, AfterValidator(_without_placeholder)] = "\n"  # Between list items.
    chat: StrictBool = False
    system: StrictStr | None = None


class NativeFuncMetadata(FuncMetadata):
    """Options of native functions. `timeout`: seconds that a call may run in ServeCore."""

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
