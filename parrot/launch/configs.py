"""Config files for `parrot launch`: their kinds, and the port of each server.

A file with `engines` is a launch file. A file with a key of `_ENGINE_ONLY_KEYS` is an engine's
config. Any other file is ServeCore's config. A launch file contains paths of configs, relative to
its own folder, and may override their keys:

    {"core": "../core/localhost.json",
     "engines": [{"config": "../engine/vicuna_7b.json", "port": 9001, "device": "cuda:0"}, ...]}

An entry's key such as `ray` (see `LAUNCHERS`) holds placement options for the launcher of that
name. A `ClusterPlan` lists the servers for such a launcher, before their machines are known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, Literal

from parrot.engine.config import engine_settings, parse_engine_config
from parrot.protocol.server_config import settled_token
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.config import ConfigError, parse_config, read_config_object
from parrot.utils.ids import new_token
from parrot.utils.installation import sample_configs
from parrot.utils.settings import layer

ServerConfig = Mapping[str, Any]
Kind = Literal["core", "engine"]

EVERYWHERE = "0.0.0.0"
CORE_NAME = "core"
CORE_PORT, FIRST_ENGINE_PORT = 9000, 9001
DRAIN_S = 120.0
"""Default `drain_timeout`, in seconds: how long a stopping engine may finish its calls."""
_MODULES: dict[Kind, str] = {
    "core": "parrot.server.http_server",
    "engine": "parrot.engine.http_server",
}
_EXIT_S = 15.0  # Seconds that a process may take to exit after its drain.
# Any of these keys marks a config as an engine's.
_ENGINE_ONLY_KEYS = ("engine_type", "model", "instance", "engine_name", "device")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to run. `config` is complete except for addresses (see `placed`), and contains
    secrets."""

    name: str
    kind: Kind
    config: ServerConfig = field(repr=False)

    @property
    def module(self) -> str:
        """The module that `python -m` runs."""
        return _MODULES[self.kind]

    @property
    def stop_s(self) -> float:
        """Seconds after SIGTERM when the process may be killed."""
        return float(self.config.get("drain_timeout", 0.0)) + _EXIT_S

    @property
    def token(self) -> str | None:
        """The cluster token, which `/ready` and `/metrics` of this server require."""
        token: str | None = self.config.get("cluster_token")
        return token

    def placed(self, port: int, core: tuple[str, int] | None = None) -> dict[str, Any]:
        """The complete config: with the port to bind and, for engines, ServeCore's host and port
        as seen from the engine's machine."""
        where: dict[str, Any] = {"port": port}
        if core is not None and self.kind == "engine":
            where["serve_core"] = {"host": core[0], "port": core[1]}
        return {**self.config, **where}


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """ServeCore and its engines. All have the same cluster token."""

    core: Server
    engines: tuple[Server, ...]


def plan(core: ServerConfig, engines: Sequence[ServerConfig]) -> ClusterPlan:
    """The servers of checked configs, for several machines.

    Servers bind all interfaces unless a config has a non-loopback address. They share one cluster
    token, which is generated if ServeCore's config has none. Engine names are unique (default:
    `engine-0`, ...). Raises `ConfigError` if a server would refuse to start."""
    server = _core_server(core)
    names = {server.name}
    servers = []
    for number, engine in enumerate(engines):
        name = engine.get("engine_name") or f"engine-{number}"
        if name in names:
            raise ConfigError(f"two servers are named {name!r}; set `engine_name`")
        names.add(name)
        servers.append(engine_server(server.config, engine, name))
    return ClusterPlan(server, tuple(servers))


def _core_server(core: ServerConfig) -> Server:
    core = {**core, "host": _reachable(core)}
    if core.get("cluster_token") is None and not core.get("insecure"):
        core["cluster_token"] = new_token() + new_token()
    settled_token(
        core["host"],
        core.get("cluster_token"),
        insecure=bool(core.get("insecure")),
        has_api_keys=bool(core.get("api_keys") or core.get("keys_file")),
    )
    return Server(CORE_NAME, "core", core)


def engine_server(core: ServerConfig, engine: ServerConfig, name: str) -> Server:
    """An engine for the ServeCore whose planned config is `core`."""
    shared = {key: core[key] for key in ("cluster_token", "insecure") if core.get(key) is not None}
    own = {"host": _reachable(engine), "engine_name": name}
    return Server(name, "engine", {"drain_timeout": DRAIN_S, **engine, **own, **shared})


def _reachable(config: ServerConfig) -> str:
    """The address to bind. Loopback becomes all interfaces, so that other machines can connect."""
    host = str(config.get("host", EVERYWHERE))
    return EVERYWHERE if host in _LOOPBACK else host


Config = dict[str, Any]
LAUNCHERS = ("ray",)


class InventoryError(ConfigError):
    """The file is an inventory of machines, which earlier versions of `parrot launch` started by
    ssh."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A server of a launch file."""

    where: str  # The place of the entry for error messages: path and key.
    is_engine: bool
    config: Config
    place: Config  # The entry's placement options for the current launcher.


def read_configs(paths: Sequence[Path], environ: Mapping[str, str]) -> tuple[Config, list[Config]]:
    """The checked configs of ServeCore and of the engines, each with a port.

    Settings from `environ` are part of all configs. Without a ServeCore config in `paths`, its
    defaults apply. Raises `ConfigError` with the path, the key and the reason."""
    core, engines = read_entries(paths, environ)
    configs = core.config, [engine.config for engine in engines]
    _give_ports(*configs)
    return configs


def read_entries(
    paths: Sequence[Path], environ: Mapping[str, str], launcher: str | None = None
) -> tuple[Entry, list[Entry]]:
    """The checked entries of ServeCore and of the engines, with the placement options of
    `launcher`. Raises the errors of `read_configs`."""
    entries = [entry for path in paths for entry in _checked_entries(path, environ, launcher)]
    cores = [entry for entry in entries if not entry.is_engine]
    engines = [entry for entry in entries if entry.is_engine]
    if len(cores) > 1:
        raise ConfigError(
            f"more than one ServeCore: {', '.join(map(str, paths))}; give the config of one"
        )
    if not engines:
        raise ConfigError(
            f"no engine among {', '.join(map(str, paths))}; also give an engine's config, such as "
            f"{sample_configs() / 'engine' / 'embedded.json'}"
        )
    core = cores[0] if cores else Entry("", False, core_config({}, "", environ), {})
    check_tokens(core.config, [engine.config for engine in engines])
    return core, engines


def is_engine_config(payload: Mapping[str, Any]) -> bool:
    """Whether a config is an engine's. `engine_type` may be mistyped or missing."""
    if any(key in payload for key in _ENGINE_ONLY_KEYS):
        return True
    return bool(get_close_matches("engine_type", map(str, payload), 1, cutoff=0.85))


def check_file(path: Path, environ: Mapping[str, str]) -> None:
    """Check each config of a file by itself. Raises `ConfigError`."""
    _checked_entries(path, environ, None)


def _checked_entries(path: Path, environ: Mapping[str, str], launcher: str | None) -> list[Entry]:
    return [
        replace(entry, config=check(entry.config, entry.where, environ))
        for entry in _entries_in(path, launcher)
        for check in [engine_config if entry.is_engine else core_config]
    ]


def core_config(config: Config, where: str, environ: Mapping[str, str]) -> Config:
    """ServeCore's config merged with settings from the environment. Raises `ConfigError`."""
    settings = core_settings(layer(config, where), {}, environ)
    parse_config(CoreConfig, settings.payload, settings.blamed)
    return settings.payload


def engine_config(config: Config, where: str, environ: Mapping[str, str]) -> Config:
    """An engine's config merged with settings from the environment. Raises `ConfigError`."""
    settings = engine_settings(layer(config, where), {}, environ)
    parse_engine_config(settings.payload, settings.blamed)
    return settings.payload


def refuse_inventory(path: Path, payload: Mapping[str, Any]) -> None:
    """Raises `InventoryError` if the payload is an inventory of machines."""
    if "hosts" in payload:
        raise InventoryError(
            f"{path}: `hosts`: servers on other machines can no longer be launched by ssh; "
            "docs/deployment.md says how servers run on several machines: Ray, Kubernetes, Slurm, "
            "Compose or systemd"
        )


def _entries_in(path: Path, launcher: str | None) -> Iterator[Entry]:
    """The servers of a file, unchecked."""
    payload = read_config_object(path)
    refuse_inventory(path, payload)
    if "engines" not in payload:
        yield Entry(str(path), is_engine_config(payload), payload, {})
        return
    if unknown := set(payload) - {"core", "engines"}:
        raise ConfigError(f"{path}: unknown key `{min(unknown)}`; allowed: core, engines")
    if not isinstance(payload["engines"], list):
        raise ConfigError(f"{path}: `engines` must be a list")
    if "core" in payload:
        yield _resolve(path, "core", payload["core"], launcher)
    for i, entry in enumerate(payload["engines"]):
        yield _resolve(path, f"engines.{i}", entry, launcher)


def _resolve(path: Path, key: str, entry: object, launcher: str | None) -> Entry:
    """The entry of one server. It is written as the path of a config, or as an object with keys
    that override those of its optional `config` file."""
    if isinstance(entry, str):
        entry = {"config": entry}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: `{key}` must be a path or an object")
    config = dict(entry)
    base = config.pop("config", None)
    places = {name: config.pop(name) for name in LAUNCHERS if name in config}
    place = places.get(launcher or "", {})
    if not isinstance(place, Mapping):
        raise ConfigError(f"{path}: `{key}.{launcher}` must be an object")
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: `{key}.config` must be a path")
        config = {**read_config_object(path.parent / base), **config}
    is_engine = key != "core"
    if is_engine:
        config = {"engine_type": "builtin", **config}
    return Entry(f"{path}: {key}", is_engine, config, dict(place))


def check_tokens(core: Mapping[str, Any], engines: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` if an engine's token differs from ServeCore's, since the engine could
    not register. An engine without a token gets ServeCore's later."""
    for engine in engines:
        if engine.get("cluster_token") not in (None, core.get("cluster_token")):
            raise ConfigError("`cluster_token` of an engine differs from its ServeCore's")


def _give_ports(core: Config, engines: list[Config]) -> None:
    """Assign default ports, in order, to configs without a port. If two engines have the same
    port, for example from the same file, the later one gets the next free port."""
    core.setdefault("port", CORE_PORT)
    taken = {core["port"]}
    for engine in engines:
        wanted = engine.get("port", FIRST_ENGINE_PORT)
        engine["port"] = next(port for port in count(wanted) if port not in taken)
        taken.add(engine["port"])
