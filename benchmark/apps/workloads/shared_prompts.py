"""Requests of many users behind long system prompts."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmark.apps.plan import Job, Plan, Workload
from benchmark.apps.program import Program
from benchmark.apps.text import Text, TextSource
from benchmark.apps.workloads.arrivals import poisson

DATA = Path(__file__).parents[1] / "data"
SYSTEM_TOKENS = 5107
SHORTEST_OUTPUT, LONGEST_OUTPUT = 183, 800


def prompt_lengths() -> list[int]:
    """Of recorded requests to a copilot, with the system prompt."""
    return [int(line) for line in (DATA / "copilot_prompt_lengths.txt").read_text().split()]


async def ask(program: Program, *, function: str, prompt: Sequence[Text], tokens: int) -> None:
    await program.read(program.call(function, prompt, tokens))


def request(function: str, prompt: Sequence[Text], tokens: int, start_s: float = 0.0) -> Job:
    return Job("request", partial(ask, function=function, prompt=prompt, tokens=tokens), start_s)


@dataclass(frozen=True)
class Copilot(Workload):
    """`batch` requests at once, each of another user; nothing is cached before. `output` 0: lengths
    drawn between 183 and 800."""

    NAME: ClassVar[str] = "copilot"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {
        "batch": (8, 16, 32, 64),
        "output": (100, 200, 400, 800),
    }

    batch: int = 64
    systems: int = 1
    output: int = 0
    seed: int = 0

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(self.seed)
        lengths = rng.sample(prompt_lengths(), self.batch)
        roots = [i % self.systems for i in range(self.batch)]
        rng.shuffle(roots)  # in turns, round robin over as many engines would be right by chance
        jobs = []
        for i, length in enumerate(lengths):
            drawn = rng.randint(SHORTEST_OUTPUT, LONGEST_OUTPUT)
            system = text.constant(self.sized(SYSTEM_TOKENS), "system", roots[i])
            query = text.data(self.sized(length - SYSTEM_TOKENS), "query", i)
            tokens = self.sized(self.output or drawn)
            jobs.append(request(f"copilot_{roots[i]}", [system, query], tokens))
        return Plan(jobs)


@dataclass(frozen=True)
class Roots4(Copilot):
    """Four system prompts with 16 requests each, in one batch."""

    NAME: ClassVar[str] = "roots4"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {}

    systems: int = 4


@dataclass(frozen=True)
class Gpts(Workload):
    """Four applications by their share of the traffic; a Poisson stream of requests."""

    NAME: ClassVar[str] = "gpts"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {
        "rate": (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 16.0, 32.0)
    }

    rate: float = 4.0
    requests: int = 100

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(seed)
        apps = json.loads((DATA / "gpts.json").read_text())
        shares = [app["percentage"] for app in apps]
        jobs = []
        for i, start in enumerate(poisson(rng, self.rate, self.requests)):
            app = rng.choices(apps, shares)[0]
            system = text.constant(self.sized(app["prompt_length"]), app["app_name"])
            query = text.data(self.sized(app["query_length"]), "query", i)
            name = app["app_name"].lower().replace(" ", "_")
            tokens = self.sized(app["output_length"])
            jobs.append(request(name, [system, query], tokens, start))
        return Plan(jobs)


def requests_256() -> list[tuple[list[int], int]]:
    """Prompts and lengths of outputs, as small engines' benchmark draws them: 142,827 and 133,966
    tokens in all."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


def lengths_256() -> list[tuple[int, int]]:
    return [(len(prompt), output) for prompt, output in requests_256()]


@dataclass(frozen=True)
class Load256(Workload):
    """256 requests at once, prompts and outputs of 100 to 1024 tokens, nothing shared."""

    NAME: ClassVar[str] = "256"

    requests: int = 256

    def plan(self, text: TextSource, seed: int) -> Plan:
        jobs = []
        for i, (prompt, output) in enumerate(lengths_256()[: self.requests]):
            query = text.data(self.sized(prompt), "request", i)
            jobs.append(request("request", [query], self.sized(output)))
        return Plan(jobs)


@dataclass(frozen=True)
class FanoutCold(Workload):
    """Siblings of one application that share a long prefix which nobody has computed yet."""

    NAME: ClassVar[str] = "fanout_cold"

    siblings: int = 32
    prefix: int = 8192
    query: int = 50
    output: int = 100

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan([Job("fanout", partial(self.run, text=text))])

    async def run(self, program: Program, text: TextSource) -> None:
        prefix = text.data(self.sized(self.prefix), "prefix")
        await program.read(
            *(
                program.call(
                    "sibling",
                    [prefix, text.data(self.sized(self.query), "query", i)],
                    self.sized(self.output),
                )
                for i in range(self.siblings)
            )
        )
