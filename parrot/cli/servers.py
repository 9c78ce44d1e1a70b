"""The servers that commands start: what they find here, running them, showing what they do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from parrot.cli.console import ERR, fail
from parrot.cluster import Cluster, ClusterError


def visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA devices that CUDA would offer, found without loading it."""
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


@contextmanager
def running(cluster: Cluster) -> Iterator[None]:
    """Enter when all is ready; leaving stops all. Ends the command when the cluster fails."""
    with started(cluster):
        with showing_progress(cluster):
            cluster.wait_ready()
        yield


@contextmanager
def started(cluster: Cluster) -> Iterator[None]:
    """Enter as soon as the processes are; leaving stops all. Ends the command when the cluster
    fails."""
    try:
        cluster.start()
        yield
    except ClusterError as error:
        fail(str(error))
    finally:
        cluster.stop()


def hurry(cluster: Cluster) -> None:
    """Let stopping the cluster, which has begun or is about to, wait for no calls: an engine that
    is asked to end a second time ends them."""
    for name in cluster.engine_names:
        cluster.process(name).terminate()


@contextmanager
def showing_progress(cluster: Cluster) -> Iterator[None]:
    """On a terminal, show meanwhile what each process does."""
    with ERR.status(_Progress(cluster)):
        yield


class _Progress:
    """The last line of the log of each process, read anew at each refresh of the screen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in self._cluster.configs:
            lines = self._cluster.process(name).log_tail(1)
            table.add_row(f"[bold]{escape(name)}[/]", f"[dim]{escape(lines)}[/]")
        return table
