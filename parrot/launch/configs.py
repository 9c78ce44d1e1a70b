"""Config files for `parrot launch`: which is what, and which port each server gets.

A file is a launch file when it has `engines`, an engine's config when it has `engine_type`, else a
core's. A launch file names configs, relative to itself, and may override keys of each:

    {"core": "../core/localhost.json",
     "engines": [{"config": "../engine/vicuna_7b.json", "port": 9001, "device": "cuda:0"}, ...]}
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from parrot.engine.config import engine_settings, parse_engine_config
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.config import ConfigError, parse_config, read_config_object
from parrot.utils.settings import layer

Config = dict[str, Any]
_CORE_PORT, _FIRST_ENGINE_PORT = 9000, 9001


def read_configs(paths: Sequence[Path], environ: Mapping[str, str]) -> tuple[Config, list[Config]]:
    """The core's config (default: all defaults) and the engines', checked, each with a port; what
    `environ` says is in all of them. Raises `ConfigError` that names the place and what is wrong
    there."""
    cores: list[Config] = []
    engines: list[Config] = []
    for path in paths:
        for is_engine, where, config in _configs_in(path):
            if is_engine:
                engines.append(engine_config(config, where, environ))
            else:
                cores.append(core_config(config, where, environ))
    if len(cores) > 1:
        raise ConfigError(
            f"more than one ServeCore: {', '.join(map(str, paths))}; give the config of one"
        )
    if not engines:
        raise ConfigError(
            f"no engine among {', '.join(map(str, paths))}; give also an engine's config, such as "
            "sample_configs/engine/embedded.json"
        )
    core = cores[0] if cores else core_config({}, "", environ)
    _check_tokens(core, engines)
    _give_ports(core, engines)
    return core, engines


def core_config(config: Config, where: str, environ: Mapping[str, str]) -> Config:
    """A ServeCore's config with what the environment says; raises `ConfigError`."""
    settings = core_settings(layer(config, where), {}, environ)
    parse_config(CoreConfig, settings.payload, settings.blamed)
    return settings.payload


def engine_config(config: Config, where: str, environ: Mapping[str, str]) -> Config:
    """An engine's config with what the environment says; raises `ConfigError`."""
    settings = engine_settings(layer(config, where), {}, environ)
    parse_engine_config(settings.payload, settings.blamed)
    return settings.payload


def _configs_in(path: Path) -> Iterator[tuple[bool, str, Config]]:
    """(whether it is an engine's, where it stands, config) of each in the file."""
    payload = read_config_object(path)
    if "engines" not in payload:
        yield "engine_type" in payload, str(path), payload
        return
    if unknown := set(payload) - {"core", "engines"}:
        raise ConfigError(f"{path}: unknown key `{min(unknown)}`; allowed: core, engines")
    if not isinstance(payload["engines"], list):
        raise ConfigError(f"{path}: `engines` must be a list")
    if "core" in payload:
        yield False, f"{path}: core", _resolve(path, "core", payload["core"])
    for i, entry in enumerate(payload["engines"]):
        engine = _resolve(path, f"engines.{i}", entry)
        yield True, f"{path}: engines.{i}", {"engine_type": "builtin", **engine}


def _resolve(path: Path, key: str, entry: object) -> Config:
    """An entry is a path, or an object that overrides keys of the config it may name."""
    if isinstance(entry, str):
        entry = {"config": entry}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: `{key}` must be a path or an object")
    overrides = dict(entry)
    base = overrides.pop("config", None)
    if base is None:
        return overrides
    if not isinstance(base, str):
        raise ConfigError(f"{path}: `{key}.config` must be a path")
    return {**read_config_object(path.parent / base), **overrides}


def _check_tokens(core: Config, engines: list[Config]) -> None:
    """An engine without a token gets ServeCore's; with another it could never register."""
    for engine in engines:
        if engine.get("cluster_token") not in (None, core.get("cluster_token")):
            raise ConfigError("`cluster_token` of an engine differs from its ServeCore's")


def _give_ports(core: Config, engines: list[Config]) -> None:
    """The usual ports, in order, where a config names none. Engines of one config file that is
    given several times get ports of their own, too."""
    core.setdefault("port", _CORE_PORT)
    taken = {core["port"]}
    for engine in engines:
        wanted = engine.get("port", _FIRST_ENGINE_PORT)
        engine["port"] = next(port for port in count(wanted) if port not in taken)
        taken.add(engine["port"])
