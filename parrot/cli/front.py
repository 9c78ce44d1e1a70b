"""`parrot up URL`: asks the servers for their models, and waits until ServeCore has one."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parrot.cluster import Cluster, ClusterError
from parrot.cluster.ports import ask
from parrot.engine.openai.probe import list_models
from parrot.engine.openai.upstream import NotServed, Upstream, server_client
from parrot.protocol.errors import EngineFailed, ParrotError, Unavailable
from parrot.protocol.transport import Unreachable
from parrot.serve.config import UpstreamServer
from parrot.upstreams.servers import engine_config
from parrot.utils.addresses import is_url
from parrot.utils.config import ConfigError, parse_config

_PAUSE_S = 0.05  # Seconds between two questions whether ServeCore has a model.


def planned_servers(
    urls: Sequence[str], api_key_file: Path | None, ca_file: Path | None
) -> list[dict[str, Any]]:
    """An entry of the config key `servers` for each URL. Asks each server for its models. Raises
    `ConfigError` if a server does not answer, refuses the key, or has no model."""
    instance = {}
    if api_key_file is not None:
        instance["api_key_file"] = str(api_key_file.absolute())
    if ca_file is not None:
        instance["ca_file"] = str(ca_file.absolute())
    return [{"url": _api_url(url, instance), "engine": {"instance": instance}} for url in urls]


def _api_url(url: str, instance: dict[str, Any]) -> str:
    """`url`, or `url/v1` if the API is there."""
    if not is_url(url):
        raise ConfigError(f"{url} is not a URL: write http://{url}, or give a single model")
    base = url.rstrip("/")
    try:
        num_models = _num_models(base, instance)
    except NotServed as error:
        if base.endswith("/v1"):
            raise ConfigError(f"{url}: {error.message}") from None
        return _api_url(base + "/v1", instance)
    except Unreachable as error:
        raise ConfigError(f"{error.message}. Is the server running?") from None
    except Unavailable as error:
        raise ConfigError(error.message) from None
    except EngineFailed as error:
        hint = ""
        if "API key" in error.message:
            hint = ". Set OPENAI_API_KEY, or name a file with --api-key-file"
        raise ConfigError(f"{url}: {error.message}{hint}") from None
    except ParrotError as error:
        raise ConfigError(f"{url}: {error.message}") from None
    if not num_models:
        raise ConfigError(f"{url}: the server lists no model; load one first")
    return base


def _num_models(url: str, instance: dict[str, Any]) -> int:
    """Raises `ConfigError`, and `ParrotError` as `list_models` does."""
    server = {"url": url, "engine": {"instance": instance}}
    config = engine_config(parse_config(UpstreamServer, server, "command line"), "any")

    async def count() -> int:
        http = server_client(config)
        try:
            return len(await list_models(http))
        finally:
            await http.close()

    return asyncio.run(count())


def reported_context(servers: Sequence[dict[str, Any]], model: str) -> int | None:
    """The model's maximum tokens of prompt and output. None: no server reports the length."""

    async def of_server(server: dict[str, Any]) -> int | None:
        config = engine_config(parse_config(UpstreamServer, server, "command line"), model)
        upstream = Upstream(config)
        try:
            await upstream.probe()
            is_given = "max_seq_len" in config.instance.model_fields_set
            return config.instance.max_seq_len if is_given else upstream.max_model_len
        finally:
            await upstream.close()

    for server in servers:
        if (length := asyncio.run(of_server(server))) is not None:
            return length
    return None


def wait_for_servers(cluster: Cluster, timeout_s: float) -> None:
    """Return when ServeCore has the first model. Raises `ClusterError` after the timeout, or if
    ServeCore dies."""
    core = cluster.configs["core"]
    deadline = time.monotonic() + timeout_s
    while True:
        status, _ = ask(core["host"], core["port"], "/ready", 5.0, cluster.cluster_token) or (0, 0)
        if status == 200:
            return
        if (dead := cluster.wait_death(_PAUSE_S)) is not None:
            raise ClusterError(dead.death_message())
        if time.monotonic() > deadline:
            raise ClusterError(f"no model after {timeout_s:g} s: see {cluster.log_dir}")
