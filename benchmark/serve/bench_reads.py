"""The cost of reading results one by one, compared with one read of all.

    python -m benchmark.serve.bench_reads

A PFunc program makes a round of calls and reads all of them before the next round. ServeCore and
one `sim` engine run as processes of this machine. These ways to read take turns:

  at once        `P.gather(variables)`
  one by one     `[v.get() for v in variables]`: each read reports that the program is blocked
  one by one, async
                 `[await v for v in variables]`: ServeCore waits 0.1 s for other reads of the
                 program before it starts calls that are not read

`over_at_once`: the median of each turn's seconds, divided by the seconds of the turn's `at once`.
"""

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot import P
from parrot.cluster import Cluster

ENGINE = {"engine_type": "sim", "instance": {"step_s": 0.01}}
CALLS = 8  # Calls in a round.
ROUNDS = 2


@P.semantic_function()
def answer(
    question: P.Input,
    text: P.Output(P.SamplingConfig(max_gen_length=20, ignore_tokenizer_eos=True)),
):
    """Answer {{question}}: {{text}}"""


async def _read_async(variables: list[Any]) -> None:
    for variable in variables:
        await variable


WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "at once": P.gather,
    "one by one": lambda variables: [variable.get() for variable in variables],
    "one by one, async": lambda variables: asyncio.run(_read_async(variables)),
}


def seconds(vm: P.VirtualMachine, read: Callable[[list[Any]], Any]) -> float:
    """The seconds of a program that reads each of its rounds with `read`."""
    with vm.running_scope():
        began = time.perf_counter()
        for round_ in range(ROUNDS):
            read([answer(f"{round_} {number}") for number in range(CALLS)])
        return time.perf_counter() - began


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=5)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    with Cluster({}, [ENGINE]) as cluster:
        vm = P.VirtualMachine(cluster.core_url)
        for read in WAYS.values():
            seconds(vm, read)  # The first program opens connections.
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(args.turns):
            for way, read in WAYS.items():
                taken[way].append(seconds(vm, read))
    for way, times in taken.items():
        ratios = [time / base for time, base in zip(times, taken["at once"], strict=True)]
        report.add(
            "ways",
            {
                "way": way,
                "seconds": round(median(times), 4),
                "over_at_once": round(median(ratios), 3),
                "turns": len(times),
            },
        )


if __name__ == "__main__":
    run_benchmark(__name__)
