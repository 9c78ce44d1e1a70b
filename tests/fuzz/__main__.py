"""Fuzz the builtin engine: each request of a random trace gets the answer that it gets alone.

    python -m tests.fuzz --hours 1 --output benchmark/results/fuzz.json

A trace forks, fills, generates (greedy, sampled, penalized, constrained, with stop strings, log
probabilities and drafts), streams, cancels, frees, and breaks steps and copies. The engine has a
tiny float32 model and few blocks. Each answer is compared with that of the same request in a fresh
engine. After each step, the blocks are recounted.

One of eight traces runs through HTTP. Another one of eight runs a second time without cancellations
and faults. `slowness` is the number of steps of a request over the number that it takes alone, with
and without these disturbances. At the 99th percentile, they may increase it by 50%.

Failing traces are shortened and printed. Add them to tests/fuzz/found.json, so that CI runs them.
`--level serve` runs random programs through ServeCore instead.
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
from tests.fuzz.hunting import TraceResult, shrink, try_trace, undisturbed
from tests.fuzz.over_http import try_over_http
from tests.fuzz.stories import try_story
from tests.fuzz.traces import Trace

EVERY = 8
_SAVE_EVERY = 100
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
# Minimum number of requests to compare, and the greatest ratio of their slowness.
_ENOUGH, _MOST = 500, 1.5


class Hunt:
    """Runs traces by seed, and collects the results."""

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
        self._take(seed, TraceResult(failure), "serve")

    def _take(self, seed: int, tried: TraceResult, level: str, trace: Trace | None = None) -> None:
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
    """Whether the trace fails with the same kind of error."""
    found = try_trace(trace).failure
    return found is not None and _kind(found) == _kind(failure)


def _kind(failure: str) -> str:
    """Return the last line of the error up to its first number."""
    last = next(line for line in failure.splitlines()[::-1] if line and not line.startswith(" "))
    return "".join(c if not c.isdigit() else "0" for c in last[:40]).partition("0")[0]


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{100 * q:g}": ordered[round(q * last)] for q in _QUANTILES} if ordered else {}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", choices=("engine", "serve"), default="engine")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--traces", type=int, help="maximum number of traces")
    parser.add_argument("--hours", type=float, default=1.0)


def measure(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # deliberately broken steps log errors
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
