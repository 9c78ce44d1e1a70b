"""What is compared: a client's style, and which of ServeCore's features are on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from parrot.serve.config import GlobalSchedulerConfig

ENGINE = "engine."
STYLES = ("parrot", "requests", "openai")

# What "off" means where a feature is a choice of rules: the first of these that there is.
_PLAIN = ("fcfs", "fifo", "round_robin", "least_loaded", "lru", "off", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison. `overrides`: keys of ServeCore's `global_scheduler`. `engine`: keys
    of simulated engines' configs, with dots. `base_url`: a server that is not launched here."""

    name: str
    style: str
    overrides: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()
    base_url: str | None = None


def features() -> dict[str, Any]:
    """Each switchable feature with the value that switches it off."""
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
    """`STYLE[:WHAT]`. WHAT of `parrot` and `requests`: with commas, `on`, `all-off`, changes:
    `-policy` (off), `policy=app_fifo`, `engine.tasks_capacity=8`. WHAT of `openai` is a URL.
    Raises `ValueError`."""
    style, _, what = text.partition(":")
    if style not in STYLES:
        raise ValueError(f"{text!r}: the style must be one of {', '.join(STYLES)}")
    if what.startswith(("http://", "https://")):
        return Setting(text, style, base_url=what)
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
        elif part.startswith("-") and name in known:
            overrides[name] = known[name]
        elif has_value and name in GlobalSchedulerConfig.model_fields:
            overrides[name] = _value(value)
        elif part not in ("", "on"):
            raise ValueError(f"{text!r}: unknown part {part!r}; features: {', '.join(known)}")
    GlobalSchedulerConfig.model_validate(overrides)
    return overrides


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text
