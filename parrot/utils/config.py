"""Reading a configuration file into a frozen pydantic model, with errors a person can act on."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T", bound=BaseModel)
Loc = tuple[int | str, ...]
"""The path of a value in a configuration: keys and indices, from the top."""
Source = str | Callable[[Loc], str]

_MAX_LISTED = 12  # Keys that an error lists. A longer list hides the suggestion.
_YAML_SUFFIXES = (".yaml", ".yml")


class ConfigError(ValueError):
    """An invalid configuration. The message names the file, the key and the allowed values."""


class ConfigModel(BaseModel):
    """Base of all configuration sections. Instances are frozen. Unknown keys and silent conversions
    (such as `"9000"` to 9000) are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def load_config(model: type[T], path: str | Path) -> T:
    """Read and check a JSON or YAML file. Raises `ConfigError` with one line for each problem."""
    return parse_config(model, read_config_object(path), str(path))


def read_config_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file, or in a YAML file if the name ends with .yaml or .yml."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_config_object(raw, path)


def parse_config_object(raw: bytes, path: str | Path) -> dict[str, Any]:
    """The object in the contents of a file. `path` decides the format."""
    form = "YAML" if is_yaml(path) else "JSON"
    try:
        payload = _load_yaml(raw) if is_yaml(path) else orjson.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {form}: {error}") from None
    if not isinstance(payload, dict):
        raise ConfigError(f"{path}: must contain a {form} object")
    return payload


def is_yaml(path: str | Path) -> bool:
    """Whether the file's name ends with .yaml or .yml."""
    return Path(path).suffix.lower() in _YAML_SUFFIXES


def _load_yaml(raw: bytes) -> Any:
    """A YAML document whose values also exist in JSON. Raises `ValueError`."""
    from parrot.utils.yaml_file import load_yaml

    return load_yaml(raw)


def parse_config(model: type[T], payload: Mapping[str, Any], source: Source) -> T:
    """Validate `payload` by JSON's rules: a list may become a tuple, but "1" does not become 1.
    Each line of the error begins with `source`: a path, or a function from location to text."""
    try:
        return model.model_validate_json(orjson.dumps(dict(payload)))
    except ValidationError as error:
        raise ConfigError(described(model, error, source)) from None


def described(model: type[BaseModel], error: ValidationError, source: Source) -> str:
    """Every problem that the validation of `model` found, one a line."""
    lines = (
        f"{source if isinstance(source, str) else source(p['loc'])}: "
        + _describe(model, p["loc"], p["type"], p["msg"].removeprefix("Value error, "), p["input"])
        for p in error.errors(include_url=False, include_context=False)
    )
    return "\n".join(lines)


def _describe(model: type[BaseModel], loc: Loc, kind: str, message: str, given: object) -> str:
    noun, listed = "key", "parrot config show"
    if not issubclass(model, ConfigModel):
        noun, listed = "field", "docs/python_api.md"
    key = f"`{'.'.join(map(str, loc))}`" if loc else "the configuration"
    if kind == "extra_forbidden":
        owner, _ = section_at(model, loc[:-1])
        near = get_close_matches(str(loc[-1]), owner.model_fields, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        allowed = f"allowed: {', '.join(sorted(owner.model_fields))}"
        if len(owner.model_fields) > _MAX_LISTED:
            allowed = f"all {noun}s: {listed}"
        return f"unknown {noun} {key}.{hint} ({allowed})"
    if not loc and noun == "field":
        return message
    owner, rest = section_at(model, loc)
    field = owner.model_fields.get(str(rest[0])) if rest else None
    is_shown = kind != "missing" and (field is None or field.repr)  # Secrets have repr=False.
    return f"{key}: {message}" + (f", not {given!r:.80}" if is_shown else "")


def section_at(model: type[BaseModel], path: Loc) -> tuple[type[BaseModel], Loc]:
    """The innermost section on `path`, and the rest of the path inside that section. The path may
    lead through lists of sections."""
    current = model
    for depth, part in enumerate(path):
        if isinstance(part, int) and depth:
            continue
        field = current.model_fields.get(str(part))
        annotation: Any = field.annotation if field else None
        if isinstance(annotation, UnionType):  # A section or None.
            (annotation, *_) = annotation.__args__
        if get_origin(annotation) is tuple and isinstance(next(iter(path[depth + 1 :]), None), int):
            annotation = get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return current, path[depth:]
        current = annotation
    return current, ()
