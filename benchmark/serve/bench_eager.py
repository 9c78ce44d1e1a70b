"""The gain of eager fill: a late question on a long context that is available early.

    python -m benchmark.serve.bench_eager

Runs the real ServeCore with one `sim` engine in virtual time, with `eager_fill` off and on. A `rag`
program submits a context of 8k tokens and starts to read its answer. Its question comes later, and
the time to first token counts from then. Bystanders read one stream after another. Streams have
different lengths, so that they do not start at the same time. Their figure is the mean time per
token. In the last rows some or all programs end without asking, so their eager fill is wasted.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

from benchmark.apps.backends import read_counters, total
from benchmark.results import Report, run
from benchmark.simulated import ENGINES, changed, core_config, sim_engine, words
from parrot.cli.bench.sessions import BenchSession, Data, Piece
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual
from parrot.simulation.report import percentile

BYSTANDERS = (0, 8, 32)
DELAYS_S = (0.5, 2.0, 8.0)
WITHDRAWN = (0.0, 0.2, 1.0)
SHARES = (0.02, 0.2)
ENGINE = ENGINES / "sim_llama_3_1_8b.json"
CONTEXT, QUESTION, ANSWER = 8192, 64, 64  # Tokens of a program.
BYSTANDER_PROMPT = 256
BYSTANDER_OUTPUTS = (64, 192)  # Minimum and maximum tokens.
INTERVAL_S = 1.5  # Mean time between programs.


@dataclass(frozen=True)
class Setup:
    """`delay_s`: from a program's start to its question. The fraction `withdrawn` of programs ends
    at this time instead. `background_share`: the engine's limit."""

    num_bystanders: int
    delay_s: float
    withdrawn: float
    eager_fill: bool
    background_share: float = SHARES[0]


class Load:
    """The programs and the bystanders of one run. `times` are in seconds: `ttft_s` counts from the
    question, `later_ttft_s` is for the second half of the programs."""

    def __init__(self, setup: Setup, client: ServeClient) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self._setup = setup
        self._client = client
        self._now = asyncio.get_running_loop().time
        self._is_over = False

    async def run(self, num_programs: int) -> None:
        starts = random.Random(0)
        bystanders = [
            asyncio.create_task(self._bystand(random.Random(i)))
            for i in range(self._setup.num_bystanders)
        ]
        await asyncio.sleep(2)
        programs = []
        for i in range(num_programs):
            asking = self._ask(random.Random(1000 + i), is_later=2 * i >= num_programs)
            programs.append(asyncio.create_task(asking))
            await asyncio.sleep(starts.expovariate(1 / INTERVAL_S))
        await asyncio.gather(*programs)
        self._is_over = True
        await asyncio.gather(*bystanders)

    async def _ask(self, text: random.Random, *, is_later: bool) -> None:
        session = await BenchSession.begin(self._client)
        question = await session.create("question")
        context = Data(words(text, CONTEXT))
        prompt: list[Piece] = ["Read this: ", context, " and answer: ", question, " "]
        answer = await session.call(prompt, ANSWER, cache_prefix=False)
        reading = asyncio.create_task(session.stream(answer))
        await asyncio.sleep(self._setup.delay_s)
        if text.random() < self._setup.withdrawn:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            asked = self._now()
            await session.set(question, words(text, QUESTION))
            ttft_s = (await reading).first - asked
            self.times["ttft_s"].append(ttft_s)
            if is_later:
                self.times["later_ttft_s"].append(ttft_s)
        await session.end()

    async def _bystand(self, text: random.Random) -> None:
        while not self._is_over:
            session = await BenchSession.begin(self._client)
            began = self._now()
            length = text.randint(*BYSTANDER_OUTPUTS)
            prompt = [Data(words(text, BYSTANDER_PROMPT)), " "]
            answer = await session.call(prompt, length, cache_prefix=False)
            times = await session.stream(answer)
            self.times["bystander_ttft_s"].append(times.first - began)
            self.times["bystander_tpot_s"].append((times.last - times.first) / (length - 1))
            await session.end()


async def simulate(setup: Setup, num_programs: int) -> dict[str, Any]:
    share = {"scheduler.background_share": setup.background_share}
    engine = changed(sim_engine(ENGINE), **share)
    core = core_config(eager_fill=setup.eager_fill)
    async with SimCluster(1, engine=engine, core=core) as cluster:
        load = Load(setup, cluster.client())
        await load.run(num_programs)
        counters = read_counters(b"".join(cluster.core.metrics()).decode())
    row: dict[str, Any] = {"num_programs": num_programs, **asdict(setup)}
    for name, values in load.times.items():
        row |= {f"{name}_mean": fmean(values), f"{name}_p99": percentile(values, 99)}
    tokens = "parrot_eager_fill_tokens_total outcome="
    outcomes = ("filled", "used", "wasted")
    return row | {"eager_tokens": {name: int(total(counters, tokens + name)) for name in outcomes}}


def setups(bystanders: Sequence[int]) -> Iterator[Setup]:
    for num_bystanders, delay_s, withdrawn in product(bystanders, DELAYS_S, WITHDRAWN):
        if withdrawn and not (num_bystanders and delay_s == 2.0):
            continue
        case = num_bystanders, delay_s, withdrawn
        yield Setup(*case, eager_fill=False)
        for share in SHARES if num_bystanders else SHARES[1:]:
            yield Setup(*case, eager_fill=True, background_share=share)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=24)
    parser.add_argument("--bystanders", type=int, nargs="+", default=BYSTANDERS)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    for setup in setups(args.bystanders):
        report.add("rows", run_virtual(simulate(setup, args.programs)))


if __name__ == "__main__":
    run(__name__)
