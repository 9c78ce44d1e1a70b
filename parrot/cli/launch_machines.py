"""`parrot launch INVENTORY`: a cluster on machines that ssh reaches."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from parrot.cli.console import ERR, OUT, fail, orderly_exit, warn
from parrot.launch.by_ssh.inventory import Inventory, Site, read_inventory
from parrot.launch.by_ssh.machines import LaunchError, Machines
from parrot.launch.by_ssh.ssh import AGENT, ssh_command
from parrot.launch.by_ssh.wire import Action, Report
from parrot.serve.page.visitors import page_url
from parrot.utils.config import ConfigError

_NO_SECRETS = {"PARROT_CORE__INSECURE": "true"}  # are needed to stop what has some


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of the command line."""

    detach: bool
    stop: bool
    dry_run: bool
    ready_timeout_s: float


def launch_machines(path: Path, options: LaunchOptions) -> None:
    """Run the servers of an inventory until a signal comes, start them so that they go on, stop
    them, or print the commands. Ends by `SystemExit` if that fails."""
    stop = options.stop
    try:
        inventory = read_inventory(path, {**os.environ, **_NO_SECRETS} if stop else os.environ)
    except ConfigError as error:
        fail(str(error))
    if options.dry_run:
        for site in inventory.sites:
            sys.stdout.write(_commands(site))
        return
    machines = Machines(inventory, _tell)
    with orderly_exit(machines.hurry):
        try:
            if stop:
                machines.stop_elsewhere()
            else:
                _start(machines, inventory, path, options)
        except LaunchError as error:
            fail(_shown(str(error)))


def _start(machines: Machines, inventory: Inventory, path: Path, options: LaunchOptions) -> None:
    ERR.print(f"Checking {inventory.num_machines} machines", soft_wrap=True)
    machines.start(Action.DETACH if options.detach else Action.RUN)
    if options.detach:
        machines.detached(options.ready_timeout_s)
        _say_where(inventory)
        OUT.print(f"It goes on by itself. parrot launch --stop {escape(str(path))} ends it.")
        return
    try:
        machines.serve(lambda: _say_where(inventory))
    finally:
        machines.stop()


def _say_where(inventory: Inventory) -> None:
    for url, config in inventory.cores.items():
        OUT.print(f"ServeCore is at [bold]{url}[/]", soft_wrap=True)
        if config.get("page", True):
            OUT.print(f"Look at it: {page_url(url, config.get('cluster_token'))}", soft_wrap=True)


def _tell(address: str, report: Report) -> None:
    """Print a line. What other machines say must not move a terminal's cursor."""
    name, text = escape(_shown(report.name)), escape(_shown(report.text))
    place = f"[bold]{escape(address)}[/] {name}".rstrip()
    if report.kind == "log":
        OUT.print(f"{place} [dim]|[/] {text}", soft_wrap=True)
    elif report.kind == "ready":
        OUT.print(f"{place} [green]is ready[/]", soft_wrap=True)
    elif report.kind in ("news", "problem"):
        warn(f"{address}: {_shown(report.text)}")


def _shown(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _commands(site: Site) -> str:
    """The command that is run here and, indented, those that its agent runs. What these read from
    stdin, the order and the configs, is not shown: it holds secrets."""
    lines = [shlex.join(ssh_command(site.host, [site.host.python, *AGENT]))]
    for placed in site.servers:
        server = placed.server
        command = [site.host.python, "-m", "parrot.cluster.child", server.module, server.name]
        env = [f"{name}={shlex.quote(text)}" for name, text in placed.env.items()]
        line = " ".join([*env, shlex.join(command)])
        lines.append(f"    {line}  # port {placed.port}")
    return "\n".join(lines) + "\n"
