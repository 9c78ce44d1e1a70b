"""Applications among other traffic."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from parrot.cli.bench.plan import Job, Plan, Workload, poisson, poisson_for
from parrot.cli.bench.program import Program, TextSource
from parrot.cli.bench.workloads import Chain, MapReduce

CHAT_LENGTHS = (4, 1024)  # prompts and outputs of chats are cut to these
# Log-normal lengths with the means of ShareGPT conversations: 161 tokens in, 338 out.
CHAT_PROMPT_MEAN, CHAT_PROMPT_SPREAD = 161, 1.1
CHAT_OUTPUT_MEAN, CHAT_OUTPUT_SPREAD = 338, 0.8


def chat_length(rng: random.Random, mean: float, spread: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return round(min(max(drawn, CHAT_LENGTHS[0]), CHAT_LENGTHS[1]))


def chat_job(
    kind: str, text: TextSource, key: object, prompt: int, output: int, start: float
) -> Job:
    """One short request of a user who reads along."""

    async def run(program: Program) -> None:
        query = text.data(prompt, kind, key)
        await program.stream(program.call(kind, [query], output, streamed=True))

    return Job(kind, run, start)


@dataclass(frozen=True)
class ChainBackground(Chain):
    """`chain` beside a Poisson stream of other requests, for `seconds` of arrivals."""

    NAME: ClassVar[str] = "chain_background"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {
        "rate": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    }

    documents: int = 1
    rate: float = 2.0
    seconds: float = 20.0
    background_prompt: int = 512
    background_output: int = 50

    def plan(self, text: TextSource, seed: int) -> Plan:
        arrivals = poisson_for(random.Random(seed), self.rate, self.seconds)
        prompt, output = self.sized(self.background_prompt), self.sized(self.background_output)
        background = [
            chat_job("background", text, i, prompt, output, start)
            for i, start in enumerate(arrivals)
        ]
        return Plan([*super().plan(text, seed).jobs, *background])


@dataclass(frozen=True)
class Mixed(Workload):
    """Chats that arrive one by one, and map-reduce applications all from the beginning."""

    NAME: ClassVar[str] = "mixed"

    chats: int = 40
    chat_rate: float = 1.0
    applications: int = 9
    document_tokens: int = 20_000
    chunk: int = 1024
    output: int = 50

    def plan(self, text: TextSource, seed: int) -> Plan:
        reduce = MapReduce(
            factor=self.factor,
            documents=self.applications,
            document_tokens=self.document_tokens,
            chunk=self.chunk,
            output=self.output,
        )
        rng = random.Random(seed)
        chats = [
            chat_job(
                "chat",
                text,
                i,
                self.sized(chat_length(rng, CHAT_PROMPT_MEAN, CHAT_PROMPT_SPREAD)),
                self.sized(chat_length(rng, CHAT_OUTPUT_MEAN, CHAT_OUTPUT_SPREAD)),
                start,
            )
            for i, start in enumerate(poisson(rng, self.chat_rate, self.chats))
        ]
        return Plan([*reduce.plan(text, seed).jobs, *chats])
