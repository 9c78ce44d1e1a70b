"""Workloads that mix applications with other traffic."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from parrot.cli.bench.documents import INSTRUCTION, Chain, MapReduce
from parrot.cli.bench.plan import BenchJob, Plan, Workload, poisson, poisson_for
from parrot.cli.bench.program import Piece, Program, ProgramOutput
from parrot.cli.bench.requests import chat_job, chat_lengths
from parrot.cli.bench.text import TextSource


@dataclass(frozen=True)
class ChainBackground(Chain):
    """A chain next to a Poisson stream of other requests, which arrive for `seconds`."""

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
    """Chats that arrive as a Poisson stream, and map-reduce applications that all start at
    time 0."""

    chats: int = 40
    chat_rate: float = 1.0
    applications: int = 9
    document_tokens: int = 20_000
    chunk: int = 1024
    output: int = 50

    def plan(self, text: TextSource, seed: int) -> Plan:
        reduce = MapReduce(
            self.factor, self.applications, self.document_tokens, self.chunk, self.output
        )
        rng = random.Random(seed)
        chats = []
        for i, start in enumerate(poisson(rng, self.chat_rate, self.chats)):
            prompt, output = map(self.sized, chat_lengths(rng))
            chats.append(chat_job("chat", text, i, prompt, output, start))
        return Plan([*reduce.plan(text, seed).jobs, *chats])


UNKNOWN_LIMIT, STOP = 512, "z"


@dataclass(frozen=True)
class JobMix(Workload):
    """A quarter each of chains, map-reduces, single chats, and candidates with a judge. They arrive
    as a Poisson stream. `learnt`: outputs end at random, at a letter that `sim` engines draw, so
    that ServeCore must learn their lengths."""

    jobs: int = 300
    rate: float = 1.0
    learnt: bool = False

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(seed)
        kinds: tuple[Callable[[JobRun], ProgramOutput], ...] = (chain, map_reduce, chat, fan)
        jobs = []
        for number, start in enumerate(poisson(rng, self.rate, self.jobs)):
            kind = kinds[number % len(kinds)]
            run = partial(self._run, kind=kind, text=text, seed=(seed, number))
            jobs.append(BenchJob(kind.__name__, run, start))
        return Plan(jobs)

    async def _run(
        self,
        program: Program,
        kind: "Callable[[JobRun], ProgramOutput]",
        text: TextSource,
        seed: tuple[int, int],
    ) -> None:
        await program.read(kind(JobRun(self, program, text, seed)))


class JobRun:
    """The calls of one job."""

    def __init__(
        self, mix: JobMix, program: Program, text: TextSource, seed: tuple[int, int]
    ) -> None:
        self.rng = random.Random(repr(seed))
        self._mix, self._program, self._text, self._seed = mix, program, text, seed
        self._num_calls = 0

    def call(self, function: str, own: int, tokens: int, *taken: ProgramOutput) -> ProgramOutput:
        """Add a call. `own`: tokens of its prompt that no other prompt contains."""
        self._num_calls += 1
        instruction = self._text.constant(self._mix.sized(INSTRUCTION), function)
        data = self._text.data(self._mix.sized(own), self._seed, self._num_calls)
        prompt: list[Piece] = [instruction, data, *taken]
        if self._mix.learnt:
            return self._program.call(function, prompt, UNKNOWN_LIMIT, stop=STOP)
        return self._program.call(function, prompt, self._mix.sized(tokens))

    def step(self, function: str, *taken: ProgramOutput) -> ProgramOutput:
        own, tokens = self.rng.randint(600, 1500), self.rng.randint(30, 100)
        return self.call(function, own, tokens, *taken)


def chain(job: JobRun) -> ProgramOutput:
    output = job.step("refine")
    for _ in range(job.rng.randint(4, 19)):
        output = job.step("refine", output)
    return output


def map_reduce(job: JobRun) -> ProgramOutput:
    maps = [job.step("map") for _ in range(job.rng.randint(10, 30))]
    return job.call("reduce", 60, job.rng.randint(100, 200), *maps)


def chat(job: JobRun) -> ProgramOutput:
    return job.call("chat", job.rng.randint(50, 1000), job.rng.randint(30, 400))


def fan(job: JobRun) -> ProgramOutput:
    own = job.rng.randint(300, 600)
    candidates = range(job.rng.randint(4, 12))
    tries = [job.call("try", own, job.rng.randint(100, 200)) for _ in candidates]
    return job.call("judge", 60, 30, *tries)
