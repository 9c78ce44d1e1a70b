"""Workloads of single requests, each an application of its own."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parrot.cli.bench.plan import BenchJob, Plan, Workload, poisson
from parrot.cli.bench.program import Program
from parrot.cli.bench.text import PromptText, TextSource

_FOLDER = Path(__file__).parent


async def ask(
    program: Program, *, function: str, prompt: Sequence[PromptText], tokens: int, streamed: bool
) -> None:
    await program.read(program.call(function, prompt, tokens, streamed=streamed))


def request(
    function: str,
    prompt: Sequence[PromptText],
    tokens: int,
    start_s: float = 0.0,
    *,
    streamed: bool = False,
    kind: str = "request",
) -> BenchJob:
    run = partial(ask, function=function, prompt=prompt, tokens=tokens, streamed=streamed)
    return BenchJob(kind, run, start_s)


@dataclass(frozen=True)
class Requests(Workload):
    """`requests` of `prompt` tokens each. The first `prefix` tokens are the same in all of them."""

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


_SYSTEM_TOKENS = 5107
_SHORTEST_OUTPUT, _LONGEST_OUTPUT = 183, 800


@dataclass(frozen=True)
class Copilot(Workload):
    """`batch` requests at the same time, with `systems` different system prompts. The prompts have
    recorded lengths. With `output` 0, output lengths are drawn between 183 and 800."""

    batch: int = 64
    systems: int = 1
    output: int = 0
    seed: int = 0
    streamed: bool = False

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(self.seed)
        recorded = (_FOLDER / "copilot_prompt_lengths.txt").read_text().split()
        if self.batch > len(recorded):
            raise ValueError(
                f"`batch` is {self.batch}, but only {len(recorded)} requests are recorded"
            )
        lengths = rng.sample([int(length) for length in recorded], self.batch)
        systems = [i % self.systems for i in range(self.batch)]
        # Shuffle: in cyclic order, round robin could give each engine a single system prompt.
        rng.shuffle(systems)
        jobs = []
        for i, (length, number) in enumerate(zip(lengths, systems, strict=True)):
            drawn = rng.randint(_SHORTEST_OUTPUT, _LONGEST_OUTPUT)
            system = text.constant(self.sized(_SYSTEM_TOKENS), "system", number)
            query = text.data(self.sized(length - _SYSTEM_TOKENS), "query", i)
            tokens = self.sized(self.output or drawn)
            function = f"copilot_{number}"
            jobs.append(request(function, [system, query], tokens, streamed=self.streamed))
        return Plan(jobs)


def gpts_apps() -> list[dict[str, Any]]:
    """Four applications: their lengths in tokens, and their share of the traffic."""
    apps: list[dict[str, Any]] = json.loads((_FOLDER / "gpts.json").read_text())
    return apps


@dataclass(frozen=True)
class Gpts(Workload):
    """Requests of four applications, drawn by their share. They arrive as a Poisson stream."""

    rate: float = 4.0
    requests: int = 100

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(seed)
        apps = gpts_apps()
        shares = [app["percentage"] for app in apps]
        jobs = []
        for i, start in enumerate(poisson(rng, self.rate, self.requests)):
            app = rng.choices(apps, shares)[0]
            system = text.constant(self.sized(app["prompt_length"]), app["app_name"])
            query = text.data(self.sized(app["query_length"]), "query", i)
            name = app["app_name"].lower().replace(" ", "_")
            jobs.append(request(name, [system, query], self.sized(app["output_length"]), start))
        return Plan(jobs)


def requests_256() -> list[tuple[list[int], int]]:
    """Prompts of random token ids and output lengths, as a known benchmark of small engines draws
    them. They have 142,827 and 133,966 tokens in total."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


def lengths_256() -> list[tuple[int, int]]:
    return [(len(prompt), output) for prompt, output in requests_256()]


@dataclass(frozen=True)
class Load256(Workload):
    """256 requests at the same time without a shared prefix."""

    requests: int = 256

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(
            [
                request("request", [text.data(self.sized(prompt), "request", i)], self.sized(out))
                for i, (prompt, out) in enumerate(lengths_256()[: self.requests])
            ]
        )


_SHORTEST_CHAT, _LONGEST_CHAT = 4, 1024  # tokens of a chat's prompt, and of its output
# Log-normal lengths with the means of ShareGPT conversations: mean and spread.
_CHAT_PROMPT, _CHAT_OUTPUT = (161, 1.1), (338, 0.8)


def chat_lengths(rng: random.Random) -> tuple[int, int]:
    """Tokens of a chat's prompt and output."""

    def drawn(mean: float, spread: float) -> int:
        length = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return round(min(max(length, _SHORTEST_CHAT), _LONGEST_CHAT))

    return drawn(*_CHAT_PROMPT), drawn(*_CHAT_OUTPUT)


def chat_job(
    kind: str, text: TextSource, key: object, prompt: int, output: int, start: float = 0.0
) -> BenchJob:
    """A request whose output a client reads as a stream."""
    data = text.data(prompt, kind, key)
    return request(kind, [data], output, start, streamed=True, kind=kind)
