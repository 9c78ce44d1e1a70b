"""The programs whose placement bench_placement.py compares, and where they run."""

import argparse
import asyncio
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from benchmark.apps.workloads.shared_prompts import DATA
from benchmark.apps.workloads.traffic import (
    CHAT_OUTPUT_MEAN,
    CHAT_OUTPUT_SPREAD,
    CHAT_PROMPT_MEAN,
    CHAT_PROMPT_SPREAD,
    chat_length,
)
from benchmark.session import Data, Session, Var
from benchmark.simulated import core_config, words
from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

NUM_ENGINES = 4
GPTS_FIXED = {  # engines of each application; better than all others up to 64 requests/s
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
INSTRUCTION = "Summarize this part of the document in a few sentences, please. "
SAMPLING = {"ignore_tokenizer_eos": True, "temperature": 1.0}
Models = tuple[str, ...]
AnyPrograms = TypeVar("AnyPrograms", bound="Programs")


def model_of(engine: int) -> str:
    return f"model{engine}"


@dataclass
class Site:
    """Four engines, alike or (`named`) each with a model name of its own that calls can ask for."""

    engine: SimConfig
    settings: dict[str, Any] = field(default_factory=dict)
    named: bool = False

    def run(self, programs: AnyPrograms) -> AnyPrograms:
        """Run the programs to their end, on virtual time."""

        async def main() -> None:
            core = core_config(max_queue_size=100_000, **self.settings)
            async with SimCluster(0, engine=self.engine, core=core) as cluster:
                for i in range(NUM_ENGINES):
                    await cluster.add_engine(**({"model": model_of(i)} if self.named else {}))
                programs.client = cluster.client()
                await programs.run()
                cluster.check_integrity()

        run_virtual(main())
        return programs


class Programs(ABC):
    """The calls of many users, each in a session of its own."""

    client: ServeClient

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    @abstractmethod
    async def run(self) -> None:
        """All programs, from their beginning to their end."""

    def words(self, size: int) -> str:
        return words(self.draw, size)

    async def begin(self) -> Session:
        return await Session.begin(self.client)


async def call(
    session: Session, name: str, prompt: list[str | Data | Var], tokens: int, models: Models = ()
) -> Var:
    options = {"func_name": name, "models": list(models)}
    return await session.call(prompt, tokens, sampling=SAMPLING, **options)


class Gpts(Programs):
    """Requests of four applications with long system prompts, as a Poisson stream of `rate`.
    `engines`: where those of each application may run."""

    def __init__(
        self,
        rate: float,
        seconds: float,
        warm_up_s: float,
        seed: int,
        engines: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(seed)
        self.rate, self.seconds, self.warm_up_s = rate, seconds, warm_up_s
        self._engines = engines or {}
        self.s_per_token: list[float] = []
        self.seconds_each: list[float] = []
        apps = json.loads((DATA / "gpts.json").read_text())
        self._apps = [(app, self.words(app["prompt_length"])) for app in apps]
        self._shares = [app["percentage"] for app in apps]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            time = self.draw.expovariate(self.rate)
            while time < self.seconds:
                app, prompt = self.draw.choices(self._apps, self._shares)[0]
                query = self.words(app["query_length"])
                group.create_task(self._request(time, app, prompt, query))
                time += self.draw.expovariate(self.rate)

    async def _request(self, start: float, app: dict[str, Any], prompt: str, query: str) -> None:
        await asyncio.sleep(start)
        loop = asyncio.get_running_loop()
        began = loop.time()
        session = await self.begin()
        tokens, name = app["output_length"], app["app_name"]
        models = tuple(map(model_of, self._engines.get(name, ())))
        out = await call(session, name, [prompt, Data(query)], tokens, models)
        await session.read(out, PerformanceCriteria.TPOT)  # by which it is judged
        if start >= self.warm_up_s:
            self.seconds_each.append(loop.time() - began)
            self.s_per_token.append(self.seconds_each[-1] / tokens)
        await session.end()


class Fanout(Programs):
    """Siblings with a long prefix that nobody has computed, read one by one or through one call
    that joins them. `parts`: how many run on each engine."""

    def __init__(
        self, args: argparse.Namespace, *, join: bool = False, parts: tuple[int, ...] = ()
    ) -> None:
        super().__init__(args.seeds[0])
        self.args, self.join, self.makespan = args, join, 0.0
        placed = [(model_of(i),) for i, size in enumerate(parts) for _ in range(size)]
        self._models: list[Models] = [*placed] or [()] * args.siblings

    async def run(self) -> None:
        loop, args = asyncio.get_running_loop(), self.args
        session, prefix = await self.begin(), Data(self.words(args.prefix))
        siblings = [
            call(session, "sibling", [prefix, Data(self.words(args.query))], args.answer, models)
            for models in self._models
        ]
        outputs = await asyncio.gather(*siblings)
        began = loop.time()
        if self.join:
            outputs = [await call(session, "join", [*outputs], 1, self._models[0])]
        await asyncio.gather(*map(session.read, outputs))
        self.makespan = loop.time() - began


class Mixed(Programs):
    """Chats that arrive one by one, and map-reduce applications that are there from the start;
    with `again`, each of those begins anew when it ends, for as long as chats arrive.

    With a `share` all is placed by hand: the chats on engine 0 with so many maps of each
    application, the other maps and the reduces on the others in turn."""

    def __init__(self, args: argparse.Namespace, seed: int, share: float | None = None) -> None:
        super().__init__(seed)
        self.args, self._share = args, share
        self._turns = count()
        self.tpot_s: list[float] = []
        self.ttft_s: list[float] = []
        self.jct_s: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            time = 0.0
            for _ in range(self.args.chats):
                time += self.draw.expovariate(self.args.chat_rate)
                prompt = chat_length(self.draw, CHAT_PROMPT_MEAN, CHAT_PROMPT_SPREAD)
                output = chat_length(self.draw, CHAT_OUTPUT_MEAN, CHAT_OUTPUT_SPREAD)
                group.create_task(self._chat(time, self.words(prompt), output))
            for _ in range(self.args.apps):
                group.create_task(self._map_reduces(time if self.args.again else 0.0))

    async def _map_reduces(self, until: float) -> None:
        await self._map_reduce()
        while asyncio.get_running_loop().time() < until:
            await self._map_reduce()

    def _models(self, *, on_first: bool) -> Models:
        if self._share is None:
            return ()
        return (model_of(0 if on_first else 1 + next(self._turns) % (NUM_ENGINES - 1)),)

    async def _chat(self, start: float, prompt: str, tokens: int) -> None:
        await asyncio.sleep(start)
        session = await self.begin()
        began = asyncio.get_running_loop().time()
        models = self._models(on_first=True)
        first, last = await session.stream(
            await call(session, "chat", [Data(prompt)], tokens, models)
        )
        self.ttft_s.append(first - began)
        if tokens > 1:
            self.tpot_s.append((last - first) / (tokens - 1))

    async def _map_reduce(self) -> None:
        args, loop = self.args, asyncio.get_running_loop()
        session, began = await self.begin(), loop.time()
        chunks = [self.words(args.chunk) for _ in range(args.document // args.chunk)]
        parts: list[Var] = []
        for number, chunk in enumerate(chunks):
            models = self._models(on_first=number < (self._share or 0))
            prompt = [INSTRUCTION, Data(chunk)]
            parts.append(await call(session, "map", prompt, args.answer, models))
        models = self._models(on_first=False)
        out = await call(session, "reduce", ["Join: ", *parts], args.answer, models)
        await session.read(out)
        self.jct_s.append(loop.time() - began)


def least_mixed_jct_s(args: argparse.Namespace, engine: SimConfig) -> float:
    """Below which no placement brings the mean JCT of `Mixed` applications that begin anew when
    they end, even without chats: what the applications compute and read, shared out perfectly, and
    a step's constant for each token of a map, since an engine makes at least so many steps while it
    has the maps of an application."""
    costs, num_maps = engine.instance, args.document // args.chunk
    prompts = [args.chunk + len(INSTRUCTION)] * num_maps + [num_maps * args.answer]
    work_s = sum(
        costs.prefill_token_s * prompt
        + costs.prefill_pair_s * prompt**2 / 2
        + costs.sequence_s * args.answer
        + costs.context_token_s * args.answer * (prompt + args.answer / 2)
        for prompt in prompts
    )
    return args.apps * work_s / NUM_ENGINES + args.answer * costs.step_s
