"""Reading a JSON configuration file into a pydantic model, with errors a person can act on."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

T = TypeVar("T", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the key and what is
    allowed there."""


def load_config(model: type[T], path: str | Path) -> T:
    """Read and check a JSON file. Raises `ConfigError` with every problem, one a line."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        lines = (
            f"{path}: {_describe(model, p['loc'], p['type'], p['msg'], p['input'])}"
            for p in problems
        )
        raise ConfigError("\n".join(lines)) from None


def _describe(
    model: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str, given: object
) -> str:
    key = ".".join(map(str, loc))
    if kind == "json_invalid":
        return message
    if kind == "extra_forbidden":
        return f"unknown key `{key}`; allowed: {', '.join(_allowed_keys(model, loc[:-1]))}"
    return f"`{key}`: {message}" + ("" if kind == "missing" else f", not {given!r:.80}")


def _allowed_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the (nested) model at `path`."""
    current = model
    for part in path:
        annotation = current.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        current = annotation
    return sorted(current.model_fields)
