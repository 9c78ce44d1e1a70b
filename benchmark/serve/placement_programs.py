"""The programs of bench_placement.py, and the simulated cluster on which they run."""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, TypeVar

from benchmark.serve.baselines import cluster_with
from benchmark.simulated import core_config, words
from parrot.cli.bench.requests import chat_lengths, gpts_apps
from parrot.cli.bench.sessions import BenchSession, Data, Piece, Var
from parrot.engine.config import SimConfig
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import run_virtual

NUM_ENGINES = 4
INSTRUCTION = "Summarize this part of the document in a few sentences, please. "
SAMPLING = {"ignore_tokenizer_eos": True, "temperature": 1.0}
Engines = Sequence[int]
"""The engines on which a call may run. None: any engine."""

GPTS_FIXED: dict[str, dict[str, Engines]] = {  # Optimal up to 64 requests/s.
    "fixed, one each": {
        "Productivity": (0,),
        "Image Generation": (1,),
        "Programming": (2,),
        "Data Analysis": (3,),
    },
    "fixed, two for Programming": {
        "Productivity": (0,),
        "Image Generation": (1,),
        "Programming": (2, 3),
        "Data Analysis": (1,),
    },
}
T = TypeVar("T")


@dataclass
class Site:
    """Four equal engines. With `named`, each has its own model name, so that calls can select it.
    `placement`: "predicted", or the name of a baseline."""

    engine: SimConfig
    placement: str = "predicted"
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: bool = False

    def run(self, programs: Callable[[ServeClient], Awaitable[T]]) -> T:
        """Run the programs to their end, in virtual time."""

        async def main() -> T:
            core = core_config(max_queue_size=100_000, **self.settings)
            async with cluster_with(self.placement)(0, engine=self.engine, core=core) as cluster:
                for i in range(NUM_ENGINES):
                    await cluster.add_engine(None, **({"model": model_of(i)} if self.named else {}))
                found = await programs(cluster.client())
                cluster.check_integrity()
                return found

        return run_virtual(main())


def model_of(engine: int) -> str:
    return f"model{engine}"


async def call(
    session: BenchSession, name: str, prompt: Sequence[Piece], tokens: int, engines: Engines = ()
) -> Var:
    models = [model_of(engine) for engine in engines]
    return await session.call(prompt, tokens, sampling=SAMPLING, func_name=name, models=models)


async def gpts(
    client: ServeClient, rate: float, seconds: float, seed: int, fixed: Mapping[str, Engines]
) -> list[tuple[float, int]]:
    """Requests of four applications with long system prompts, as a Poisson stream of `rate`.
    `fixed`: the engines of each application. Returns the seconds and the output tokens of each
    request, without the first quarter, which warms up."""
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    apps = gpts_apps()
    prompts = [(app, words(draw, app["prompt_length"])) for app in apps]
    shares = [app["percentage"] for app in apps]
    found: list[tuple[float, int]] = []

    async def request(start: float, app: dict[str, Any], prompt: str, query: str) -> None:
        await asyncio.sleep(start)
        began = loop.time()
        session = await BenchSession.begin(client)
        tokens, name = app["output_length"], app["app_name"]
        out = await call(session, name, [prompt, Data(query)], tokens, fixed.get(name, ()))
        await session.read(out, PerformanceCriteria.TPOT)  # The figure is the time per token.
        if start >= seconds / 4:
            found.append((loop.time() - began, tokens))
        await session.end()

    async with asyncio.TaskGroup() as group:
        time = draw.expovariate(rate)
        while time < seconds:
            app, prompt = draw.choices(prompts, shares)[0]
            group.create_task(request(time, app, prompt, words(draw, app["query_length"])))
            time += draw.expovariate(rate)
    return found


async def fanout(
    client: ServeClient, args: argparse.Namespace, *, join: bool = False, parts: Engines = ()
) -> float:
    """Siblings with a long uncached prefix, read one by one or through one call that joins them.
    `parts`: the number of siblings on each engine. Returns the total seconds."""
    loop, draw = asyncio.get_running_loop(), random.Random(args.seeds[0])
    placed: list[Engines] = [(i,) for i, size in enumerate(parts) for _ in range(size)]
    places = placed or [()] * args.siblings
    session, prefix = await BenchSession.begin(client), Data(words(draw, args.prefix))
    siblings = [
        call(session, "sibling", [prefix, Data(words(draw, args.query))], args.answer, engines)
        for engines in places
    ]
    outputs = await asyncio.gather(*siblings)
    began = loop.time()
    if join:
        outputs = [await call(session, "join", outputs, 1, places[0])]
    await asyncio.gather(*map(session.read, outputs))
    return loop.time() - began


class Mixed:
    """Chats that arrive one by one, and map-reduce applications that run from the start. With
    `again`, each application restarts when it ends, as long as chats arrive.

    With a `share`, placement is by hand: engine 0 gets the chats and `share` maps of each
    application. The other engines get the other maps and the reduces, in turn. `ms`: milliseconds
    by kind."""

    def __init__(self, args: argparse.Namespace, seed: int, share: float | None = None) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self._args, self._share = args, share
        self._draw = random.Random(seed)
        self._turns = cycle(range(1, NUM_ENGINES))

    async def run(self, client: ServeClient) -> dict[str, list[float]]:
        args, draw = self._args, self._draw
        async with asyncio.TaskGroup() as group:
            time = 0.0
            for _ in range(args.chats):
                time += draw.expovariate(args.chat_rate)
                prompt, output = chat_lengths(draw)
                group.create_task(self._chat(client, time, words(draw, prompt), output))
            for _ in range(args.apps):
                group.create_task(self._map_reduces(client, time if args.again else 0.0))
        return self.ms

    async def _map_reduces(self, client: ServeClient, until: float) -> None:
        await self._map_reduce(client)
        while asyncio.get_running_loop().time() < until:
            await self._map_reduce(client)

    def _engines(self, *, on_first: bool) -> Engines:
        if self._share is None:
            return ()
        return (0,) if on_first else (next(self._turns),)

    async def _chat(self, client: ServeClient, start: float, prompt: str, tokens: int) -> None:
        await asyncio.sleep(start)
        session = await BenchSession.begin(client)
        began = asyncio.get_running_loop().time()
        engines = self._engines(on_first=True)
        output = await call(session, "chat", [Data(prompt)], tokens, engines)
        times = await session.stream(output)
        self.ms["chat_ttft_ms"].append((times.first - began) * 1e3)
        if tokens > 1:
            self.ms["chat_tpot_ms"].append((times.last - times.first) / (tokens - 1) * 1e3)

    async def _map_reduce(self, client: ServeClient) -> None:
        args, loop = self._args, asyncio.get_running_loop()
        session, began = await BenchSession.begin(client), loop.time()
        chunks = [words(self._draw, args.chunk) for _ in range(args.document // args.chunk)]
        parts = []
        for number, chunk in enumerate(chunks):
            engines = self._engines(on_first=number < (self._share or 0))
            prompt = [INSTRUCTION, Data(chunk)]
            parts.append(await call(session, "map", prompt, args.answer, engines))
        engines = self._engines(on_first=False)
        out = await call(session, "reduce", ["Join: ", *parts], args.answer, engines)
        await session.read(out)
        self.ms["map_reduce_jct_ms"].append((loop.time() - began) * 1e3)


def least_mixed_jct_s(args: argparse.Namespace, engine: SimConfig) -> float:
    """A lower bound of the mean JCT of repeated `Mixed` applications, even without chats: their
    work, divided perfectly among engines, and a step's constant cost for each token of a map, since
    an engine needs at least this number of steps for the maps of an application."""
    costs, num_maps = engine.instance, args.document // args.chunk
    prompts = [args.chunk + len(INSTRUCTION)] * num_maps + [num_maps * args.answer]
    work_s = sum(
        costs.prefill_token_s * prompt
        + costs.prefill_pair_s * prompt**2 / 2
        + costs.sequence_s * args.answer
        + costs.context_token_s * args.answer * (prompt + args.answer / 2)
        for prompt in prompts
    )
    least_s: float = args.apps * work_s / NUM_ENGINES + args.answer * costs.step_s
    return least_s
