"""The gain of an adaptive number of threads on a CPU that is shared with other processes.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000 python -m benchmark.cpu.bench_threads

There are three scenes: an idle CPU, processes that use a core each, and processes that use a third
of a core each, like ServeCore and a program. In each scene the same decoding is timed with fixed
numbers of threads and with the engine's own choice. They take turns, so that all see the same
load. The engine's choice keeps its state from scene to scene, as in a server. The first round of a
scene is not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmark.engine.bench_cpu import Load, parrot_rate
from benchmark.results import Report, run
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint, resolve_dtype
from parrot.engine.runner.cpu import CpuOptions, ModelRunner

BUSY = "while True: pass"
PARTLY = """
import time
while True:
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        pass
    time.sleep(0.006)
"""
CPU = torch.device("cpu")
NUM_BLOCKS = 1024


@contextmanager
def running(program: str, count: int) -> Iterator[None]:
    """Run `count` of these processes during the block."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", program]))
            stack.callback(process.kill)
        yield


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fixed", type=int, nargs="+", help="default: 1, half, all but one, all")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[1])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=64)


def measure(args: argparse.Namespace, report: Report) -> None:
    most = args.threads
    fixed = args.fixed or sorted({1, max(1, most // 2), max(1, most - 1), most})
    report.uses("model", args.model)
    checkpoint = open_checkpoint(args.model, dummy=args.dummy)
    torch.set_num_threads(most)
    model = load_decoder(checkpoint, resolve_dtype("auto", CPU), CPU)
    plain = ModelRunner(model, NUM_BLOCKS, 16)
    adaptive = ModelRunner(model, NUM_BLOCKS, 16, CpuOptions(max_threads=most))
    scenes = [("idle", BUSY, 0)]
    scenes += [(f"{n} busy", BUSY, n) for n in args.neighbours]
    scenes += [(f"{n} partly busy", PARTLY, n) for n in args.neighbours]
    for name, program, count in scenes:
        with running(program, count):
            for batch in args.batches:
                load = Load(batch, 64, args.decode)
                rates: dict[str, list[float]] = {}
                for round_number in range(args.rounds + 1):
                    for threads in [*fixed, None]:
                        if threads is not None:
                            torch.set_num_threads(threads)
                        rate = parrot_rate(plain if threads else adaptive, load)
                        if round_number:
                            rates.setdefault(str(threads or "adaptive"), []).append(rate)
                medians = {arm: statistics.median(rate) for arm, rate in rates.items()}
                best = max(rate for arm, rate in medians.items() if arm != "adaptive")
                row = {arm: round(rate, 1) for arm, rate in medians.items()}
                row["adaptive / best fixed"] = round(medians["adaptive"] / best, 3)
                report.setdefault("tokens_per_s", {})[f"{name}, batch {batch}"] = row
                print(name, batch, row, flush=True)


if __name__ == "__main__":
    run(__name__)
