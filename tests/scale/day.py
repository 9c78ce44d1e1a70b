"""Simulate a day of the cluster of `tests.scale.simulate`: night, morning, peak and evening.

    python -m tests.scale.day --part hours

Each kind of session starts at a rate that follows its curve in `tests.scale.simulated.traffic`.
An hour takes `--hour_s` seconds. If that is less than 3,600, the hour is sampled: agents start and
leave at the beginning of the hour, and its last two thirds are measured. Caches are kept from hour
to hour. The simulation starts one hour before the first measured hour.

  hours     real ServeCores with modelled engines, figures of each hour: a cluster of `--shards`
            shards with `--engines` engines each, and one ServeCore with all engines. `means` are
            the means over all seeds.
  division  load of each shard by hour, for all sessions of all shards
  takeover  a shard at the peak whose ServeCore dies. `--down` seconds later, another ServeCore
            restores the sessions from the journal. Compared with a shard that stays alive, and
            with a successor that restores engines only for calls that were running. Figures cover
            each period of ten seconds after the failure.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import Any
from unittest.mock import patch

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot.serve.execution.dispatcher import ReturningEngines
from parrot.simulation.report import percentile
from tests.scale.simulate import COSTS, OMNISCIENT, engine_config, kv_of
from tests.scale.simulated.division import CALLS, Rule, divide, placed
from tests.scale.simulated.shard import CORE, Outcome, simulate_on
from tests.scale.simulated.summary import joined, summary
from tests.scale.simulated.traffic import (
    AGENT_S,
    PEAK,
    Day,
    Kind,
    Shares,
    applications,
    starts,
)

PARTS = ("hours", "division", "takeover")
RULES = (str(Rule.SHARDS), OMNISCIENT)
ALIVE, TAKEN_OVER, FORGETFUL = "alive", "taken over", "taken over, calls under way alone"
SETTLED = 1 / 3  # The share of a sampled hour, from its beginning, that is not measured.
STEP_S = 10.0  # Seconds that each row of `takeover` covers.


def hours(args: argparse.Namespace, report: Report) -> None:
    for seed in args.seeds:
        for rule in args.rules:
            for row in _hours(args, seed, rule):
                report.add("hours", row)
    for hour in range(args.first, args.last):
        rows = [row for row in report["hours"] if row["hour"] == hour]
        report.add("means", {"hour": hour} | _means(rows, args.rules))


def _hours(args: argparse.Namespace, seed: int, rule: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each hour of a day."""
    settle_s = SETTLED * args.hour_s if args.hour_s < 3600 else 0.0
    day = Day(args.hour_s, first=args.first, last=args.last, settle_s=settle_s)
    sessions = list(day.starts(_shares(args, seed), args.shards * args.engines, f"{seed}"))
    num_engines, parts = args.shards * args.engines, [sessions]
    if rule == Rule.SHARDS:
        num_engines = args.engines
        shards, kv_tokens = range(args.shards), kv_of(num_engines)
        parts = list(divide(sessions, shards, Rule.SHARDS, seed, kv_tokens).values())
    began = time.process_time()
    found = [simulate_on(engine_config(), num_engines, part, day.marks)[1::2] for part in parts]
    cpu_s = time.process_time() - began
    for hour, outcomes in enumerate(zip(*found, strict=True), args.first):
        row = {"seed": seed, "rule": rule, "hour": hour} | _row(outcomes)
        yield row | {"cpu_s_of_day": cpu_s}


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    total = joined(outcomes)
    row = summary(total)
    shards = [summary(one) for one in outcomes]
    calls = [one["calls"] for one in shards]
    held = [part for end in total.ends for part in end.held]
    return row | {
        "busiest_shard": max(one["busy"] for one in shards) / row["busy"],
        "most_calls_of_shard": max(calls) / fmean(calls) if any(calls) else 1.0,
        "held": fmean(held),
        "most_held": max(held),
        "sessions": sum(end.sessions for end in total.ends),
        "journal_mb": sum(end.journal[0] for end in total.ends) / 1e6,
        "written_mb_per_s": total.written / 1e6 / (total.window.end_s - total.window.warm_up_s),
        "core_us": 1e6 * total.core_s / row["calls"] if row["calls"] else 0.0,
    }


def _means(rows: Sequence[dict[str, Any]], rules: Sequence[str]) -> dict[str, Any]:
    """Return the means over the seeds, by rule. With two rules, also return the least and the
    greatest difference of their `hit` values for the same seed."""
    found: dict[str, Any] = {}
    for rule in rules:
        mine = [row for row in rows if row["rule"] == rule]
        found["shards" if rule == Rule.SHARDS else "one"] = _mean(mine)
    if len(rules) > 1:
        hits = [[row["hit"] for row in rows if row["rule"] == rule] for rule in rules]
        more = [other - first for first, other in zip(*hits, strict=True)]
        found["one_finds_more"] = {"least": min(more), "most": max(more)}
    return found


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        if isinstance(value, dict):
            found[name] = _mean([row[name] for row in rows if name in row])
        elif isinstance(value, int | float) and name not in ("seed", "hour"):
            found[name] = fmean(row[name] for row in rows if name in row)
    return found


def _shares(args: argparse.Namespace, seed: int) -> Shares:
    return [(app, 1.0) for app in applications(args.tenants, seed)]


def division(args: argparse.Namespace, report: Report) -> None:
    """Scale the agents' stay with `--hour_s`, so that as many leave per hour as in a full hour."""
    seed = args.seeds[0]
    day = Day(args.hour_s, AGENT_S * args.hour_s / 3600, args.first, args.last)
    shards = range(args.shards)
    for rule in args.division_rules:
        sessions = day.starts(_shares(args, seed), args.shards * args.engines, f"{seed}")
        found = placed(sessions, shards, Rule(rule), seed, kv_of(args.engines))
        for row in _divided(args, day, found):
            report.add("division", {"rule": rule} | row)


def _divided(
    args: argparse.Namespace, day: Day, sessions: Iterator[tuple[int, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each hour: calls per second and working agents of the shards."""
    calls = [[0.0] * args.shards for _ in range(day.num_hours)]
    agents = [[0.0] * args.shards for _ in range(day.num_hours)]
    begun = [0] * day.num_hours
    for shard, session in sessions:
        first = int(session.at / args.hour_s)
        begun[first] += 1
        if session.app.kind is not Kind.AGENT:
            calls[first][shard] += CALLS[session.app.kind] / args.hour_s
            continue
        end_s = min(session.until, day.end_s)
        for hour in range(first, min(day.num_hours, int(end_s / args.hour_s) + 1)):
            begin_s = max(session.at, hour * args.hour_s)
            part = max(0.0, min(end_s, (hour + 1) * args.hour_s) - begin_s) / args.hour_s
            agents[hour][shard] += part
            calls[hour][shard] += part * CALLS[Kind.AGENT]
    for hour in range(1, day.num_hours):
        row: dict[str, Any] = {
            "hour": args.first + hour - 1,
            "sessions_per_s": begun[hour] / args.hour_s,
        }
        for name, loads in (("calls", calls[hour]), ("agents", agents[hour])):
            mean = fmean(loads)
            row[name] = {"sum": sum(loads), "most": max(loads), "least": min(loads)}
            row[name] |= {f"p{n}_over_mean": percentile(loads, n) / mean for n in (50, 99)}
            row[name] |= {"most_over_mean": max(loads) / mean, "least_over_mean": min(loads) / mean}
        yield row


def takeover(args: argparse.Namespace, report: Report) -> None:
    num_steps, num_engines = round(args.measured / STEP_S), args.shards * args.engines
    marks = [args.warm_up + number * STEP_S for number in range(num_steps + 1)]
    for seed in args.seeds:
        sessions = starts(_shares(args, seed), num_engines, PEAK, marks[-1], f"{seed}")
        shards, kv_tokens = range(args.shards), kv_of(args.engines)
        part = divide(sessions, shards, Rule.SHARDS, seed, kv_tokens)[0]
        for what, down_s in ((ALIVE, 0.0), (TAKEN_OVER, args.down), (FORGETFUL, args.down)):
            with _forgetful() if what == FORGETFUL else nullcontext():
                found = simulate_on(engine_config(), args.engines, part, marks, down_s)
            for number, outcome in enumerate(found):
                row = {"seed": seed, "what": what, "from_s": number * STEP_S}
                report.add("takeover", row | _row([outcome]))
    for what in (ALIVE, TAKEN_OVER, FORGETFUL):
        for number in range(num_steps):
            row = {"what": what, "from_s": number * STEP_S}
            rows = [one for one in report["takeover"] if row.items() <= one.items()]
            report.add("takeovers", row | _mean(rows))


@contextmanager
def _forgetful() -> Iterator[None]:
    with patch.object(ReturningEngines, "_engine_before_restart", lambda self, completion: None):
        yield


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--engines", type=int, default=64, help="engines of each shard")
    parser.add_argument("--tenants", type=int, default=2000)
    parser.add_argument("--hour_s", type=float, default=60.0, help="seconds of each hour")
    parser.add_argument("--first", type=int, default=0, help="first measured hour")
    parser.add_argument("--last", type=int, default=24, help="hour at which the day ends")
    parser.add_argument("--rules", choices=RULES, nargs="+", default=RULES, help="for `hours`")
    parser.add_argument("--division_rules", choices=list(map(str, Rule)), nargs="+",
                        default=list(map(str, Rule)))  # fmt: skip
    parser.add_argument("--warm_up", type=float, default=60.0, help="seconds before a takeover")
    parser.add_argument("--measured", type=float, default=60.0, help="seconds measured after it")
    parser.add_argument("--down", type=float, default=3.5, help="seconds without a ServeCore")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", COSTS)
    report.uses("core", CORE.model_dump(mode="json"))
    {"hours": hours, "division": division, "takeover": takeover}[args.part](args, report)


if __name__ == "__main__":
    run_benchmark(__name__)
