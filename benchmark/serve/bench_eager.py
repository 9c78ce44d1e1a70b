"""What eager fill saves: a question that comes late, on a long context that is there early.

    python -m benchmark.serve.bench_eager

Runs the real ServeCore over one `sim` engine on virtual time, with `eager_fill` off and on. A
`rag` program has a context of 8k tokens and reads its answer at once; its question comes later, and
the time to the first token counts from then. Bystanders are readers of streams, each beginning the
next when one ends, of lengths that differ, so that they do not keep in step; what counts is their
mean time per token. In the last rows some programs, or all, go away instead of asking: what was
computed ahead for them was in vain.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from benchmark.results import Report, run
from benchmark.serve.common import ENGINES, Data, Session, Var, core_config, words
from parrot.engine.config import SimConfig
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual
from parrot.simulation.report import percentile
from parrot.utils.config import read_json_object

BYSTANDERS = (0, 8, 32)
DELAYS_S = (0.5, 2.0, 8.0)
WITHDRAWN = (0.0, 0.2, 1.0)
SHARES = (0.02, 0.2)
ENGINE = ENGINES / "sim_llama_3_1_8b.json"


@dataclass(frozen=True)
class Setup:
    """`delay_s`: from a program's beginning to its question, or to its end; the latter for the
    fraction `withdrawn` of them. `background_share`: the engine's limit. `bystander_output`: the
    mean; from half to one and a half of it. The sim engine's tokens are bytes."""

    num_bystanders: int
    delay_s: float
    eager_fill: bool
    background_share: float = 0.02
    withdrawn: float = 0.0
    num_programs: int = 24
    interval_s: float = 1.5  # mean time between programs
    context: int = 8192
    question: int = 64
    answer: int = 64
    bystander_prompt: int = 256
    bystander_output: int = 128
    seed: int = 0


@dataclass
class Times:
    """In seconds: `ttft_s` from the question, `later_ttft_s` of the second half of the programs,
    `tpot_s` of bystanders' streams."""

    ttft_s: list[float]
    later_ttft_s: list[float]
    bystander_ttft_s: list[float]
    bystander_tpot_s: list[float]


class Load:
    def __init__(self, setup: Setup, cluster: SimCluster) -> None:
        self.setup = setup
        self.times = Times([], [], [], [])
        self._cluster = cluster
        self._client: ServeClient = cluster.client()
        self._is_over = False

    async def run(self) -> None:
        random_numbers = random.Random(self.setup.seed)
        bystanders = [
            asyncio.create_task(self._bystand(random.Random(i)))
            for i in range(self.setup.num_bystanders)
        ]
        await asyncio.sleep(2)
        programs = []
        for i in range(self.setup.num_programs):
            is_later = 2 * i >= self.setup.num_programs
            asking = self._ask(random.Random(1000 + i), is_later=is_later)
            programs.append(asyncio.create_task(asking))
            await asyncio.sleep(random_numbers.expovariate(1 / self.setup.interval_s))
        await asyncio.gather(*programs)
        self._is_over = True
        await asyncio.gather(*bystanders)

    async def _ask(self, text: random.Random, *, is_later: bool) -> None:
        session = await Session.begin(self._client)
        question = await session.create("question")
        context = Data(words(text, self.setup.context))
        prompt = ["Read this: ", context, " and answer: ", question, " "]
        answer = await self._call(session, prompt, self.setup.answer)
        reading = asyncio.create_task(session.stream(answer))
        await asyncio.sleep(self.setup.delay_s)
        if text.random() < self.setup.withdrawn:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            asked = self._cluster.clock.now()
            await session.set(question, words(text, self.setup.question))
            ttft_s = (await reading)[0] - asked
            self.times.ttft_s.append(ttft_s)
            if is_later:
                self.times.later_ttft_s.append(ttft_s)
        await session.end()

    async def _bystand(self, text: random.Random) -> None:
        while not self._is_over:
            session = await Session.begin(self._client)
            began = self._cluster.clock.now()
            mean = self.setup.bystander_output
            length = text.randint(mean // 2, mean * 3 // 2)
            prompt = [Data(words(text, self.setup.bystander_prompt)), " "]
            first, last = await session.stream(await self._call(session, prompt, length))
            self.times.bystander_ttft_s.append(first - began)
            self.times.bystander_tpot_s.append((last - first) / (length - 1))
            await session.end()

    async def _call(self, session: Session, prompt: Sequence[str | Var], length: int) -> Var:
        return await session.call(prompt, length, cache_prefix=False)


def simulate(setup: Setup) -> dict[str, Any]:
    async def main() -> tuple[Times, Any]:
        config = read_json_object(str(ENGINE))
        config["scheduler"]["background_share"] = setup.background_share
        engine = SimConfig.model_validate(config)
        core = core_config(eager_fill=setup.eager_fill)
        async with SimCluster(1, engine=engine, core=core) as cluster:
            load = Load(setup, cluster)
            await load.run()
            counts = cluster.core._dispatcher.prefetch_counts()
            return load.times, counts

    times, counts = run_virtual(main())
    return asdict(setup) | dict(_summary(times)) | {"eager_tokens": asdict(counts)}


def _summary(times: Times) -> Iterator[tuple[str, float]]:
    for name, values in asdict(times).items():
        if values:
            yield f"{name}_mean", fmean(values)
            yield f"{name}_p99", percentile(values, 99)


def setups(num_programs: int, bystanders: Sequence[int] = BYSTANDERS) -> Iterator[Setup]:
    variants: list[dict[str, Any]] = [{"eager_fill": False}]
    variants += [{"eager_fill": True, "background_share": share} for share in SHARES]
    for num_bystanders, delay_s, withdrawn in product(bystanders, DELAYS_S, WITHDRAWN):
        if not withdrawn or (num_bystanders and delay_s == 2.0):
            for variant in variants if num_bystanders else variants[::2]:
                setup = Setup(num_bystanders, delay_s, withdrawn=withdrawn, **variant)
                yield replace(setup, num_programs=num_programs)


def _line(row: dict[str, Any]) -> str:
    state = f"share {row['background_share']}" if row["eager_fill"] else "off"
    names = {
        "ttft": "ttft_s",
        "later": "later_ttft_s",
        "tpot": "bystander_tpot_s",
        "their ttft": "bystander_ttft_s",
    }
    times = [
        f"{label} {row[f'{name}_mean'] * 1e3:.2f} p99 {row[f'{name}_p99'] * 1e3:.2f} ms"
        for label, name in names.items()
        if f"{name}_mean" in row
    ]
    end = f"after {row['delay_s']:3} s, {row['withdrawn']:4.0%} withdrawn"
    case = f"{row['num_bystanders']:2} bystanders, {end}, {state}"
    return f"{case:56} {', '.join(times)}"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=24)
    parser.add_argument("--bystanders", type=int, nargs="+", default=BYSTANDERS)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    report["rows"] = []
    for setup in setups(args.programs, args.bystanders):
        report["rows"].append(simulate(setup))
        print(_line(report["rows"][-1]), flush=True)


if __name__ == "__main__":
    run(__name__)
