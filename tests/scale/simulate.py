"""Simulate thousands of engines in virtual time: real ServeCores, modelled engines and programs.

    python -m tests.scale.simulate --part windows

The cluster has `--shards` ServeCores with `--engines` engines each. The engines model H200s with an
8B model; their costs were fitted to measured steps. Recorded agents are shortened to a quarter of
their length, and each engine has a quarter of its KV. Traffic is recorded coding agents, chats,
map-reduce and calls with a long shared prefix, of tenants of very different sizes.

  division  load of all shards if sessions are divided by the shard that the client asks, by tenant
            and application, or as shards divide them, with and without regard to KV. Also with a
            tenant that makes 30% of all traffic, and with one shard removed.
  windows   minutes of the day, with each of `--seeds`. Four rules: `--sampled` shards with the
            sessions that shards give them; the same sessions dealt out evenly to these shards; one
            ServeCore with the engines of all these shards; and the last with a placement that
            ignores the KV that sessions will need later.
  fullest   the same minutes of the shards with the median and the largest number of agents, if
            shards divide sessions with and without regard to KV
  failures  engines of a shard that die under load
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.simulated import ENGINES, changed, sim_engine
from parrot.engine.config import SimConfig
from parrot.serve.contexts.index import KvUsage
from tests.scale.simulated.division import Divided, Rule, balance, divide
from tests.scale.simulated.shard import CORE, Outcome, Window, simulate
from tests.scale.simulated.summary import joined, summary
from tests.scale.simulated.traffic import (
    PEAK,
    App,
    Kind,
    Loads,
    Start,
    applications,
    loads_at,
    starts,
)

COSTS = ENGINES / "sim_llama_3_1_8b.json"
PARTS = ("division", "windows", "fullest", "failures")
HOT_SHARE = 0.3
DEALT = "dealt"
OMNISCIENT = "one ServeCore"
BLIND = "one, blind for promised KV"
RULES = (str(Rule.SHARDS), DEALT, OMNISCIENT, BLIND)


def engine_config() -> SimConfig:
    config = sim_engine(COSTS)
    num_blocks = config.instance.num_kv_cache_blocks // 4
    return changed(config, **{"instance.num_kv_cache_blocks": num_blocks})


def kv_of(num_engines: int) -> int:
    """Return the KV capacity of the engines, in tokens."""
    instance = engine_config().instance
    return num_engines * instance.num_kv_cache_blocks * instance.block_size


def division(args: argparse.Namespace, report: Report) -> None:
    shards, duration_s = range(args.shards), args.warm_up + args.measured
    seed, kv_tokens = args.seeds[0], kv_of(args.engines)
    for hot in (0.0, HOT_SHARE):
        apps = applications(args.tenants, seed, hot)
        sessions = _spread(_everything(args, apps, PEAK, seed), duration_s)
        for rule in Rule:
            divided = divide(sessions, shards, rule, seed, kv_tokens)
            rest = [number for number in shards if number != args.shards // 2]
            after = divide(sessions, rest, rule, seed, kv_tokens)
            row = {"hot_share": hot, "rule": str(rule)}
            row |= balance(divided, duration_s)._asdict()
            row["most_kv_without_one"] = balance(after, duration_s).most_kv
            report.add("division", row)


def _everything(
    args: argparse.Namespace, apps: Sequence[App], loads: Loads, seed: float | str
) -> list[Start]:
    """The sessions of the whole cluster."""
    shares = [(app, 1.0) for app in apps]
    duration_s = args.warm_up + args.measured
    return starts(shares, args.shards * args.engines, loads, duration_s, f"{seed}")


def _spread(sessions: Sequence[Start], duration_s: float) -> list[Start]:
    """Spread the starts of agents over the whole duration. `starts` puts them at its beginning."""
    times = iter([s.at / 10.0 * duration_s for s in sessions if s.app.kind is Kind.AGENT])
    spread = [replace(s, at=next(times)) if s.app.kind is Kind.AGENT else s for s in sessions]
    return sorted(spread, key=lambda s: s.at)


def _divided(args: argparse.Namespace, hour: float, seed: int, rule: Rule = Rule.SHARDS) -> Divided:
    """The sessions of a window by shard."""
    apps = applications(args.tenants, seed)
    sessions = _everything(args, apps, loads_at(hour), f"{seed} {hour}")
    return divide(sessions, range(args.shards), rule, seed, kv_of(args.engines))


def _run(
    args: argparse.Namespace, sessions: list[Start], num_shards: int = 1, num_killed: int = 0
) -> Outcome:
    """Run sessions on one ServeCore with the engines of `num_shards` shards."""
    window = Window(args.warm_up, args.warm_up + args.measured, num_killed)
    return simulate(engine_config(), num_shards * args.engines, sessions, window)


def windows(args: argparse.Namespace, report: Report) -> None:
    asked = [(args, h, seed, r) for seed in args.seeds for h in args.hours for r in args.rules]
    with ProcessPoolExecutor(args.processes) as pool:
        for row in pool.map(_window, asked):
            report.add("sums", row)


def _window(asked: tuple[argparse.Namespace, float, int, str]) -> dict[str, Any]:
    """Run the sessions of the sampled shards, divided by a rule, and return a row of figures."""
    args, hour, seed, name = asked
    divided = _divided(args, hour, seed)
    parts = [divided[shard] for shard in range(args.sampled)]
    everything = sorted((s for one in parts for s in one), key=lambda s: (s.at, s.seed))
    if name == DEALT:
        parts = [everything[shard :: args.sampled] for shard in range(args.sampled)]
    elif name != Rule.SHARDS:
        parts = [everything]
    began, found = time.process_time(), []
    for part in parts:
        with _blind() if name == BLIND else nullcontext():
            found.append(_run(args, part, args.sampled // len(parts)))
    row = {"seed": seed, "hour": hour, "rule": name, "shards": len(parts)}
    row |= summary(joined(found)) | {"hits": [summary(one)["hit"] for one in found]}
    return row | {"cpu_s": time.process_time() - began}


@contextmanager
def _blind() -> Iterator[None]:
    with patch.object(KvUsage, "session_tokens_evicted", lambda self, num_new: 0.0):
        yield


def fullest(args: argparse.Namespace, report: Report) -> None:
    asked = [(rule, seed) for rule in (Rule.COUNTS, Rule.SHARDS) for seed in args.seeds]
    for rule, seed in asked:
        divided = _divided(args, args.hours[0], seed, rule)
        agents = {n: sum(s.app.kind is Kind.AGENT for s in own) for n, own in divided.items()}
        shards = sorted(divided, key=lambda number: agents[number])
        for name, place in (("usual", len(shards) // 2), ("most", -1)):
            shard = shards[place]
            row = {"rule": str(rule), "seed": seed, "agents": name}
            row["agents_of_engine"] = agents[shard] / args.engines
            report.add("fullest", row | summary(_run(args, divided[shard])))


def failures(args: argparse.Namespace, report: Report) -> None:
    """Run the same sessions with all engines, and with 5% of them killed after the warm-up."""
    sessions = _divided(args, args.hours[0], args.seeds[0])[0]
    for num_killed in (0, max(1, round(0.05 * args.engines))):
        row = summary(_run(args, sessions, num_killed=num_killed))
        report.add("failures", {"killed": num_killed} | row)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--engines", type=int, default=64, help="engines of each shard")
    parser.add_argument("--tenants", type=int, default=2000)
    parser.add_argument("--sampled", type=int, default=4, help="shards that are run")
    parser.add_argument("--hours", type=float, nargs="+", default=[15.0], help="hours of the day")
    parser.add_argument("--rules", choices=RULES, nargs="+", default=RULES, help="for `windows`")
    parser.add_argument("--warm_up", type=float, default=120.0, help="seconds before measuring")
    parser.add_argument("--measured", type=float, default=60.0, help="measured seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, default=2, help="for `windows`")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", COSTS)
    report.uses("core", CORE.model_dump(mode="json"))
    parts = {"division": division, "windows": windows, "fullest": fullest, "failures": failures}
    parts[args.part](args, report)


if __name__ == "__main__":
    run_benchmark(__name__)
