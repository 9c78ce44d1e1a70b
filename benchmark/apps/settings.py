"""The settings that a run compares: a style, and the features of ServeCore that are on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from benchmark.serve.baselines import NAMES
from parrot.serve.config import GlobalSchedulerConfig

ENGINE = "engine."
STYLES = ("parrot", "requests")

# If a feature is a choice of rules, "off" is the first of these that the feature has.
_PLAIN = ("fcfs", "lru", "off", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison. `overrides`: keys of ServeCore's `global_scheduler`. With simulated
    engines, `policy` and `placement` may name baselines. `engine`: keys of simulated engines'
    configs, with dots."""

    name: str
    style: str
    overrides: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()

    @property
    def whole_graph(self) -> bool:
        return self.style == "parrot"


def features() -> dict[str, Any]:
    """Each feature that can be switched, with the value that switches it off."""
    found: dict[str, Any] = {}
    for name, field in GlobalSchedulerConfig.model_fields.items():
        if field.annotation is bool:
            found[name] = False
        elif get_origin(field.annotation) is Literal:
            choices = get_args(field.annotation)
            plain = next((value for value in _PLAIN if value in choices), None)
            if plain is not None:
                found[name] = plain
    return found


def parse_setting(text: str) -> Setting:
    """`STYLE[:WHAT]`. WHAT is a list with commas: `on`, `all-off`, `-policy` (off), `policy=fcfs`,
    `engine.tasks_capacity=8`. Raises `ValueError`."""
    style, _, what = text.partition(":")
    if style not in STYLES:
        raise ValueError(f"{text!r}: the style must be one of {', '.join(STYLES)}")
    parts = [part for part in what.split(",") if not part.startswith(ENGINE)]
    engine = [
        part.removeprefix(ENGINE).partition("=") for part in what.split(",") if part not in parts
    ]
    return Setting(
        text,
        style,
        tuple(_overrides(text, parts).items()),
        tuple((name, _value(value)) for name, _, value in engine),
    )


def _overrides(text: str, parts: Sequence[str]) -> dict[str, Any]:
    known = features()
    overrides: dict[str, Any] = {}
    for part in parts:
        name, has_value, value = part.removeprefix("-").partition("=")
        if part == "all-off":
            overrides |= known
        elif part == "-placement":
            overrides["placement"] = "round_robin"
        elif part.startswith("-") and name in known:
            overrides[name] = known[name]
        elif has_value and name in GlobalSchedulerConfig.model_fields:
            overrides[name] = _value(value)
        elif part not in ("", "on"):
            raise ValueError(f"{text!r}: unknown part {part!r}; features: {', '.join(known)}")
    own = {name: value for name, value in overrides.items() if value not in NAMES}
    GlobalSchedulerConfig.model_validate(own)
    return overrides


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text
