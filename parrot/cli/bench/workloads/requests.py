"""Requests of many users, each a call of its own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from parrot.cli.bench.plan import Job, Plan, Workload
from parrot.cli.bench.program import Program
from parrot.cli.bench.text import Text, TextSource

SYSTEM_TOKENS = 5107
SHORTEST_OUTPUT, LONGEST_OUTPUT = 183, 800
_LENGTHS = Path(__file__).parent / "copilot_prompt_lengths.txt"


def prompt_lengths() -> list[int]:
    """The lengths of recorded requests to a copilot, with the system prompt."""
    return [int(line) for line in _LENGTHS.read_text().split()]


async def ask(
    program: Program, *, function: str, prompt: Sequence[Text], tokens: int, streamed: bool
) -> None:
    await program.read(program.call(function, prompt, tokens, streamed=streamed))


def request(
    function: str,
    prompt: Sequence[Text],
    tokens: int,
    start_s: float = 0.0,
    *,
    streamed: bool = False,
) -> Job:
    run = partial(ask, function=function, prompt=prompt, tokens=tokens, streamed=streamed)
    return Job("request", run, start_s)


@dataclass(frozen=True)
class Requests(Workload):
    """`requests` of `prompt` tokens, of which the first `prefix` are the same in all of them. Each
    is read piece by piece."""

    NAME: ClassVar[str] = "requests"

    requests: int = 20
    prompt: int = 256
    prefix: int = 0
    output: int = 32

    def plan(self, text: TextSource, seed: int) -> Plan:
        if self.prefix >= self.prompt:
            raise ValueError(
                f"the shared prefix ({self.prefix} tokens) must be shorter than the prompt "
                f"({self.prompt}) that begins with it"
            )
        prefix = [text.constant(self.sized(self.prefix), "prefix")] if self.prefix else []
        rest = self.sized(self.prompt - self.prefix)
        output = self.sized(self.output)
        return Plan(
            [
                request("request", [*prefix, text.data(rest, i)], output, streamed=True)
                for i in range(self.requests)
            ]
        )


@dataclass(frozen=True)
class Copilot(Workload):
    """`batch` requests at once, each of another user; nothing is cached before. `output` 0: lengths
    drawn between 183 and 800. `streamed`: they are read piece by piece."""

    NAME: ClassVar[str] = "copilot"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {
        "batch": (8, 16, 32, 64),
        "output": (100, 200, 400, 800),
    }

    batch: int = 64
    systems: int = 1
    output: int = 0
    seed: int = 0
    streamed: bool = False

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(self.seed)
        recorded = prompt_lengths()
        if self.batch > len(recorded):
            raise ValueError(f"{self.NAME} has {len(recorded)} requests, and not {self.batch}")
        lengths = rng.sample(recorded, self.batch)
        roots = [i % self.systems for i in range(self.batch)]
        rng.shuffle(roots)  # in turns, round robin over as many engines would be right by chance
        jobs = []
        for i, length in enumerate(lengths):
            drawn = rng.randint(SHORTEST_OUTPUT, LONGEST_OUTPUT)
            system = text.constant(self.sized(SYSTEM_TOKENS), "system", roots[i])
            query = text.data(self.sized(length - SYSTEM_TOKENS), "query", i)
            tokens = self.sized(self.output or drawn)
            function = f"copilot_{roots[i]}"
            jobs.append(request(function, [system, query], tokens, streamed=self.streamed))
        return Plan(jobs)
