"""`parrot launch`: a cluster from config files."""

import os
from pathlib import Path

from rich.table import Table

from parrot.cli.console import OUT, fail, orderly_exit, warn
from parrot.cli.servers import running
from parrot.cluster import Cluster, ClusterError
from parrot.launch.configs import read_configs
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


def _table(cluster: Cluster) -> Table:
    table = Table("process", "address", "pid", "log")
    for name in cluster.configs:
        process = cluster.process(name)
        table.add_row(name, cluster.url(name), str(process.pid), str(process.log_path))
    return table
