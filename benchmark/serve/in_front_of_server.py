"""Requests and applications through Parrot in front of a server, and on the server directly.

    parrot up http://127.0.0.1:8000/v1
    python -m benchmark.serve.in_front_of_server

Each case is one `parrot bench`, which measures the two sides in turns with different texts. Through
Parrot, applications submit their graph. Directly, a client waits for each output."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark.results import Report
from benchmark.results import run as run_benchmark

CASES = {
    "1 request": "--num-requests 50 --concurrency 1 --output-tokens 16 --repeat 3",
    "1 chat": "--num-requests 50 --concurrency 1 --output-tokens 16 --repeat 3 --chat",
    "32 requests": "--num-requests 192 --concurrency 32 --output-tokens 64 --repeat 2",
    "256 requests": "--num-requests 768 --concurrency 256 --prompt-tokens 500 "
    "--output-tokens 64 --repeat 2",
    "1 request of 100,000 tokens": "--num-requests 2 --concurrency 1 --prompt-tokens 100000 "
    "--output-tokens 4",
    "map_reduce": "--workload map_reduce --num-requests 6 --concurrency 1 --repeat 3",
    "8 map_reduce": "--workload map_reduce --num-requests 16 --concurrency 8 --repeat 2",
    "chain": "--workload chain --num-requests 3 --concurrency 1 --repeat 2",
    "2 multi_agent": "--workload multi_agent:factor=0.1,applications=2,num_rounds=1 --repeat 4",
}
FIGURES = ("p50_ttft_ms", "p50_e2el_ms", "p90_e2el_ms", "call_throughput", "failed")


def bench(parrot: str, server: str, options: str) -> list[dict[str, Any]]:
    """The rows of one `parrot bench`: through Parrot, and directly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "parrot.cli", "bench", parrot, "--against", server]
        if "--workload" not in options and "--prompt-tokens" not in options:
            options += " --prompt-tokens 1000"
        command += [*options.split(), "--output", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parrot", default="http://127.0.0.1:9000")
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("cases", {case: CASES[case] for case in args.only})
    bench(
        args.parrot, args.server, "--num-requests 4 --concurrency 1 --output-tokens 8"
    )  # Warm up.
    for case in args.only:
        through, direct = bench(args.parrot, args.server, CASES[case])
        row: dict[str, Any] = {"case": case, "options": CASES[case]}
        for name in FIGURES:
            row[name] = [through[name], direct[name]]
        row["cached_tokens"] = [side["total_cached_tokens"] for side in (through, direct)]
        report.add("cases", row)


if __name__ == "__main__":
    run_benchmark(__name__)
