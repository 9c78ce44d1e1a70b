"""Requests of many users behind long system prompts."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from parrot.cli.bench.plan import Job, Plan, Workload, poisson
from parrot.cli.bench.program import Program, TextSource
from parrot.cli.bench.workloads import Copilot, request

DATA = Path(__file__).parents[1] / "data"


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
