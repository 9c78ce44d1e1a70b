"""What placement by predicted seconds buys over what request routers do.

    python -m benchmark.serve.bench_placement gpts --rates 4 16 64
    python -m benchmark.serve.bench_placement fanout_cold
    python -m benchmark.serve.bench_placement mixed --again

Runs the real ServeCore over four `sim` engines on virtual time, whose costs were fitted to an H200
(sample_configs/engine/sim_*.json), under each value of `placement`, with several seeds. The routers
get the same engines, with prefix caching and attention that reads shared KV once per step; and
others: "unshared" ones read it once per sequence, those "as vLLM" also take calls by arrival and
whole prompts into a step. "fixed" placements are chosen by hand, with all known beforehand.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmark.results import Report, run
from benchmark.serve.placement_programs import (
    GPTS_FIXED,
    NUM_ENGINES,
    Fanout,
    Gpts,
    Mixed,
    Site,
    least_mixed_jct_s,
)
from benchmark.simulated import ENGINES, sim_engine
from parrot.engine.config import SimConfig
from parrot.simulation.report import percentile

Result = dict[str, Any]
UNSHARED, AS_VLLM = ", unshared", ", as vLLM"
PLACEMENTS = ("predicted", "prefix_aware", "round_robin")


def unshared(engine: SimConfig) -> SimConfig:
    flat = engine.instance.model_copy(update={"shared_prefix": False})
    return engine.model_copy(update={"instance": flat})


def as_vllm(engine: SimConfig, tokens: int) -> SimConfig:
    """Prompts come by arrival, as much of them in a step as fits its budget, whoever generates."""
    limits = {"policy": "fcfs", "max_num_batched_tokens": tokens, "mixed_fill_tokens": tokens}
    scheduler = engine.scheduler.model_copy(update=limits)
    return unshared(engine).model_copy(update={"scheduler": scheduler})


def gpts(args: argparse.Namespace, engine: SimConfig) -> Result:
    sites = {name: Site(engine, {"placement": name}) for name in PLACEMENTS}
    sites |= {
        f"{name}{UNSHARED}": Site(unshared(engine), {"placement": name}) for name in PLACEMENTS[1:]
    }
    sites |= {name: Site(engine, named=True) for name in GPTS_FIXED}
    curves: list[dict[str, list[tuple[float, float]]]] = [{} for _ in args.seeds]
    rows = []
    for name, site in sites.items():
        for rate in args.rates:
            runs = []
            for seed, by_name in zip(args.seeds, curves, strict=True):
                fixed = GPTS_FIXED.get(name)
                programs = site.run(Gpts(rate, args.seconds, args.seconds / 4, seed, fixed))
                ms = fmean(programs.s_per_token) * 1e3
                by_name.setdefault(name, []).append((rate, ms))
                runs.append((ms, fmean(programs.seconds_each)))
            row = {
                "placement": name,
                "rate": rate,
                "ms_per_token": [round(ms, 3) for ms, _ in runs],
                "mean_s": [round(seconds, 3) for _, seconds in runs],
            }
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            if fmean(ms for ms, _ in runs) > args.give_up_ms:
                break
    return {"runs": rows, "rate_at_equal_ms_per_token": sustained(curves, args.levels)}


def sustained(
    curves: Sequence[dict[str, list[tuple[float, float]]]], levels: list[float]
) -> list[Result]:
    """The request rate at which each curve crosses so many ms per token: the mean of the seeds, and
    the ratios with their spread."""
    rows = []
    for level in levels:
        row: Result = {"ms_per_token": level}
        rates = {name: [crossing(seed[name], level) for seed in curves] for name in curves[0]}
        for name, found in rates.items():
            known = [rate for rate in found if rate]
            row[name] = round(fmean(known), 2) if len(known) == len(found) else None
        for name, found in rates.items():
            pairs = zip(rates["predicted"], found, strict=True)
            ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
            if name != "predicted" and len(ratios) == len(found):
                row[f"over_{name}"] = spread(ratios)
        rows.append(row)
    return rows


def spread(ratios: Sequence[float]) -> Result:
    return {k: round(f(ratios), 2) for k, f in (("mean", fmean), ("least", min), ("most", max))}


def crossing(curve: list[tuple[float, float]], level: float) -> float | None:
    """The highest rate at which it is crossed."""
    found = None
    for (rate0, ms0), (rate1, ms1) in pairwise(curve):
        if ms0 <= level < ms1:
            found = rate0 + (level - ms0) / (ms1 - ms0) * (rate1 - rate0)
    return found


def partitions(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as up to `parts` sizes, largest first."""
    if parts == 1:
        if total <= most:
            yield (total,)
        return
    for size in range(min(total, most), math.ceil(total / parts) - 1, -1):
        if size == total:
            yield (total,)
        else:
            yield from ((size, *rest) for rest in partitions(total - size, parts - 1, size))


def fanout_cold(args: argparse.Namespace, engine: SimConfig) -> Result:
    by_hand = Site(engine, named=True)
    spans = {
        parts: by_hand.run(Fanout(args, parts=parts)).makespan
        for parts in partitions(args.siblings, NUM_ENGINES, args.siblings)
    }
    best = min(spans, key=spans.__getitem__)
    joined_s = by_hand.run(Fanout(args, join=True, parts=best)).makespan
    result: Result = {
        "splits_tried": len(spans),
        "best_split": best,
        "best_s": round(spans[best], 4),
        "best_s_with_join": round(joined_s, 4),
        "one_engine_s": round(spans[(args.siblings,)], 4),
    }
    for reads, least_s in (("each", spans[best]), ("join", joined_s)):
        for placement in PLACEMENTS:
            site = Site(engine, {"placement": placement})
            makespan = site.run(Fanout(args, join=reads == "join")).makespan
            result[f"{placement} read={reads}"] = {
                "makespan_s": round(makespan, 4),
                "over_best": round(makespan / least_s, 3),
            }
    return result


def mixed(args: argparse.Namespace, engine: SimConfig) -> Result:
    sites = {name: (Site(engine, {"placement": name}), None) for name in PLACEMENTS}
    for name in PLACEMENTS[1:]:
        settings = {"placement": name, "policy": "fcfs"}
        sites |= {
            f"{name}{AS_VLLM} {tokens}": (Site(as_vllm(engine, tokens), settings), None)
            for tokens in (2048, 8192)
        }
    for share in args.fixed:
        sites[f"fixed, {share:g}"] = (Site(engine, named=True), share)
    result: Result = {}
    for name, (site, share) in sites.items():
        runs = [site.run(Mixed(args, seed, share)) for seed in args.seeds]
        result[name] = {
            "chat_tpot_ms": summary([run.tpot_s for run in runs]),
            "chat_ttft_ms": summary([run.ttft_s for run in runs]),
            "map_reduce_jct_ms": summary([run.jct_s for run in runs]),
        }
        print(name, result[name], file=sys.stderr, flush=True)
    ours = result["predicted"]
    gains = {f"over_{name}": gain(ours, theirs) for name, theirs in result.items()}
    del gains["over_predicted"]
    return result | gains | {"least_jct_ms": round(least_mixed_jct_s(args, engine) * 1e3, 2)}


def gain(ours: Result, theirs: Result) -> Result:
    """How many times as long it takes the others."""

    def ratio(what: str, which: str) -> Result:
        pairs = zip(theirs[what][which], ours[what][which], strict=True)
        return spread([their / our for their, our in pairs])

    return {
        "chat_p99_tpot": ratio("chat_tpot_ms", "p99"),
        "chat_mean_tpot": ratio("chat_tpot_ms", "mean"),
        "map_reduce_mean_jct": ratio("map_reduce_jct_ms", "mean"),
    }


def summary(runs: Sequence[list[float]]) -> Result:
    """Of each seed."""
    return {
        "mean": [round(fmean(seconds) * 1e3, 2) for seconds in runs],
        "p50": [round(percentile(seconds, 50) * 1e3, 2) for seconds in runs],
        "p99": [round(percentile(seconds, 99) * 1e3, 2) for seconds in runs],
    }


FIXED_HELP = "of mixed: maps of each application on the engine of all chats, placed by hand"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--engine", default="llama_2_7b", help="sample_configs/engine/sim_*.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--answer", type=int, help="output tokens; 100 of siblings, 50 of maps")
    gpts = parser.add_argument_group("gpts")
    gpts.add_argument("--rates", type=float, nargs="+", default=[1, 4, 8, 16, 32, 48, 64])
    gpts.add_argument("--levels", type=float, nargs="+", default=[5, 6, 7], help="ms/token")
    gpts.add_argument("--seconds", type=float, default=24.0, help="of arrivals; 1/4 are warm-up")
    gpts.add_argument("--give-up-ms", type=float, default=20.0)
    fanout = parser.add_argument_group("fanout_cold")
    fanout.add_argument("--siblings", type=int, default=32)
    fanout.add_argument("--prefix", type=int, default=8192)
    fanout.add_argument("--query", type=int, default=50)
    mixed = parser.add_argument_group("mixed")
    mixed.add_argument("--chats", type=int, default=40)
    mixed.add_argument("--chat-rate", type=float, default=1.0)
    mixed.add_argument("--again", action="store_true", help="applications without an end")
    mixed.add_argument("--fixed", type=float, nargs="*", default=[], help=FIXED_HELP)
    mixed.add_argument("--apps", type=int, default=9)
    mixed.add_argument("--document", type=int, default=20_000)
    mixed.add_argument("--chunk", type=int, default=1024)


CASES = {"gpts": gpts, "fanout_cold": fanout_cold, "mixed": mixed}


def measure(args: argparse.Namespace, report: Report) -> None:
    path = ENGINES / f"sim_{args.engine}.json"
    report.uses("engine", path)
    engine = sim_engine(path)
    args.answer = args.answer or (50 if args.case == "mixed" else 100)
    report |= {"engine": engine.instance.model_dump(), "num_engines": NUM_ENGINES}
    report |= CASES[args.case](args, engine)


if __name__ == "__main__":
    run(__name__)
