"""The gain of placement by predicted seconds over the rules of request routers.

    python -m benchmark.serve.bench_placement gpts --rates 4 16 64
    python -m benchmark.serve.bench_placement fanout_cold
    python -m benchmark.serve.bench_placement mixed --again

Runs the real ServeCore with four `sim` engines in virtual time, with costs that are fitted to an
H200 (sample_configs/engine/sim_*.json), for each value of `placement` and several seeds. Routers
get the same engines, with prefix caching and attention that reads shared KV once per step. They
also get "unshared" engines, which read it once per sequence, and engines "as vLLM", which also run
calls in order of arrival and put whole prompts into a step. "fixed" placements are chosen by hand
with full knowledge of the load.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmark.results import Report, run
from benchmark.serve.placement_programs import (
    GPTS_FIXED,
    NUM_ENGINES,
    Mixed,
    Site,
    fanout,
    gpts,
    least_mixed_jct_s,
)
from benchmark.simulated import ENGINES, changed, sim_engine
from parrot.engine.config import SimConfig
from parrot.simulation.report import percentile

Result = dict[str, Any]
Curve = list[tuple[float, float]]
"""Milliseconds per token by request rate."""

PLACEMENTS = ("predicted", "prefix_aware", "round_robin")
UNSHARED: dict[str, Any] = {"instance.shared_prefix": False}


def as_vllm(engine: SimConfig, tokens: int) -> SimConfig:
    """An engine that computes prompts in order of arrival, as many tokens per step as fit its
    budget, even next to decodes."""
    scheduler = {"policy": "fcfs", "max_num_batched_tokens": tokens, "mixed_fill_tokens": tokens}
    keys = {f"scheduler.{key}": value for key, value in scheduler.items()}
    return changed(engine, **UNSHARED, **keys)


def compare_gpts(args: argparse.Namespace, engine: SimConfig, report: Report) -> None:
    flat = changed(engine, **UNSHARED)
    sites = {name: Site(engine, name) for name in PLACEMENTS}
    sites |= {f"{name}, unshared": Site(flat, name) for name in PLACEMENTS[1:]}
    sites |= {name: Site(engine, named=True) for name in GPTS_FIXED}
    curves: list[dict[str, Curve]] = [{name: [] for name in sites} for _ in args.seeds]
    for name, site in sites.items():
        for rate in args.rates:
            ms_per_token, mean_s = [], []
            for seed, by_name in zip(args.seeds, curves, strict=True):
                load = {"seconds": args.seconds, "fixed": GPTS_FIXED.get(name, {})}
                requests = site.run(partial(gpts, rate=rate, seed=seed, **load))
                ms_per_token.append(fmean(s / tokens for s, tokens in requests) * 1e3)
                mean_s.append(fmean(s for s, _ in requests))
                by_name[name].append((rate, ms_per_token[-1]))
            rows = {"ms_per_token": ms_per_token, "mean_s": mean_s}
            rounded = {key: [round(value, 3) for value in row] for key, row in rows.items()}
            report.add("runs", {"placement": name, "rate": rate, **rounded})
            if fmean(ms_per_token) > args.give_up_ms:
                break
    report["rate_at_equal_ms_per_token"] = sustained(curves, args.levels)


def sustained(curves: Sequence[Mapping[str, Curve]], levels: Sequence[float]) -> list[Result]:
    """The request rate at which each curve crosses each level of ms per token: the mean of the
    seeds, and the ratios with their spread."""
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


def crossing(curve: Curve, level: float) -> float | None:
    """The highest rate at which the curve crosses `level`."""
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


def compare_fanout(args: argparse.Namespace, engine: SimConfig, report: Report) -> None:
    by_hand = Site(engine, named=True)
    spans = {
        parts: by_hand.run(partial(fanout, args=args, parts=parts))
        for parts in partitions(args.siblings, NUM_ENGINES, args.siblings)
    }
    best = min(spans, key=spans.__getitem__)
    joined_s = by_hand.run(partial(fanout, args=args, join=True, parts=best))
    report |= {
        "splits_tried": len(spans),
        "best_split": best,
        "best_s": round(spans[best], 4),
        "best_s_with_join": round(joined_s, 4),
        "one_engine_s": round(spans[(args.siblings,)], 4),
    }
    for reads, least_s in (("each", spans[best]), ("join", joined_s)):
        for placement in PLACEMENTS:
            site = Site(engine, placement)
            makespan_s = site.run(partial(fanout, args=args, join=reads == "join"))
            report[f"{placement} read={reads}"] = {
                "makespan_s": round(makespan_s, 4),
                "over_best": round(makespan_s / least_s, 3),
            }


def compare_mixed(args: argparse.Namespace, engine: SimConfig, report: Report) -> None:
    sites = {name: (Site(engine, name), None) for name in PLACEMENTS}
    for name in PLACEMENTS[1:]:
        settings = {"policy": "fcfs"}
        sites |= {
            f"{name}, as vLLM {tokens}": (Site(as_vllm(engine, tokens), name, settings), None)
            for tokens in (2048, 8192)
        }
    sites |= {f"fixed, {share:g}": (Site(engine, named=True), share) for share in args.fixed}
    for name, (site, share) in sites.items():
        runs = [site.run(Mixed(args, seed, share).run) for seed in args.seeds]
        report[name] = {key: summary([run[key] for run in runs]) for key in runs[0]}
        print(name, report[name], flush=True)
    for name in list(sites)[1:]:
        report[f"over_{name}"] = gain(report["predicted"], report[name])
    report["least_jct_ms"] = round(least_mixed_jct_s(args, engine) * 1e3, 2)


def gain(ours: Result, theirs: Result) -> Result:
    """The time with the other placement, divided by the time with ours."""

    def ratio(what: str, which: str) -> Result:
        pairs = zip(theirs[what][which], ours[what][which], strict=True)
        return spread([their / our for their, our in pairs])

    return {
        "chat_p99_tpot": ratio("chat_tpot_ms", "p99"),
        "chat_mean_tpot": ratio("chat_tpot_ms", "mean"),
        "map_reduce_mean_jct": ratio("map_reduce_jct_ms", "mean"),
    }


def summary(runs: Sequence[list[float]]) -> Result:
    """The figures of each seed."""
    found = {f"p{p}": [round(percentile(ms, p), 2) for ms in runs] for p in (50, 99)}
    return {"mean": [round(fmean(ms), 2) for ms in runs]} | found


FIXED_HELP = "of mixed: maps of each application on the engine of all chats, placed by hand"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--engine", default="llama_2_7b", help="sample_configs/engine/sim_*.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--answer", type=int, help="output tokens; 100 of siblings, 50 of maps")
    stream = parser.add_argument_group("gpts")
    stream.add_argument("--rates", type=float, nargs="+", default=[1, 4, 8, 16, 32, 48, 64])
    stream.add_argument("--levels", type=float, nargs="+", default=[5, 6, 7], help="ms/token")
    stream.add_argument("--seconds", type=float, default=24.0, help="of arrivals; 1/4 are warm-up")
    stream.add_argument("--give-up-ms", type=float, default=20.0)
    siblings = parser.add_argument_group("fanout_cold")
    siblings.add_argument("--siblings", type=int, default=32)
    siblings.add_argument("--prefix", type=int, default=8192)
    siblings.add_argument("--query", type=int, default=50)
    mixed = parser.add_argument_group("mixed")
    mixed.add_argument("--chats", type=int, default=40)
    mixed.add_argument("--chat-rate", type=float, default=1.0)
    mixed.add_argument("--again", action="store_true", help="repeat applications until the end")
    mixed.add_argument("--fixed", type=float, nargs="*", default=[], help=FIXED_HELP)
    mixed.add_argument("--apps", type=int, default=9)
    mixed.add_argument("--document", type=int, default=20_000)
    mixed.add_argument("--chunk", type=int, default=1024)


CASES = {"gpts": compare_gpts, "fanout_cold": compare_fanout, "mixed": compare_mixed}


def measure(args: argparse.Namespace, report: Report) -> None:
    path = ENGINES / f"sim_{args.engine}.json"
    report.uses("engine", path)
    engine = sim_engine(path)
    args.answer = args.answer or (50 if args.case == "mixed" else 100)
    report |= {"engine": engine.instance.model_dump(), "num_engines": NUM_ENGINES}
    CASES[args.case](args, engine, report)


if __name__ == "__main__":
    run(__name__)
