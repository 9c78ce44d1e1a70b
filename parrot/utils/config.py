"""Reading a configuration file into a frozen pydantic model, with errors a person can act on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration file cannot be used. The message names file, key and allowed values."""


class ConfigModel(BaseModel):
    """Base of every configuration section: frozen, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


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
    """Validate `payload`; `source` (usually the file's path) opens every line of the error."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        lines = [f"{source}: {_explain(model, item)}" for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _explain(model: type[BaseModel], item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    key = f"`{'.'.join(location)}`" if location else "the configuration"
    if item["type"] == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        allowed = f"; allowed keys: {', '.join(owner.model_fields)}" if owner else ""
        return f"{key}: unknown key{allowed}"
    got = "" if item["type"] == "missing" else f" (got {item['input']!r:.80})"
    return f"{key}: {item['msg']}{got}"


def _model_at(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    """The section that `location` leads to, or None when it leads into a plain value."""
    current: Any = model
    for part in location:
        field = current.model_fields.get(part)
        if field is None or not isinstance(field.annotation, type):
            return None
        current = field.annotation
        if not issubclass(current, BaseModel):
            return None
    return current  # type: ignore[no-any-return]
