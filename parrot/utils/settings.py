"""Settings from a file, the environment and the command line. Later sources override earlier ones.

`PARROT_CORE__PORT=9100` sets `port` of ServeCore. `PARROT_ENGINE__SCHEDULER__MAX_BATCH_SIZE=64`
sets `max_batch_size` in the section `scheduler` of an engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from parrot.utils.config import ConfigError, Loc, read_config_object, section_at

Section = Literal["core", "engine"]
COMMAND_LINE = "command line"
DEFAULT = "default"
_SECTIONS: tuple[Section, ...] = ("core", "engine")


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """The values of one source. `name` returns the source's name for error messages about a key."""

    values: Mapping[str, Any]
    name: Callable[[Loc], str]


ConfigFile = SettingsLayer | str | Path | None
"""A config file: its contents or its path. None: no file."""


class Settings:
    """Layers of settings, the strongest last. Sections are merged by key. A later layer replaces
    any other value as a whole."""

    def __init__(self, layers: Iterable[SettingsLayer]) -> None:
        self._layers = [layer for layer in layers if layer.values]

    @property
    def payload(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for layer in self._layers:
            merged = _merged(merged, layer.values)
        return merged

    def origin(self, loc: Loc) -> str:
        """The name of the source that sets the value at `loc`, or `DEFAULT`."""
        holding = (layer for layer in reversed(self._layers) if _holds(layer.values, loc))
        layer = next(holding, None)
        return DEFAULT if layer is None else layer.name(loc)

    def blamed(self, loc: Loc) -> str:
        """The source to name in an error about `loc`: the source that sets the value, or the
        innermost section around it."""
        for end in range(len(loc), 0, -1):
            if (origin := self.origin(loc[:end])) != DEFAULT:
                return origin
        return self._layers[0].name(()) if self._layers else COMMAND_LINE


def read_settings(
    section: Section,
    file: ConfigFile,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    model_of: Callable[[Settings], type[BaseModel]],
) -> Settings:
    """The settings of a server from its config file, `environ` and the command line's `options`.
    `model_of` returns the config model for the settings known so far. Raises `ConfigError`."""
    file = file if isinstance(file, SettingsLayer) else file_layer(file)
    given = SettingsLayer(options, lambda loc: COMMAND_LINE)
    known = Settings([file, _untyped(section, environ), given])
    return Settings([file, environment_layer(section, environ, model_of(known)), given])


def file_layer(path: str | Path | None) -> SettingsLayer:
    """The values of a config file, or no values if `path` is None. Raises `ConfigError`."""
    return layer({} if path is None else read_config_object(path), str(path))


def layer(values: Mapping[str, Any], name: str) -> SettingsLayer:
    return SettingsLayer(values, lambda loc: name)


def environment_layer(
    section: Section, environ: Mapping[str, str], model: type[BaseModel]
) -> SettingsLayer:
    """The values of a section's environment variables. Keys of type text take the text as it is,
    others parse it as JSON. Raises `ConfigError` for a name that cannot be a key."""
    values: dict[str, Any] = {}
    for name, path in sorted(_variables(section, environ), key=lambda item: len(item[1])):
        owner, rest = section_at(model, path[:-1])
        if rest and rest[0] in owner.model_fields:
            raise ConfigError(
                f"{name}: `{rest[0]}` is not a section; give it as JSON in "
                f"{_spelled(section, path[: len(path) - len(rest)])}"
            )
        nested: dict[str, Any] = {path[-1]: _value(owner.model_fields.get(path[-1]), environ[name])}
        for part in reversed(path[:-1]):
            nested = {part: nested}
        values = _merged(values, nested)
    return SettingsLayer(values, lambda loc: _spelled(section, loc) if loc else "environment")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of settings, for a child server whose config already
    contains these settings."""
    prefixes = tuple(_prefix(section) for section in _SECTIONS)
    return {name: text for name, text in environ.items() if not name.startswith(prefixes)}


def _prefix(section: Section) -> str:
    return f"PARROT_{section.upper()}_"


def _spelled(section: Section, loc: Loc) -> str:
    return "__".join([f"PARROT_{section.upper()}", *(str(part).upper() for part in loc)])


def _variables(
    section: Section, environ: Mapping[str, str]
) -> Iterable[tuple[str, tuple[str, ...]]]:
    """The names of the section's variables, and the key path of each."""
    prefix = _prefix(section)
    for name in environ:
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        if not rest.startswith("_"):
            wanted = f"{prefix}_{rest}"
            raise ConfigError(f"{name}: two underscores separate sections: write {wanted}")
        path = tuple(rest[1:].lower().split("__"))
        if not all(path):
            raise ConfigError(f"{name}: unknown key; `parrot config show` lists all keys")
        yield name, path


def _untyped(section: Section, environ: Mapping[str, str]) -> SettingsLayer:
    found = {path[0]: environ[name] for name, path in _variables(section, environ) if not path[1:]}
    return SettingsLayer(found, lambda loc: _spelled(section, loc))


def _value(field: FieldInfo | None, text: str) -> Any:
    """The text itself or its JSON value, depending on the field's type. Validation comes later."""
    if field is None or _takes_text(field, text):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _takes_text(field: FieldInfo, text: str) -> bool:
    kind: Any = field.annotation
    try:
        TypeAdapter[Any](kind).validate_python(text, strict=True)
    except ValidationError:
        return False
    return True


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            both[key] = _merged(old, value)
        else:
            both[key] = value
    return both


def _holds(values: Mapping[str, Any], loc: Loc) -> bool:
    current: Any = values
    for part in loc:
        if not isinstance(current, Mapping):
            return True  # The layer sets the value as a whole.
        if part not in current:
            return False
        current = current[part]
    return True
