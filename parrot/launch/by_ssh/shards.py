"""Several ServeCores in one inventory: they are shards (docs/shards.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

from parrot.launch.plan import CORE_NAME, Config, Server, core_server
from parrot.serve.journal.storage import is_address as is_database
from parrot.serve.shards.shard import MAX_SHARDS
from parrot.utils.config import ConfigError

Address = tuple[str, int]
_ALIKE = ("cluster_token", "insecure", "api_keys")
"""Keys of ServeCore that must be the same in all: engines know one token, programs ask any."""


def core_url(address: Address) -> str:
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def core_servers(cores: Sequence[Config], addresses: Sequence[Address]) -> list[Server]:
    """The servers of ServeCores with these checked configs and addresses: shards, if there are
    several, with one cluster token. Raises `ConfigError`."""
    first = core_server(cores[0])
    if len(cores) == 1:
        return [first]
    if len(cores) > MAX_SHARDS:
        raise ConfigError(f"at most {MAX_SHARDS} hosts may have `core`")
    for key in _ALIKE:
        if any(core.get(key) != cores[0].get(key) for core in cores):
            raise ConfigError(f"`{key}` must be the same in each `core`")
    if any(core.get("shards") is not None for core in cores):
        raise ConfigError("`shards` of a `core`: the hosts that have one say which there are")
    journals = [core["journal"] for core in cores if is_database(core.get("journal") or "")]
    if len(set(journals)) < len(journals):
        raise ConfigError("`journal`: each `core` needs a database of its own")
    token = first.config.get("cluster_token")
    urls = [core_url(address) for address in addresses]
    return [
        core_server(
            {**core, "cluster_token": token, "shards": {"index": index, "cores": urls}},
            f"{CORE_NAME}-{index}",
        )
        for index, core in enumerate(cores)
    ]


def shared_by(
    addresses: Sequence[Address], only: str | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of an engine with this config by which it works for the ServeCores at these
    addresses: for the one on the host `only`, or for all. Raises `ConfigError`."""
    chosen = [address for address in addresses if only in (None, address[0])]
    if not chosen:
        raise ConfigError(f"`serve_core`: {only} is no host that has `core`")
    first, *others = [{"host": host, "port": port} for host, port in chosen]
    if len(addresses) == 1:
        return {"serve_core": first}
    if config.get("shard_cores"):
        raise ConfigError("`shard_cores`: `serve_core` of the engines says for whom they work")
    return {"serve_core": first, "shard_cores": others}
