"""A mix of applications of all sizes, in which the order of calls matters."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from parrot.cli.bench.plan import Job, Plan, Workload, poisson
from parrot.cli.bench.program import Output, Program, TextSource

UNKNOWN_LIMIT, STOP = 512, "z"


@dataclass(frozen=True)
class JobMix(Workload):
    """A quarter each of chains, map-reduces, single chats, and fans of candidates with a judge, as
    a Poisson stream. `learnt`: outputs end by chance, at a letter of `sim` engines, so that their
    lengths must be learnt."""

    NAME: ClassVar[str] = "job_mix"

    jobs: int = 300
    rate: float = 1.0
    learnt: bool = False

    def plan(self, text: TextSource, seed: int) -> Plan:
        rng = random.Random(seed)
        kinds: tuple[Callable[[JobRun], Output], ...] = (chain, map_reduce, chat, fan)
        jobs = []
        for number, start in enumerate(poisson(rng, self.rate, self.jobs)):
            kind = kinds[number % len(kinds)]
            run = partial(self._run, kind=kind, text=text, seed=(seed, number))
            jobs.append(Job(kind.__name__, run, start))
        return Plan(jobs)

    async def _run(
        self,
        program: Program,
        kind: "Callable[[JobRun], Output]",
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

    def call(self, function: str, own: int, tokens: int, *taken: Output) -> Output:
        """`own`: tokens of the prompt that no other call has."""
        self._num_calls += 1
        instruction = self._text.constant(self._mix.sized(60), function)
        data = self._text.data(self._mix.sized(own), self._seed, self._num_calls)
        prompt = [instruction, data, *taken]
        if self._mix.learnt:
            return self._program.call(function, prompt, UNKNOWN_LIMIT, stop=STOP)
        return self._program.call(function, prompt, self._mix.sized(tokens))

    def step(self, function: str, *taken: Output) -> Output:
        own, tokens = self.rng.randint(600, 1500), self.rng.randint(30, 100)
        return self.call(function, own, tokens, *taken)


def chain(job: JobRun) -> Output:
    output = job.step("refine")
    for _ in range(job.rng.randint(4, 19)):
        output = job.step("refine", output)
    return output


def map_reduce(job: JobRun) -> Output:
    maps = [job.step("map") for _ in range(job.rng.randint(10, 30))]
    return job.call("reduce", 60, job.rng.randint(100, 200), *maps)


def chat(job: JobRun) -> Output:
    return job.call("chat", job.rng.randint(50, 1000), job.rng.randint(30, 400))


def fan(job: JobRun) -> Output:
    own = job.rng.randint(300, 600)
    candidates = range(job.rng.randint(4, 12))
    tries = [job.call("try", own, job.rng.randint(100, 200)) for _ in candidates]
    return job.call("judge", 60, 30, *tries)
