"""The command line: `run` measures, `plot` draws, and `model` prepares other servers."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.apps.backends import NETWORKS
from benchmark.apps.hosts import STYLES, features
from benchmark.apps.measure import measure
from benchmark.apps.workloads import WORKLOADS
from benchmark.results import RESULTS, Report, add_output


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
    _add_where(run)
    _add_what(run)
    _add_how(run)
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


def _add_where(run: argparse.ArgumentParser) -> None:
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="a running server")
    where.add_argument(
        "--launch", type=Path, nargs="+", metavar="CONFIG", help="start ServeCore and these engines"
    )
    where.add_argument(
        "--sim",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="CONFIG",
        help="simulate on virtual time",
    )
    run.add_argument("--engines", type=int, help="how many (launch: copies of the configs)")
    run.add_argument("--log-dir", type=Path, help="keep the servers' logs there")
    run.add_argument("--api-key")
    run.add_argument("--model", help="for --backend openai; default: the first the server names")
    run.add_argument(
        "--open-sessions",
        action="store_true",
        help="sessions are opened before a program's time counts, as connections are",
    )
    run.add_argument("--client-rtt", choices=NETWORKS, default="none")


def _add_what(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--workloads",
        nargs="+",
        required=True,
        metavar="NAME[:KEY=VALUE,...]",
        help=f"of {', '.join(WORKLOADS)}",
    )
    run.add_argument(
        "--sweep",
        action="store_true",
        help="each workload with all the original evaluation's parameters",
    )
    run.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths")
    run.add_argument(
        "--bystanders",
        type=float,
        default=0.0,
        metavar="RATE",
        help="other people's chats a second",
    )
    run.add_argument(
        "--alone",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="bystanders are measured without the application for so long",
    )
    run.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: the server's")


def _add_how(run: argparse.ArgumentParser) -> None:
    known = ", ".join(features())
    run.add_argument("--backend", choices=STYLES, default="parrot")
    run.add_argument("--off", action="append", default=[], metavar="FEATURE", help=f"of {known}")
    run.add_argument("--all-off", action="store_true")
    run.add_argument(
        "--compare",
        nargs="+",
        metavar="STYLE[:WHAT]",
        help="settings that run in turns: parrot:on parrot:all-off requests:all-off parrot:-policy "
        "parrot:policy=fcfs openai:URL",
    )
    run.add_argument("--repeat", type=int, default=1)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--time-limit", type=float, metavar="SECONDS", help="of one run")
    run.add_argument("--budget", type=float, metavar="SECONDS", help="begin no run after this")
    run.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="for goodput; default: 1.5 x the median of the first run",
    )
    run.add_argument(
        "--warm-up", action="store_true", help="one unrecorded run of the first workload"
    )
    run.add_argument(
        "--learn", type=int, default=8, metavar="REQUESTS", help="unrecorded ones before each run"
    )
    add_output(run, RESULTS / "apps.json")
