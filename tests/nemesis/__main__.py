"""The nemesis: inject faults into a service of real processes while programs with known answers
run, and then check the recorded history for broken promises.

    programs --client--> link --> ServeCore --> link --> engines    killed, stopped, disconnected,
        |                           ^------------ link ----'        out of disk, ...
        v
    history --> check --> broken promises

Programs use the public API only. In addition, the checker gets one account of each server's
internal state at the end. The checker is a pure function of the history and has tests of its own.

    python -m tests.nemesis --minutes 30 --parallel 2

Rounds are numbered, starting at `--seed`. The number of a round determines its faults, programs and
engines. Rounds run in real time, so the timing of a repeated round differs. For each violation, the
command that repeats its round is printed, and the history and logs are kept in `--keep`."""

import argparse
import asyncio
import multiprocessing
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from tests.nemesis.faults import FAULTS
from tests.nemesis.programs import PROGRAMS
from tests.nemesis.rounds import MIXED, PROBE, Answers, Outcome, Plan, play_alone, undisturbed
from tests.nemesis.service import CORE, DIVIDED, ENGINES

COLUMNS = {"C2": "lost", "C1": "doubled", "C6": "doubled", "C4": "hung"}
"""Columns of the table by promise. Violations of other promises count as `other`."""
_SHOWN = 500  # characters


class Table:
    """One row for each fault, and one for the rounds with several faults."""

    def __init__(self) -> None:
        self._rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._recoveries: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, outcome: Outcome) -> None:
        title = outcome.plan.title
        row = self._rows[title]
        row.update(rounds=1, runs=outcome.faults.total(), programs=outcome.programs)
        row.update(calls=outcome.calls, given_up=outcome.given_up)
        row.update({f"{kind}_kills": number for kind, number in outcome.kills.items()})
        row.update(COLUMNS.get(one.promise, "other") for one in outcome.violations)
        for times in outcome.recoveries.values():
            self._recoveries[title] += times

    @property
    def num_kills(self) -> int:
        return sum(row["core_kills"] + row["engine_kills"] for row in self._rows.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        for name in sorted(self._rows, key=lambda name: (MIXED in name, name)):
            row, times = self._rows[name], sorted(self._recoveries[name])
            counts = {key: row[key] for key in ("rounds", "runs", "programs", "calls")}
            counts |= {key: row[key] for key in ("core_kills", "engine_kills", "given_up")}
            counts |= {key: row[key] for key in ("lost", "doubled", "hung", "other")}
            yield {"fault": name, **counts, **_recovery(times)}


def _recovery(times: Sequence[float]) -> dict[str, float | None]:
    if not times:
        return {"recovery_p50_s": None, "recovery_p99_s": None}
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return {"recovery_p50_s": statistics.median(times), "recovery_p99_s": p99}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="number of the first round")
    parser.add_argument("--minutes", type=float, default=1.0, help="start no round after this time")
    parser.add_argument("--rounds", type=int, default=None, help="maximum number of rounds")
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS))
    kinds = sorted(PROGRAMS)
    parser.add_argument("--programs", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--round-s", type=float, default=15.0, help="seconds of faults in a round")
    parser.add_argument("--concurrency", type=int, default=16, help="programs at once in a round")
    parser.add_argument("--parallel", type=int, default=1, help="rounds at once")
    parser.add_argument(
        "--embedded", type=float, default=0.0, help="share of rounds with the embedded model"
    )
    parser.add_argument(
        "--divided",
        type=float,
        default=0.0,
        help="share of rounds with the embedded model, divided among processes",
    )
    parser.add_argument(
        "--standby",
        type=float,
        default=0.0,
        help="share of rounds with two ServeCores and a journal in PostgreSQL",
    )
    parser.add_argument(
        "--shards",
        type=float,
        default=0.0,
        help="share of rounds with two shards, each with engines of its own",
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="folder for histories and logs of failed rounds"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    for name, config in {"core": CORE, **ENGINES}.items():
        report.uses(name, config)
    if not args.divided and all(FAULTS[name].of_ranks for name in args.faults):
        sys.exit(f"only divided engines have ranks: {args.faults} need --divided")
    kinds = {*args.programs, PROBE}
    shares = {"embedded": args.embedded, DIVIDED: args.divided}
    needed = {"sim", *(name for name, share in shares.items() if share)}
    answers = {name: asyncio.run(undisturbed(ENGINES[name], kinds)) for name in sorted(needed)}
    table = Table()
    for outcome in _outcomes(args, answers):
        table.add(outcome)
        plan, faults = outcome.plan, outcome.faults.total()
        print(
            f"seed {plan.seed}: {plan.title}, {faults} faults, {outcome.programs} programs, "
            f"waited for a CPU {outcome.waited_for_cpu:.0%} of its time",
            flush=True,
        )
        report["rows"], report["kills"] = list(table.rows()), table.num_kills
        for one in outcome.violations:
            row = {"seed": outcome.plan.seed, "promise": one.promise, "what": one.text[:_SHOWN]}
            row["waited_for_cpu"] = round(outcome.waited_for_cpu, 2)
            report.add("violations", row)
        for defect in outcome.defects:
            report.add("defects", {"seed": outcome.plan.seed, "what": defect[:_SHOWN]})
        if outcome.violations or outcome.defects:
            print(f"again: {_again(args, outcome.plan)}   kept: {outcome.kept}", flush=True)
        report.save()
    for row in table.rows():
        print("  ".join(f"{name}={value}" for name, value in row.items()))


def _again(args: argparse.Namespace, plan: Plan) -> str:
    """Return the command that repeats one round."""
    words = ["python", "-m", "tests.nemesis", "--seed", str(plan.seed), "--rounds", "1"]
    words += ["--round-s", f"{args.round_s:g}", "--concurrency", str(args.concurrency)]
    words += ["--embedded", f"{args.embedded:g}", "--divided", f"{args.divided:g}"]
    words += ["--standby", f"{args.standby:g}"]
    words += ["--shards", f"{args.shards:g}"]
    words += ["--faults", *args.faults, "--programs", *args.programs]
    return shlex.join(words)


def _outcomes(args: argparse.Namespace, answers: dict[str, Answers]) -> Iterator[Outcome]:
    """Run rounds in parallel, and yield their outcomes as they finish."""
    end = time.monotonic() + 60 * args.minutes
    seeds = count(args.seed)
    last = None if args.rounds is None else args.seed + args.rounds
    running: set[Future[Outcome]] = set()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.parallel, mp_context=spawn) as pool:
        while True:
            while len(running) < args.parallel and time.monotonic() < end:
                seed = next(seeds)
                if seed == last:
                    end = 0.0
                    break
                plan = Plan.of(
                    seed,
                    args.faults,
                    args.round_s,
                    concurrency=args.concurrency,
                    embedded_share=args.embedded,
                    divided_share=args.divided,
                    standby_share=args.standby,
                    shards_share=args.shards,
                )
                running.add(pool.submit(play_alone, plan, answers[plan.engine], args.keep))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


if __name__ == "__main__":
    run_benchmark(__name__)
