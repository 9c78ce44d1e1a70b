"""The servers of a cluster, before it is known where they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parrot.protocol.server_config import settled_token
from parrot.utils.config import ConfigError
from parrot.utils.ids import new_token

Config = Mapping[str, Any]
Kind = Literal["core", "engine"]

EVERYWHERE = "0.0.0.0"
CORE_NAME = "core"
CORE_PORT, FIRST_ENGINE_PORT = 9000, 9001
DRAIN_S = 120.0
"""How long engines may finish their calls before they stop, if their config does not say."""
_MODULES: dict[Kind, str] = {
    "core": "parrot.serve.http_server",
    "engine": "parrot.engine.http_server",
}
_END_S = 15.0  # from the end of a drain to that of the process
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to run. `config` is all that it needs but its place; it holds secrets."""

    name: str
    kind: Kind
    config: Config = field(repr=False)

    @property
    def module(self) -> str:
        """The module that `python -m` runs."""
        return _MODULES[self.kind]

    @property
    def stop_s(self) -> float:
        """Seconds from SIGTERM after which it may be killed."""
        return float(self.config.get("drain_timeout", 0.0)) + _END_S

    @property
    def token(self) -> str | None:
        """The cluster token, which `/ready` and `/metrics` of it want."""
        token: str | None = self.config.get("cluster_token")
        return token

    def placed(self, port: int, core: tuple[str, int] | None = None) -> dict[str, Any]:
        """Its whole config in a place: the port to bind, and ServeCore's host and port as seen
        from there (engines only)."""
        where: dict[str, Any] = {"port": port}
        if core is not None and self.kind == "engine":
            where["serve_core"] = {"host": core[0], "port": core[1]}
        return {**self.config, **where}


@dataclass(frozen=True, slots=True)
class Plan:
    """ServeCore and its engines, which share a cluster token."""

    core: Server
    engines: tuple[Server, ...]


def plan(core: Config, engines: Sequence[Config]) -> Plan:
    """The servers of checked configs, to run on several machines: bound to every interface unless
    a config names an address, with one cluster token (a new one if ServeCore's config has none)
    and engine names of their own (`engine-0`, ... by default). Raises `ConfigError` if a server
    would refuse to start."""
    server = _core_server(core)
    names = {server.name}
    servers = []
    for number, engine in enumerate(engines):
        name = engine.get("engine_name") or f"engine-{number}"
        if name in names:
            raise ConfigError(f"two servers are named {name!r}; set `engine_name`")
        names.add(name)
        servers.append(engine_server(server.config, engine, name))
    return Plan(server, tuple(servers))


def _core_server(core: Config) -> Server:
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


def engine_server(core: Config, engine: Config, name: str) -> Server:
    """An engine of the ServeCore with this planned config."""
    shared = {key: core[key] for key in ("cluster_token", "insecure") if core.get(key) is not None}
    own = {"host": _reachable(engine), "engine_name": name}
    return Server(name, "engine", {"drain_timeout": DRAIN_S, **engine, **own, **shared})


def _reachable(config: Config) -> str:
    """The address to bind: loopback would keep other machines out."""
    host = str(config.get("host", EVERYWHERE))
    return EVERYWHERE if host in _LOOPBACK else host
