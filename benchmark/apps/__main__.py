"""Applications on launched or simulated servers: `run` measures, `plot` draws, and `model` writes a
model folder for other servers. `python -m benchmark.apps --help` shows the options."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.apps.backends import NETWORKS
from benchmark.apps.measure import measure
from benchmark.apps.settings import features
from benchmark.results import RESULTS, Report, add_output
from parrot.cli.bench.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    try:
        args.command(args, shlex.join(["python", "-m", "benchmark.apps", *arguments]))
    except ValueError as error:
        parser().error(str(error))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="benchmark.apps", description=__doc__)
    commands = root.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure workloads")
    run.set_defaults(command=_measure)
    _add_servers(run)
    _add_workloads(run)
    _add_runs(run)
    model = commands.add_parser("model", help="write a model folder for other servers")
    model.set_defaults(command=_write_model)
    model.add_argument("shape")
    model.add_argument("folder", type=Path)
    plot = commands.add_parser("plot", help="draw result files")
    plot.set_defaults(command=_plot)
    plot.add_argument("results", type=Path, nargs="+")
    plot.add_argument("--output", type=Path, required=True, help="PNG or SVG")
    return root


def _measure(args: argparse.Namespace, command: str) -> None:
    measure(args, Report(args.output, command, args.commit))


def _plot(args: argparse.Namespace, command: str) -> None:
    from benchmark.plots import applications  # imports matplotlib

    applications(args.results, args.output)


def _write_model(args: argparse.Namespace, command: str) -> None:
    from benchmark.apps.dummy_model import write_dummy_model  # imports torch

    write_dummy_model(args.shape, args.folder)


def _add_servers(run: argparse.ArgumentParser) -> None:
    servers = run.add_mutually_exclusive_group(required=True)
    start = "start ServeCore and these engines"
    servers.add_argument("--launch", type=Path, nargs="+", metavar="CONFIG", help=start)
    simulate = "simulate on virtual time"
    servers.add_argument(
        "--sim", type=Path, nargs="?", const=Path(), metavar="CONFIG", help=simulate
    )
    run.add_argument(
        "--engines", type=int, help="number of engines (launch: copies of the configs)"
    )
    run.add_argument("--log-dir", type=Path, help="keep the servers' logs in this folder")
    run.add_argument("--client-rtt", choices=NETWORKS, default="none")
    run.add_argument(
        "--open-sessions",
        action="store_true",
        help="open sessions before a program's time counts, like connections",
    )


def _add_workloads(run: argparse.ArgumentParser) -> None:
    known = f"of {', '.join(WORKLOADS)}"
    run.add_argument(
        "--workloads", nargs="+", required=True, metavar="NAME[:KEY=VALUE,...]", help=known
    )
    run.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths")
    chats = "chats of other users per second"
    run.add_argument("--bystanders", type=float, default=0.0, metavar="RATE", help=chats)
    alone = "measure bystanders without the application for this long"
    run.add_argument("--alone", type=float, default=5.0, metavar="SECONDS", help=alone)


def _add_runs(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--compare",
        nargs="+",
        default=["parrot:on"],
        metavar="STYLE[:WHAT]",
        help="settings that run in turns: parrot:on parrot:all-off requests:all-off parrot:-policy "
        f"parrot:policy=fcfs; the features are {', '.join(features())}",
    )
    run.add_argument("--repeat", type=int, default=1)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of one run")
    run.add_argument("--budget", type=float, metavar="SECONDS", help="start no run after this time")
    warm_up = "one unrecorded run of the first workload"
    run.add_argument("--warm-up", action="store_true", help=warm_up)
    learn = "unrecorded requests before each run"
    run.add_argument("--learn", type=int, default=8, metavar="REQUESTS", help=learn)
    add_output(run, RESULTS / "apps.json")


if __name__ == "__main__":
    main()
