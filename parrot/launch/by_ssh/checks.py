"""Checks of a machine for the servers that are to run on it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from parrot.cluster.ports import is_free
from parrot.launch.by_ssh.wire import Order, ServerOrder


def visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA devices that CUDA would offer, found without loading it."""
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def problems(order: Order) -> Iterator[str]:
    """Why its servers cannot run here, each with what to do about it."""
    if (here := version("parrot")) != order.version:
        yield f"Parrot {here} is installed, not {order.version}: install the launcher's version"
    yield from _lacking(order.servers)
    for server in order.servers:
        host, port = str(server.config["host"]), server.config["port"]
        assert isinstance(port, int), port
        try:
            if not is_free(host, port):
                yield f"port {port} is taken: give {server.name} another `port`"
        except OSError as error:
            yield f"{server.name} cannot listen on {host}: {error.strerror}"


def _lacking(servers: Sequence[ServerOrder]) -> Iterator[str]:
    needed = 1 + max((gpu for server in servers for gpu in server.gpus or ()), default=-1)
    if needed > (found := visible_gpus(os.environ)):
        yield (
            f"{found} GPUs are here, and the engines need {needed}: fewer engines, or `device: cpu`"
        )
    cores = sum(server.cores or 0 for server in servers)
    if cores > (num_cores := os.cpu_count() or 1):
        yield f"{num_cores} cores are here, and the engines are to use {cores}: lower their `cores`"
