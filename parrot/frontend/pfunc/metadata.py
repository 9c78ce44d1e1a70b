"""The options of functions, as decorators and `define_function` take them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.template import Text, parse_template

MAX_NATIVE_TIMEOUT_S = 60
_FLAGS = ("remove_pure_fill", "cache_prefix", "fuse_fill", "reuse", "on_demand")
MODEL_TYPES = ("token_id", "text")


@dataclass(frozen=True, slots=True)
class SemanticFuncMetadata:
    """`models`: names of the models that may serve it (empty: any). `model_type`: a hint.
    `remove_pure_fill`: drop the text after the last output. `cache_prefix`: let other calls reuse
    the KV of the constant beginning. `output_criteria`: run at once, as if a reader wanted the last
    output so. `on_demand`: only a reader makes its calls run (None: as the session says).
    `sep`: text between the parts of a list of variables. `fuse_fill`: a hint. `reuse`: when greedy
    or seeded, the result of an identical call may be taken. `chat` and its `system` message: set by
    `chat_template`."""

    models: tuple[str, ...] = ()
    model_type: str = "token_id"
    remove_pure_fill: bool = True
    cache_prefix: bool = True
    output_criteria: PerformanceCriteria | None = None
    on_demand: bool | None = None
    fuse_fill: bool = False
    reuse: bool = True
    chat: bool = False
    system: str | None = None
    sep: str = "\n"

    def to_payload(self) -> dict[str, Any]:
        payload = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sep"}
        return payload | {"models": list(self.models)}


@dataclass(frozen=True, slots=True)
class NativeFuncMetadata:
    """`timeout` in seconds, for one run in ServeCore; `on_demand` as for semantic functions."""

    timeout: float = 1.0
    output_criteria: PerformanceCriteria | None = None
    on_demand: bool | None = None

    def to_payload(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def parse_criteria(value: PerformanceCriteria | str) -> PerformanceCriteria:
    """Raises `ValueError` that lists the criteria."""
    try:
        return PerformanceCriteria(value)
    except ValueError:
        allowed = ", ".join(PerformanceCriteria)
        raise ValueError(f"{value!r} is no performance criteria, use one of {allowed}") from None


def parse_metadata(options: Mapping[str, Any]) -> SemanticFuncMetadata:
    """Raises `TypeError` for an unknown key or a value of the wrong type, `ValueError` for a wrong
    value."""
    known = [field.name for field in fields(SemanticFuncMetadata)]
    known = [name for name in known if name not in ("chat", "system")]
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"unknown option `{name}`, allowed are {', '.join(known)}")
        if name in _FLAGS and not isinstance(value, bool) and (name, value) != ("on_demand", None):
            raise TypeError(f"option `{name}` must be True or False, not {value!r}")
    checked = dict(options)
    if "models" in checked:
        checked["models"] = _parse_models(checked["models"])
    _check_separator(checked.get("sep", ""))
    if checked.get("model_type", "token_id") not in MODEL_TYPES:
        raise ValueError(f"option `model_type` must be one of {', '.join(MODEL_TYPES)}")
    if checked.get("output_criteria") is not None:
        checked["output_criteria"] = parse_criteria(checked["output_criteria"])
    return SemanticFuncMetadata(**checked)


def _check_separator(sep: object) -> None:
    if not isinstance(sep, str):
        raise TypeError(f"option `sep` must be a text, not {sep!r}")
    if not all(isinstance(piece, Text) for piece in parse_template(sep)):
        raise ValueError("option `sep` must not contain a placeholder")


def _parse_models(models: Sequence[str]) -> tuple[str, ...]:
    if isinstance(models, str) or not all(isinstance(model, str) for model in models):
        raise TypeError("option `models` must be a list of names")
    return tuple(models)
