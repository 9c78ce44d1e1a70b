"""Reading a configuration file into a frozen pydantic model, with errors a person can act on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the key and what is
    allowed there."""


class ConfigModel(BaseModel):
    """Base of every configuration section: frozen, no unknown key, no silent conversion (as of
    `"9000"` to 9000)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def load_config(model: type[T], path: str | Path) -> T:
    """Read and check a JSON file. Raises `ConfigError` with every problem, one a line."""
    return parse_config(model, read_json_object(path), str(path))


def read_json_object(path: str | Path) -> dict[str, Any]:
    try:
        payload = orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return payload


def parse_config(model: type[T], payload: Mapping[str, Any], source: str) -> T:
    """Validate `payload` by JSON's rules (a list may become a tuple, "1" not an int); `source`,
    usually the file's path, opens every line of the error."""
    try:
        return model.model_validate_json(orjson.dumps(dict(payload)))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        lines = (
            f"{source}: {_describe(model, p['loc'], p['type'], p['msg'], p['input'])}"
            for p in problems
        )
        raise ConfigError("\n".join(lines)) from None


def _describe(
    model: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, given: object
) -> str:
    key = f"`{'.'.join(map(str, loc))}`" if loc else "the configuration"
    if kind == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        return f"unknown key {key}; allowed: {', '.join(sorted(owner.model_fields))}"
    return f"{key}: {message}" + ("" if kind == "missing" else f", not {given!r:.80}")


def _model_at(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The section at `path`, as far as it leads through sections."""
    current = model
    for part in path:
        field = current.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        current = annotation
    return current
