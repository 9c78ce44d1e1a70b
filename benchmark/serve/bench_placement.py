"""What placement by predicted seconds buys over what request routers do.

    python benchmark/serve/bench_placement.py gpts --rates 4 16 64
    python benchmark/serve/bench_placement.py fanout_cold
    python benchmark/serve/bench_placement.py mixed --chat-rate 1

Runs the real ServeCore over four `sim` engines on virtual time, whose costs were fitted to an H200
(sample_configs/engine/sim_*.json), under each value of `placement`. All have prefix caching, and
attention that reads shared KV once per step; "unshared" ones read it once per sequence, as the
engines behind request routers do.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from common import RESULTS, ROOT, circumstances, save
from placement_programs import NUM_ENGINES, Fanout, Gpts, Mixed, Result, Site

from parrot.engine.config import SimConfig
from parrot.simulation.report import percentile

UNSHARED = ", unshared"
PLACEMENTS = ("predicted", "prefix_aware", "round_robin")


def gpts(args: argparse.Namespace, engine: SimConfig) -> Result:
    flat = engine.instance.model_copy(update={"shared_prefix": False})
    unshared = engine.model_copy(update={"instance": flat})
    curves: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for name in (*PLACEMENTS, *(f"{placement}{UNSHARED}" for placement in PLACEMENTS[1:])):
        site = Site(
            unshared if name.endswith(UNSHARED) else engine,
            {"placement": name.removesuffix(UNSHARED)},
        )
        for rate in args.rates:
            programs = Gpts(rate, args.seconds, args.seconds / 4, args.seed)
            site.run(programs.run(), programs)
            ms = fmean(programs.s_per_token) * 1e3
            curves.setdefault(name, []).append((rate, ms))
            rows.append(
                {
                    "placement": name,
                    "rate": rate,
                    "ms_per_token": round(ms, 3),
                    "mean_s": round(fmean(programs.seconds_each), 3),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
            if ms > args.give_up_ms:
                break
    return {"runs": rows, "rate_at_equal_ms_per_token": sustained(curves, args.levels)}


def sustained(
    curves: dict[str, list[tuple[float, float]]], levels: list[float]
) -> list[dict[str, float | None]]:
    """The request rate at which each curve crosses so many ms per token, and the ratios."""
    rows = []
    for level in levels:
        rates = {name: crossing(curve, level) for name, curve in curves.items()}
        row: dict[str, float | None] = {"ms_per_token": level, **rates}
        for other in [name for name in rates if name != "predicted"]:
            ours, theirs = rates["predicted"], rates[other]
            row[f"over_{other}"] = round(ours / theirs, 2) if ours and theirs else None
        rows.append(row)
    return rows


def crossing(curve: list[tuple[float, float]], level: float) -> float | None:
    for (rate0, ms0), (rate1, ms1) in pairwise(curve):
        if ms0 <= level < ms1:
            return round(rate0 + (level - ms0) / (ms1 - ms0) * (rate1 - rate0), 2)
    return None


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
    models = tuple(f"model{i}" for i in range(NUM_ENGINES))
    spans: dict[tuple[int, ...], float] = {}
    args.join = False
    for parts in partitions(args.siblings, NUM_ENGINES, args.siblings):
        programs = Fanout(args, parts)
        Site(engine, {}, models).run(programs.run(), programs)
        spans[parts] = programs.makespan
    best = min(spans, key=spans.__getitem__)
    args.join = True
    joined = Fanout(args, best)
    Site(engine, {}, models).run(joined.run(), joined)
    result: Result = {
        "splits_tried": len(spans),
        "best_split": best,
        "best_s": round(spans[best], 4),
        "best_s_with_join": round(joined.makespan, 4),
        "one_engine_s": round(spans[(args.siblings,)], 4),
    }
    for reads in ("each", "join"):
        args.join = reads == "join"
        least_s = joined.makespan if args.join else spans[best]
        for placement in PLACEMENTS:
            programs = Fanout(args)
            Site(engine, {"placement": placement}).run(programs.run(), programs)
            result[f"{placement} read={reads}"] = {
                "makespan_s": round(programs.makespan, 4),
                "over_best": round(programs.makespan / least_s, 3),
            }
    return result


def mixed(args: argparse.Namespace, engine: SimConfig) -> Result:
    result: Result = {}
    for placement in PLACEMENTS:
        programs = Mixed(args)
        Site(engine, {"placement": placement}).run(programs.run(), programs)
        result[placement] = {
            "chat_tpot_ms": summary(programs.tpot_s),
            "chat_ttft_ms": summary(programs.ttft_s),
            "map_reduce_jct_ms": summary(programs.jct_s),
        }
    ours = result["predicted"]
    for other in PLACEMENTS[1:]:
        theirs = result[other]
        result[f"over_{other}"] = {
            "chat_p99_tpot": round(theirs["chat_tpot_ms"]["p99"] / ours["chat_tpot_ms"]["p99"], 2),
            "map_reduce_mean_jct": round(
                theirs["map_reduce_jct_ms"]["mean"] / ours["map_reduce_jct_ms"]["mean"], 2
            ),
        }
    return result


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "mean": round(fmean(seconds) * 1e3, 2),
        "p50": round(percentile(seconds, 50) * 1e3, 2),
        "p99": round(percentile(seconds, 99) * 1e3, 2),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", default="llama_2_7b", help="sample_configs/engine/sim_*.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmark/results/")
    cases = parser.add_subparsers(dest="case", required=True)
    case = cases.add_parser("gpts")
    case.add_argument("--rates", type=float, nargs="+", default=[0.25, 1, 4, 8, 16, 32, 48, 64])
    case.add_argument("--levels", type=float, nargs="+", default=[6, 8, 10, 12], help="ms/token")
    case.add_argument("--seconds", type=float, default=40.0, help="of arrivals; 1/4 are warm-up")
    case.add_argument("--give-up-ms", type=float, default=20.0)
    case = cases.add_parser("fanout_cold")
    case.add_argument("--siblings", type=int, default=32)
    case.add_argument("--prefix", type=int, default=8192)
    case.add_argument("--query", type=int, default=50)
    case.add_argument("--output", type=int, default=100)
    case = cases.add_parser("mixed")
    case.add_argument("--chats", type=int, default=40)
    case.add_argument("--chat-rate", type=float, default=1.0)
    case.add_argument("--again", action="store_true", help="applications without an end")
    case.add_argument("--apps", type=int, default=9)
    case.add_argument("--document", type=int, default=20_000)
    case.add_argument("--chunk", type=int, default=1024)
    case.add_argument("--output", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = parse()
    path = ROOT / "sample_configs" / "engine" / f"sim_{args.engine}.json"
    engine = SimConfig.model_validate_json(path.read_text())
    case = {"gpts": gpts, "fanout_cold": fanout_cold, "mixed": mixed}[args.case]
    result = circumstances() | {
        "engine": engine.instance.model_dump(),
        "num_engines": NUM_ENGINES,
        **case(args, engine),
    }
    print(json.dumps(result, indent=1))
    if args.save:
        case_name = f"{args.case}_again" if getattr(args, "again", False) else args.case
        save(RESULTS / f"placement_{case_name}_{args.engine}.json", result)


if __name__ == "__main__":
    main()
