"""Random traces against the builtin engine: everybody gets what he gets alone, and nothing is left.

    python -m tests.fuzz --hours 1 --output benchmark/results/fuzz.json

A trace forks, fills, generates (greedy, drawn, penalized, constrained, with stop strings, log
probabilities and drafts), streams, cancels, frees, and breaks steps and copies, on a tiny model in
float32 with little room. Every answer is compared with that of the same request alone in a fresh
engine, and blocks are recounted after each step. Of eight traces one is played through HTTP, and
one once more without those who disturb: `slowness` tells how many times more steps the others took
than alone, with them and without; with them it may be at most half as much again (p99). What fails
is made as short as it gets, and printed; put it into tests/fuzz/found.json, and CI plays it.
`--level serve` plays stories through ServeCore instead.
"""

import argparse
import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from tests.fuzz import drawing
from tests.fuzz.drawing import draw_trace
from tests.fuzz.hunting import Tried, shrink, try_trace, undisturbed
from tests.fuzz.over_http import try_over_http
from tests.fuzz.stories import try_story
from tests.fuzz.traces import Trace

EVERY = 8
_SAVE_EVERY = 100
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_ENOUGH, _MOST = 500, 1.5  # requests that tell; and how much longer they may wait


class Hunt:
    """Traces by their seeds, and what came of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.disturbed: list[float] = []
        self.alike: list[float] = []
        self.findings: list[dict[str, object]] = []

    def engine(self, seed: int) -> None:
        trace = draw_trace(seed)
        if seed % EVERY == 1:
            self._take(seed, asyncio.run(try_over_http(trace)), "http")
            return
        tried = try_trace(trace)
        self._take(seed, tried, "engine", trace)
        if seed % EVERY == 0 and tried.failure is None:
            calm = try_trace(undisturbed(trace))
            both = tried.slowness.keys() & calm.slowness.keys()
            self.disturbed += [tried.slowness[number] for number in both]
            self.alike += [calm.slowness[number] for number in both]

    def serve(self, seed: int) -> None:
        failure = try_story(seed)
        self._take(seed, Tried(failure), "serve")

    def _take(self, seed: int, tried: Tried, level: str, trace: Trace | None = None) -> None:
        self.counts[f"{level}_traces"] += 1
        for name, value in asdict(tried.counts).items():
            self.counts[name] += value
        self.counts["compared"] += tried.num_compared
        self.counts["rounded"] += tried.num_rounded
        if tried.failure is None:
            return
        print(f"seed {seed} ({level}):\n{tried.failure}", flush=True)
        finding: dict[str, object] = {"seed": seed, "level": level}
        finding["failure"] = tried.failure.strip().splitlines()[-1][:500]
        if trace is not None:
            short = shrink(trace, lambda candidate: _fails_so(candidate, tried.failure or ""))
            finding["trace"] = short.to_json()
            print(f"in short:\n{short}\n{json.dumps(short.to_json())}", flush=True)
        self.findings.append(finding)

    def into(self, report: Report, seconds: float) -> None:
        report["hours"] = seconds / 3600
        report["counts"] = dict(self.counts)
        disturbed, undisturbed = _quantiles(self.disturbed), _quantiles(self.alike)
        report["slowness"] = {
            "requests": len(self.disturbed),
            "disturbed": disturbed,
            "undisturbed": undisturbed,
        }
        report["findings"] = list(self.findings)
        if len(self.disturbed) >= _ENOUGH and disturbed["p99"] > _MOST * undisturbed["p99"]:
            report["findings"].append({"failure": "bystanders wait too long"})
        report.save()


def _fails_so(trace: Trace, failure: str) -> bool:
    """In the same way, as its last line begins."""
    found = try_trace(trace).failure
    return found is not None and _kind(found) == _kind(failure)


def _kind(failure: str) -> str:
    """The beginning of the last line, up to the first number."""
    last = next(line for line in failure.splitlines()[::-1] if line and not line.startswith(" "))
    return "".join(c if not c.isdigit() else "0" for c in last[:40]).partition("0")[0]


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{100 * q:g}": ordered[round(q * last)] for q in _QUANTILES} if ordered else {}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", choices=("engine", "serve"), default="engine")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--traces", type=int, help="so many at most")
    parser.add_argument("--hours", type=float, default=1.0)


def measure(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # broken steps are logged
    report.uses("drawing", Path(drawing.__file__))
    hunt, began = Hunt(), time.monotonic()
    one = hunt.engine if args.level == "engine" else hunt.serve
    seed = args.seed
    while time.monotonic() - began < 3600 * args.hours:
        if args.traces is not None and seed >= args.seed + args.traces:
            break
        one(seed)
        seed += 1
        if seed % _SAVE_EVERY == 0:
            hunt.into(report, time.monotonic() - began)
    report["seeds"] = [args.seed, seed]
    hunt.into(report, time.monotonic() - began)


if __name__ == "__main__":
    run_benchmark(__name__)
