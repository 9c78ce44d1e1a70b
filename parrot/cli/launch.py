"""`parrot launch`: a cluster from config files, on this machine or on Ray."""

import os
import threading
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from parrot.cli.console import ERR, OUT, fail, orderly_exit, warn
from parrot.cli.servers import hurry, require_packages, running
from parrot.cluster import Cluster, ClusterError
from parrot.gateway.page.visitors import page_url
from parrot.launch.configs import InventoryError, read_configs, read_entries, refuse_inventory
from parrot.utils.config import ConfigError, read_config_object
from parrot.utils.installation import install_line


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The address of the Ray cluster, and the name of the service."""

    address: str
    name: str
    is_detached: bool
    ready_timeout_s: float


def refuse_inventories(paths: list[Path]) -> None:
    """Raises `SystemExit` if one of the files is an inventory or cannot be read."""
    try:
        for path in paths:
            refuse_inventory(path, read_config_object(path))
    except InventoryError as error:
        fail(str(error), 2)
    except ConfigError as error:
        fail(str(error))


def launch_and_wait(paths: list[Path], log_dir: Path, ready_timeout_s: float) -> None:
    """Run until a signal or until ServeCore exits, then raise `SystemExit`. Engines that exit are
    restarted."""
    try:
        core, engines = read_configs(paths, os.environ)
        require_packages(engines)
        cluster = Cluster(core, engines, log_dir=log_dir, ready_timeout_s=ready_timeout_s)
    except (ConfigError, ClusterError) as error:
        fail(str(error))
    with orderly_exit(partial(hurry, cluster)), running(cluster):
        OUT.print(_table(cluster))
        OUT.print(f"ServeCore is ready at [bold]{cluster.core_url}[/]. Ctrl-C stops all.")
        if cluster.configs["core"].get("page", True):
            address = page_url(cluster.core_url, cluster.cluster_token)
            OUT.print(f"Web page: {address}", soft_wrap=True)
        fail(cluster.supervise(warn).death_message())


def launch_on_ray(paths: list[Path], options: RayOptions) -> None:
    """Run on a Ray cluster until a signal, then raise `SystemExit`. Detached: return when all
    servers are ready."""
    _require_ray()
    from parrot.launch.on_ray.pools import ray_plan
    from parrot.launch.on_ray.service import connected, launch_detached, serving

    try:
        plan = ray_plan(*read_entries(paths, os.environ, "ray"))
        with connected(options.address, options.name) as namespace:
            if options.is_detached:
                url = launch_detached(plan, namespace, options.ready_timeout_s)
                OUT.print(f"ServeCore is ready at [bold]{url}[/].")
                OUT.print(f"Stop it with `parrot launch --ray --stop --name {options.name}`.")
                return
            hurried = threading.Event()
            with (
                orderly_exit(hurried.set),
                serving(plan, namespace, options.ready_timeout_s, _say, hurried) as supervisor,
            ):
                table = Table("process", "address")
                for name, engine in supervisor.serving.items():
                    table.add_row(name, f"http://{engine.host}:{engine.port}")
                OUT.print(table)
                url = str(supervisor.core_url)
                OUT.print(f"ServeCore is ready at [bold]{url}[/]. Ctrl-C drains and stops all.")
                supervisor.run()
    except (ConfigError, ClusterError) as error:
        fail(str(error))


def stop_on_ray(address: str, name: str) -> None:
    """Drain and stop a service on Ray."""
    _require_ray()
    from parrot.launch.on_ray.service import connected, end_service

    try:
        with connected(address, name) as namespace:
            OUT.print(f"Stopped: {', '.join(end_service(namespace))}", soft_wrap=True)
    except ClusterError as error:
        fail(str(error))


def _say(message: str) -> None:
    ERR.print(escape(message), soft_wrap=True)


def _require_ray() -> None:
    if find_spec("ray") is None:
        fail(f"Ray is not installed: {install_line('ray')}")


def _table(cluster: Cluster) -> Table:
    table = Table("process", "address", "pid", "log")
    for name in cluster.configs:
        process = cluster.process(name)
        table.add_row(name, cluster.url(name), str(process.pid), str(process.log_path))
    return table
