"""Thousands of engines in virtual time: the real ServeCore, modelled engines and a day's programs.

    python -m benchmark.scale.simulate --part windows

The cluster has `--shards` ServeCores with `--engines` engines each: H200s with an 8B model, by the
costs that were fitted to measured steps, with a quarter of their KV for agents a quarter as long.
Traffic is that of a day: coding agents that were recorded, chats, map-reduce, calls with a long
shared beginning, of tenants of very different sizes.

  division  load of all shards, if sessions are divided by their ids, by tenant and application, or
            so with bounds; with a tenant that has 30% of all, and when a shard is gone
  windows   minutes of the day: `--sampled` shards, each by itself, with the sessions that a bounded
            division by application gives them; the same sessions dealt out among these shards; then
            one ServeCore with all engines of these shards, and that with a placement that does not
            weigh what KV sessions will go on from; and a shard that has a part of the sessions of
            each application. The bound is a memory without end
  failures  engines of a shard that die under load
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.scale.simulated.division import Rule, balance, divide, moved
from benchmark.scale.simulated.shard import CORE, Outcome, Window, simulate
from benchmark.scale.simulated.summary import joined, summary
from benchmark.scale.simulated.traffic import Start, applications, load_at, starts
from benchmark.simulated import ENGINES, changed, sim_engine
from parrot.engine.config import SimConfig
from parrot.serve.contexts.room import Room

COSTS = ENGINES / "sim_llama_3_1_8b.json"
PARTS = ("division", "windows", "failures")
HOT_SHARE = 0.3
OMNISCIENT = "one ServeCore"
BLIND = "one, blind for promised KV"


def engine_config() -> SimConfig:
    config = sim_engine(COSTS)
    num_blocks = config.instance.num_kv_cache_blocks // 4
    return changed(config, **{"instance.num_kv_cache_blocks": num_blocks})


def division(args: argparse.Namespace, report: Report) -> None:
    shards = range(args.shards)
    for hot in (0.0, HOT_SHARE):
        apps = applications(args.tenants, args.seed, hot)
        for rule in Rule:
            divided = divide(apps, shards, rule)
            rest = [number for number in shards if number != args.shards // 2]
            after = divide(apps, rest, rule)
            row = {"hot_share": hot, "rule": str(rule), **balance(apps, divided)._asdict()}
            row["most_kv_without_one"] = balance(apps, after).most_kv
            row["moved_without_one"] = moved(divided, after)
            report.add("division", row)


class Traffic:
    """The sessions of a cluster, of which some shards' are run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._apps = applications(args.tenants, args.seed)
        self._config = engine_config()

    def sessions(self, rule: Rule, shard: int, hour: float) -> list[Start]:
        """Those of one shard, if they are divided like that."""
        args = self._args
        everything = args.shards * args.engines
        shares = divide(self._apps, range(args.shards), rule)[shard]
        seed = f"{args.seed} {rule} {shard} {hour}"
        return starts(shares, everything, load_at(hour), args.warm_up + args.measured, seed)

    def run(self, sessions: list[Start], num_shards: int = 1, num_killed: int = 0) -> Outcome:
        """Run them on one ServeCore that has the engines of so many shards."""
        args = self._args
        window = Window(args.warm_up, args.warm_up + args.measured, num_killed)
        return simulate(self._config, num_shards * args.engines, sessions, window)


def windows(args: argparse.Namespace, report: Report) -> None:
    traffic, chosen = Traffic(args), range(args.sampled)
    for hour in args.hours:
        own = [traffic.sessions(Rule.BOUNDED, shard, hour) for shard in chosen]
        everything = sorted((s for one in own for s in one), key=lambda s: (s.at, s.seed))
        dealt = [everything[shard :: args.sampled] for shard in chosen]
        divided = {"bounded": own, "dealt": dealt, OMNISCIENT: [everything], BLIND: [everything]}
        for name, parts in divided.items():
            began, found = time.process_time(), []
            for part in parts:
                with _blind() if name == BLIND else nullcontext():
                    found.append(traffic.run(part, args.sampled // len(parts)))
                if len(parts) > 1:
                    report.add("shards", {"hour": hour, "rule": name} | summary(found[-1]))
            row = {"hour": hour, "rule": name, "shards": len(parts)} | summary(joined(found))
            report.add("sums", row | {"cpu_s": time.process_time() - began})
        if args.sampled < args.shards:
            row = summary(traffic.run(traffic.sessions(Rule.SESSION, 0, hour)))
            report.add("sums", {"hour": hour, "rule": str(Rule.SESSION), "shards": 1} | row)


@contextmanager
def _blind() -> Iterator[None]:
    with patch.object(Room, "lost", lambda self, num_new: 0.0):
        yield


def failures(args: argparse.Namespace, report: Report) -> None:
    """The same sessions twice: with all engines, and with some that die when it begins to count."""
    traffic = Traffic(args)
    sessions = traffic.sessions(Rule.BOUNDED, 0, args.hours[0])
    for num_killed in (0, max(1, round(0.05 * args.engines))):
        row = summary(traffic.run(sessions, num_killed=num_killed))
        report.add("failures", {"killed": num_killed} | row)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--engines", type=int, default=64, help="of each shard")
    parser.add_argument("--tenants", type=int, default=2000)
    parser.add_argument("--sampled", type=int, default=4, help="shards that are run")
    parser.add_argument("--hours", type=float, nargs="+", default=[15.0], help="of the day")
    parser.add_argument("--warm_up", type=float, default=120.0, help="seconds that do not count")
    parser.add_argument("--measured", type=float, default=60.0, help="seconds that count")
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", COSTS)
    report.uses("core", CORE.model_dump(mode="json"))
    {"division": division, "windows": windows, "failures": failures}[args.part](args, report)


if __name__ == "__main__":
    run_benchmark(__name__)
