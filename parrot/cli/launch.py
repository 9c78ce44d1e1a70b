"""`parrot launch`: a cluster from config files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from parrot.cli.cluster_configs import read_configs
from parrot.cli.console import ERR, OUT, fail, orderly_exit, warn
from parrot.cluster import Cluster, ClusterError
from parrot.serve.page.visitors import page_url
from parrot.utils.config import ConfigError


def launch_and_wait(paths: list[Path], log_dir: Path, ready_timeout_s: float) -> None:
    """Run until a signal comes or ServeCore dies, and end by `SystemExit`. An engine that dies is
    started again."""
    try:
        core, engines = read_configs(paths, os.environ)
        cluster = Cluster(core, engines, log_dir=log_dir, ready_timeout_s=ready_timeout_s)
    except (ConfigError, ClusterError) as error:
        fail(str(error))
    with orderly_exit(), running(cluster):
        OUT.print(_table(cluster))
        OUT.print(f"ServeCore is ready at [bold]{cluster.core_url}[/]. Ctrl-C stops all.")
        if cluster.configs["core"].get("page", True):
            address = page_url(cluster.core_url, cluster.cluster_token)
            OUT.print(f"Look at it: {address}", soft_wrap=True)
        fail(cluster.supervise(warn).death_message())


@contextmanager
def running(cluster: Cluster) -> Iterator[None]:
    """Enter when all is ready, showing meanwhile what each process does; leaving stops all. Ends
    the command when the cluster fails."""
    try:
        with ERR.status(_Progress(cluster)):
            cluster.start()
            cluster.wait_ready()
        yield
    except ClusterError as error:
        fail(str(error))
    finally:
        cluster.stop()


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


def _table(cluster: Cluster) -> Table:
    table = Table("process", "address", "pid", "log")
    for name in cluster.configs:
        process = cluster.process(name)
        table.add_row(name, cluster.url(name), str(process.pid), str(process.log_path))
    return table
