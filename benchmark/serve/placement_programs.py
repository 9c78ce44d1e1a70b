"""The programs whose placement bench_placement.py compares, and where they run."""

import argparse
import asyncio
import json
import math
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from common import ROOT, core_config, output_id, submit, words

from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.simulation import SimClient, SimCluster, run_virtual

GPTS = ROOT / "benchmark" / "apps" / "data" / "gpts.json"
NUM_ENGINES = 4
CHAT_LENGTHS = (4, 1024)
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
Result = dict[str, Any]


@dataclass
class Site:
    """Where a case runs."""

    engine: SimConfig
    settings: dict[str, Any]
    models: tuple[str, ...] = ()  # an engine each; empty: four of the same
    slowdowns: dict[int, float] = field(default_factory=dict)

    def run(self, program: "Coroutine[Any, Any, None]", programs: "Programs") -> None:
        """To the end of `program`, on virtual time."""

        async def main() -> None:
            core = core_config(max_queue_size=100_000, **self.settings)
            async with SimCluster(0, engine=self.engine, core=core) as cluster:
                for i in range(NUM_ENGINES):
                    changes = {"model": self.models[i]} if self.models else {}
                    engine = await cluster.add_engine(**changes)
                    engine.slow_down(self.slowdowns.get(i, 1.0))
                programs.client = cluster.client()
                await program
                cluster.check_integrity()

        run_virtual(main())


class Programs:
    """The calls of many users, each in a session of its own. A letter is a token."""

    client: SimClient

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def words(self, size: int) -> str:
        return words(self.draw, size)

    async def session(self) -> Result:
        return (await self.client.create_session()).model_dump()

    async def call(
        self,
        scope: Result,
        template: str,
        tokens: int,
        name: str,
        models: tuple[str, ...] = (),
        **inputs: str,
    ) -> str:
        """The id of its output variable. `inputs`: values, or ids of variables in `@...`."""
        sampling = {"max_gen_length": tokens, "ignore_tokenizer_eos": True, "temperature": 1.0}
        given = [
            {"name": key, "var_id": value[1:]}
            if value.startswith("@")
            else {"name": key, "value": value}
            for key, value in inputs.items()
        ]
        response = await submit(
            self.client,
            scope,
            template + "{{out}}",
            given,
            sampling,
            func_name=name,
            models=list(models),
        )
        return output_id(response)

    async def read(
        self,
        scope: Result,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
    ) -> None:
        await self.client.get_var(**scope, var_id=var_id, criteria=criteria)


class Gpts(Programs):
    """Requests of four applications with long system prompts, as a Poisson stream of `rate`.
    `engines`: where those of each application may run."""

    def __init__(
        self,
        rate: float,
        seconds: float,
        warm_up_s: float,
        seed: int,
        engines: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(seed)
        self.rate, self.seconds, self.warm_up_s = rate, seconds, warm_up_s
        self._engines = engines or {}
        self.s_per_token: list[float] = []
        self.seconds_each: list[float] = []
        apps = json.loads(GPTS.read_text())
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

    async def _request(self, start: float, app: Result, prompt: str, query: str) -> None:
        await asyncio.sleep(start)
        loop = asyncio.get_running_loop()
        began = loop.time()
        scope = await self.session()
        tokens, name = app["output_length"], app["app_name"]
        models = tuple(f"model{i}" for i in self._engines.get(name, ()))
        out = await self.call(scope, prompt + "{{query}}", tokens, name, models, query=query)
        await self.read(scope, out, PerformanceCriteria.TPOT)  # by which it is judged
        if start >= self.warm_up_s:
            self.seconds_each.append(loop.time() - began)
            self.s_per_token.append(self.seconds_each[-1] / tokens)
        await self.client.delete_session(scope["session_id"], scope["session_auth"])


class Fanout(Programs):
    """Siblings with a long prefix that nobody has computed; all at once, or for one `join`."""

    def __init__(self, args: argparse.Namespace, parts: tuple[int, ...] = ()) -> None:
        super().__init__(args.seeds[0])
        self.args, self.makespan = args, 0.0
        self._models = [(f"model{i}",) for i, size in enumerate(parts) for _ in range(size)] or [
            ()
        ] * args.siblings

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        scope, prefix = await self.session(), self.words(self.args.prefix)
        outputs = await asyncio.gather(
            *(
                self.call(
                    scope,
                    "{{prefix}}{{query}}",
                    self.args.output,
                    "sibling",
                    models,
                    prefix=prefix,
                    query=self.words(self.args.query),
                )
                for models in self._models
            )
        )
        began = loop.time()
        if self.args.join:
            names = [f"x{i}" for i in range(len(outputs))]
            template = "".join(f"{{{{{name}}}}}" for name in names)
            inputs = {name: f"@{out}" for name, out in zip(names, outputs, strict=True)}
            outputs = [await self.call(scope, template, 1, "join", self._models[0], **inputs)]
        await asyncio.gather(*(self.read(scope, out) for out in outputs))
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
                prompt, output = self._length(161, 1.1), self._length(338, 0.8)
                group.create_task(self._chat(time, self.words(prompt), output))
            for _ in range(self.args.apps):
                group.create_task(self._map_reduces(time if self.args.again else 0.0))

    async def _map_reduces(self, until: float) -> None:
        await self._map_reduce()
        while asyncio.get_running_loop().time() < until:
            await self._map_reduce()

    def _length(self, mean: float, spread: float) -> int:
        drawn = self.draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return round(min(max(drawn, CHAT_LENGTHS[0]), CHAT_LENGTHS[1]))

    def _models(self, *, on_first: bool) -> tuple[str, ...]:
        if self._share is None:
            return ()
        number = 0 if on_first else 1 + next(self._turns) % (NUM_ENGINES - 1)
        return (f"model{number}",)

    async def _chat(self, start: float, prompt: str, tokens: int) -> None:
        await asyncio.sleep(start)
        scope, loop = await self.session(), asyncio.get_running_loop()
        began, models = loop.time(), self._models(on_first=True)
        out = await self.call(scope, "{{prompt}}", tokens, "chat", models, prompt=prompt)
        times = [loop.time() async for _ in self.client.stream_var(**scope, var_id=out)]
        self.ttft_s.append(times[0] - began)
        if tokens > 1:
            self.tpot_s.append((times[-1] - times[0]) / (tokens - 1))

    async def _map_reduce(self) -> None:
        args, loop = self.args, asyncio.get_running_loop()
        scope, began = await self.session(), loop.time()
        chunks = [self.words(args.chunk) for _ in range(args.document // args.chunk)]
        parts = []
        for number, chunk in enumerate(chunks):
            models = self._models(on_first=number < (self._share or 0))
            template = INSTRUCTION + "{{chunk}}"
            parts.append(await self.call(scope, template, args.output, "map", models, chunk=chunk))
        names = [f"x{i}" for i in range(len(parts))]
        template = "Join: " + "".join(f"{{{{{name}}}}}" for name in names)
        inputs = {name: f"@{part}" for name, part in zip(names, parts, strict=True)}
        models = self._models(on_first=False)
        out = await self.call(scope, template, args.output, "reduce", models, **inputs)
        await self.read(scope, out)
        self.jct_s.append(loop.time() - began)


def least_mixed_jct_s(args: argparse.Namespace, engine: SimConfig) -> float:
    """Below which no placement brings the mean JCT of `Mixed` applications that begin anew when
    they end, even without chats: what the applications compute and read, shared out perfectly, and
    a step's constant for each token of a map, since an engine makes at least so many steps while it
    has the maps of an application."""
    costs, num_maps = engine.instance, args.document // args.chunk
    prompts = [args.chunk + len(INSTRUCTION)] * num_maps + [num_maps * args.output]
    work_s = sum(
        costs.prefill_token_s * prompt
        + costs.prefill_pair_s * prompt**2 / 2
        + costs.sequence_s * args.output
        + costs.context_token_s * args.output * (prompt + args.output / 2)
        for prompt in prompts
    )
    return args.apps * work_s / NUM_ENGINES + args.output * costs.step_s
