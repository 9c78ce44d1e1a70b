"""Inventories for `parrot launch`: machines that ssh reaches, and what runs on each.

name: lab
hosts:
  - {address: 10.0.0.1, user: parrot, core: ../core/team.yaml}
  - address: 10.0.0.2
    engines: [{config: ../engine/qwen3_8b.json, count: 4}]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from parrot.launch.by_ssh.shards import Address, core_servers, core_url, shared_by
from parrot.launch.configs import check_tokens, core_config, engine_config
from parrot.launch.plan import CORE_PORT, FIRST_ENGINE_PORT, Config, Server, engine_servers
from parrot.utils.addresses import is_address, is_host
from parrot.utils.config import ConfigError, ConfigModel, parse_config, read_config_object

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_PATH = re.compile(r"[^\x00-\x1f\x7f-\x9f%-][^\x00-\x1f\x7f-\x9f%]{0,4095}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_RUN_MODELS = ("builtin", "huggingface")


def _address(text: str) -> str:
    if not is_host(text):
        raise ValueError("must be an IP address or the name of a host")
    return text


def _user(text: str) -> str:
    if not _USER.fullmatch(text):
        raise ValueError("must be the name of an account")
    return text


def _path(text: str) -> str:
    if not _PATH.fullmatch(text):
        raise ValueError("must be a path, and not begin with `-` or have `%` in it")
    return text


def _remote_path(text: str) -> str:
    if text.startswith("~"):
        raise ValueError("must not begin with `~`: a relative path is one from the home folder")
    return _path(text)


class EngineGroup(ConfigModel):
    """Engines of one config on one host."""

    config: str | dict[str, Any] = Field(
        {}, description="A file, relative to the inventory, or the config itself."
    )
    count: int = Field(1, ge=1, le=256)
    gpus: int | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of each; null: as many as its model is divided among, none with `device` "
        "`cpu`. They are given out in the order of the engines.",
    )
    cores: int | None = Field(None, ge=1, le=4096, description="Threads of each that compute.")
    serve_core: str | None = Field(
        None,
        description="Address of the host whose ServeCore they work for, if several have one; null: "
        "for all.",
    )


class HostEntry(ConfigModel):
    """A machine, as ssh reaches it, and its servers."""

    address: Annotated[str, AfterValidator(_address)] = Field(
        description="By which ssh and the other machines reach it."
    )
    user: Annotated[str, AfterValidator(_user)] | None = None
    port: int | None = Field(None, ge=1, le=65535, description="Of ssh.")
    identity_file: Annotated[str, AfterValidator(_path)] | None = None
    python: Annotated[str, AfterValidator(_remote_path)] = Field(
        "python3", description="The interpreter that has Parrot there."
    )
    core: str | dict[str, Any] | None = Field(
        None,
        description="ServeCore's config, as an engine's; null: it runs elsewhere. Those of several "
        "hosts are shards, in this order.",
    )
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] | None = Field(
        None, max_length=64, description="Numbers of those that engines may have; null: all."
    )
    engines: tuple[EngineGroup, ...] = Field((), max_length=64)


class InventoryFile(ConfigModel):
    """The whole file. `name` tells clusters of one machine apart; null: as the file is called."""

    name: str | None = None
    hosts: tuple[HostEntry, ...] = Field(max_length=1024)


@dataclass(frozen=True, slots=True)
class Placed:
    """A server in its place. `config`: the whole; `gpus` None: it may use what it finds."""

    server: Server
    port: int
    config: Config
    gpus: tuple[int, ...] | None = None
    cores: int | None = None

    @property
    def env(self) -> dict[str, str]:
        """Variables of its own."""
        env = {}
        if self.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        if self.cores is not None:
            env["OMP_NUM_THREADS"] = str(self.cores)
        return env


@dataclass(frozen=True, slots=True)
class Site:
    """A machine, or a part of it, and what one agent runs there; ServeCore, if it does, is the
    first. `name`: the address, or what tells the parts of a machine apart."""

    host: HostEntry
    servers: tuple[Placed, ...]
    name: str

    @property
    def has_core(self) -> bool:
        return self.servers[0].server.kind == "core"

    @property
    def stop_s(self) -> float:
        """Seconds after which all its servers have ended: engines, then ServeCore."""
        times: dict[Literal["core", "engine"], float] = {"core": 0.0, "engine": 0.0}
        for placed in self.servers:
            kind = placed.server.kind
            times[kind] = max(times[kind], placed.server.stop_s)
        return sum(times.values())


@dataclass(frozen=True, slots=True)
class Inventory:
    """A cluster's name and sites; those of ServeCores are the last, in their order."""

    name: str
    sites: tuple[Site, ...]

    @property
    def num_machines(self) -> int:
        return len({site.host.address for site in self.sites})

    @property
    def cores(self) -> dict[str, Config]:
        """The whole config of each ServeCore, by its URL."""
        found = [(site.host.address, site.servers[0]) for site in self.sites if site.has_core]
        return {core_url((host, placed.port)): placed.config for host, placed in found}


def is_inventory(path: Path) -> bool:
    """Whether it is no config or launch file. Raises `ConfigError` if it cannot be read."""
    return "hosts" in read_config_object(path)


def read_inventory(path: Path, environ: Mapping[str, str]) -> Inventory:
    """Read and check all of it; what `environ` says is in all configs. Raises `ConfigError`."""
    file = parse_config(InventoryFile, read_config_object(path), str(path))
    name = path.stem if file.name is None else file.name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: `name` must be letters, digits, `-` and `_`, not {name!r:.80}")
    _check_hosts(file.hosts, path)
    owners = [host for host in file.hosts if host.core is not None]
    configs = [_core(host, path, environ) for host in owners]
    addresses = [
        (host.address, int(config.get("port", CORE_PORT)))
        for host, config in zip(owners, configs, strict=True)
    ]
    groups = [
        (host, group, _engines(host, group, addresses, path, environ))
        for host in file.hosts
        for group in host.engines
    ]
    flat = [config for _, _, members in groups for config in members]
    try:
        cores = core_servers(configs, addresses)
        for core in cores:
            check_tokens(core.config, flat)
        servers = iter(engine_servers(cores, flat))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    of_core = dict(zip(addresses, cores, strict=True))
    own: dict[str, list[tuple[EngineGroup, list[Server]]]] = {
        host.address: [] for host in file.hosts
    }
    for host, group, members in groups:
        own[host.address].append((group, [next(servers) for _ in members]))
    sites = [site for host in file.hosts for site in _sites(host, of_core, own[host.address], path)]
    return Inventory(name, tuple(sorted(sites, key=lambda site: site.has_core)))


def _check_hosts(hosts: Sequence[HostEntry], path: Path) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.address.lower() in seen:
            raise ConfigError(f"{path}: {host.address} is there twice")
        seen.add(host.address.lower())
        if host.core is None and not host.engines:
            raise ConfigError(f"{path}: {host.address} has neither `core` nor `engines`")
    if all(host.core is None for host in hosts):
        raise ConfigError(f"{path}: no host has `core`")
    if not any(host.engines for host in hosts):
        raise ConfigError(f"{path}: no host has `engines`")


def _core(entry: HostEntry, path: Path, environ: Mapping[str, str]) -> Config:
    """ServeCore's config, which answers to the name that the inventory has for its host."""
    where = f"{path}: {entry.address}: core"
    core = core_config(_read(entry.core or {}, path), where, environ)
    names = list(core.get("allowed_hosts", ()))
    if not is_address(entry.address) and entry.address not in names:
        core["allowed_hosts"] = [*names, entry.address]
    return core


def _engines(
    host: HostEntry,
    group: EngineGroup,
    cores: Sequence[Address],
    path: Path,
    environ: Mapping[str, str],
) -> list[Config]:
    where = f"{path}: {host.address}: engines"
    config = {"engine_type": "builtin", **_read(group.config, path)}
    if group.cores is not None and config["engine_type"] == "builtin":
        config["instance"] = {"num_threads": group.cores, **config.get("instance", {})}
    config = engine_config(config, where, environ)
    try:
        config = {**config, **shared_by(cores, group.serve_core, config)}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    config = engine_config(config, where, {})
    gpus = _num_gpus(group, config)
    device = config.get("device", "auto")
    if config["engine_type"] in _RUN_MODELS and device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"{where}: `device` must be auto, cpu or cuda: `gpus` says how many")
    if gpus and device == "cpu":
        raise ConfigError(f"{where}: `device` is cpu, and `gpus` {gpus}")
    name = config.get("engine_name")
    if name is None or group.count == 1:
        return [config] * group.count
    return [{**config, "engine_name": f"{name}-{number}"} for number in range(group.count)]


def _read(config: str | Config, path: Path) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else read_config_object(path.parent / config)


def _num_gpus(group: EngineGroup, config: Config) -> int:
    if group.gpus is not None:
        return group.gpus
    if config["engine_type"] not in _RUN_MODELS or config.get("device") == "cpu":
        return 0
    return int(config.get("instance", {}).get("tensor_parallel", 1))


def _sites(
    host: HostEntry,
    cores: Mapping[Address, Server],
    groups: Sequence[tuple[EngineGroup, Sequence[Server]]],
    path: Path,
) -> list[Site]:
    """The agents of a host. Its engines may work for several ServeCores, so that they have to end
    before any of these: then they have an agent of their own."""
    first = [
        Placed(core, port, core.placed(port))
        for (address, port), core in cores.items()
        if address == host.address
    ]
    gpus = iter(range(1024)) if host.gpus is None else iter(host.gpus)
    try:
        engines = _placed(groups, {placed.port for placed in first}, gpus)
    except StopIteration:
        raise ConfigError(f"{path}: {host.address}: the engines need more `gpus`") from None
    if first and engines and len(cores) > 1:
        apart = Site(host, tuple(engines), f"{host.address}+engines")
        return [apart, Site(host, tuple(first), host.address)]
    return [Site(host, (*first, *engines), host.address)]


def _placed(
    groups: Sequence[tuple[EngineGroup, Sequence[Server]]],
    taken: set[int],
    gpus: Iterator[int],
) -> list[Placed]:
    """The engines of a host, each with a port and GPUs of its own. Raises `StopIteration` if there
    are too few."""
    placed = []
    for group, servers in groups:
        for server in servers:
            wanted = server.config.get("port", FIRST_ENGINE_PORT)
            port = next(port for port in count(wanted) if port not in taken)
            taken.add(port)
            runs_model = server.config["engine_type"] in _RUN_MODELS
            own = tuple([next(gpus) for _ in range(_num_gpus(group, server.config))])
            config = server.placed(port)
            placed.append(Placed(server, port, config, own if runs_model else None, group.cores))
    return placed
