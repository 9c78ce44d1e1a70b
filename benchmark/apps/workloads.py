"""The workloads of the original evaluation that `parrot bench` lacks, and others: requests behind
long system prompts, applications among other traffic, loops and pauses, a mix of all sizes."""

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from parrot.cli.bench.plan import BenchJob, Plan, Workload, numbered, poisson, poisson_for
from parrot.cli.bench.program import Piece, Program, ProgramOutput
from parrot.cli.bench.text import TextSource
from parrot.cli.bench.workloads import Chain, ChainMany, Copilot, MapReduce, MultiAgent, request

DATA = Path(__file__).parent / "data"


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
        return Plan([BenchJob("fanout", partial(self.run, text=text))])

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


CHAT_LENGTHS = (4, 1024)  # prompts and outputs of chats are cut to these
# Log-normal lengths with the means of ShareGPT conversations: 161 tokens in, 338 out.
CHAT_PROMPT_MEAN, CHAT_PROMPT_SPREAD = 161, 1.1
CHAT_OUTPUT_MEAN, CHAT_OUTPUT_SPREAD = 338, 0.8


def chat_length(rng: random.Random, mean: float, spread: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return round(min(max(drawn, CHAT_LENGTHS[0]), CHAT_LENGTHS[1]))


def chat_job(
    kind: str, text: TextSource, key: object, prompt: int, output: int, start: float
) -> BenchJob:
    """One short request of a user who reads along."""

    async def run(program: Program) -> None:
        query = text.data(prompt, kind, key)
        await program.stream(program.call(kind, [query], output, streamed=True))

    return BenchJob(kind, run, start)


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


@dataclass(frozen=True)
class RefineLoop(Workload):
    """A long text is edited again and again: each call reads the text and writes all of it anew."""

    NAME: ClassVar[str] = "refine_loop"

    texts: int = 1
    text_tokens: int = 1024
    instruction: int = 60
    request: int = 30
    edits: int = 8

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("refine", self.texts, self.run, text=text))

    async def run(self, program: Program, text: TextSource, number: int) -> None:
        instruction = text.constant(self.sized(self.instruction), "refine")
        length = self.sized(self.text_tokens)
        current: Piece = text.data(length, "text", number)
        for edit in range(self.edits):
            request = text.data(self.sized(self.request), "edit", number, edit)
            current = program.call("edit", [instruction, current, request], length)
        assert isinstance(current, ProgramOutput)
        await program.read(current)


@dataclass(frozen=True)
class BestOfN(Workload):
    """Candidates for one question; the first few that end are judged, the others are not wanted any
    more. Each candidate is sampled with a seed of its own."""

    NAME: ClassVar[str] = "best_of_n"

    applications: int = 1
    candidates: int = 16
    winners: int = 4
    prompt: int = 1024
    shortest: int = 100
    longest: int = 800
    verdict: int = 50

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("best_of_n", self.applications, self.run, text=text, seed=seed))

    async def run(self, program: Program, text: TextSource, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        question = text.data(self.sized(self.prompt), "question", number)
        candidates = [
            program.call(
                "candidate",
                [question],
                self.sized(rng.randint(self.shortest, self.longest)),
                seed=number * self.candidates + i,
            )
            for i in range(self.candidates)
        ]
        best = await program.read_first(candidates, self.winners)
        judge = text.constant(self.sized(60), "judge")
        await program.read(program.call("judge", [judge, *best], self.sized(self.verdict)))


@dataclass(frozen=True)
class Rag(Workload):
    """Documents are there `lead_s` before the question about them. The time counts from the
    question."""

    NAME: ClassVar[str] = "rag"

    users: int = 8
    documents: int = 8192
    question: int = 50
    output: int = 100
    lead_s: float = 3.0
    gap_s: float = 1.0

    def plan(self, text: TextSource, seed: int) -> Plan:
        jobs = numbered("rag", self.users, self.run, text=text)
        return Plan([replace(job, start_s=n * self.gap_s) for n, job in enumerate(jobs)])

    async def run(self, program: Program, text: TextSource, number: int) -> None:
        instruction = text.constant(self.sized(60), "rag")
        found = text.data(self.sized(self.documents), "documents", number)
        question = program.later("question", self.sized(self.question))
        answer = program.call("answer", [instruction, found, question], self.sized(self.output))
        reading = asyncio.create_task(program.read(answer))
        await asyncio.sleep(self.lead_s)
        program.begin_now()
        await program.set(question, text.data(question.tokens, "question", number))
        await reading


@dataclass(frozen=True)
class ToolPause(Workload):
    """Chats whose turns wait for a tool or a person, `shortest_s` to `longest_s` each. All turns
    are submitted at the beginning, where a backend can take calls whose inputs are not there yet.
    The time of a job is that of its turns, without the pauses."""

    NAME: ClassVar[str] = "tool_pause"

    chats: int = 32
    turns: int = 5
    first_prompt: int = 2048
    result: int = 200
    output: int = 100
    shortest_s: float = 1.0
    longest_s: float = 30.0

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("chat", self.chats, self.run, text=text, seed=seed))

    async def run(self, program: Program, text: TextSource, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        pauses = [rng.uniform(self.shortest_s, self.longest_s) for _ in range(self.turns - 1)]
        system = text.constant(self.sized(60), "tools")
        prompt: list[Piece] = [system, text.data(self.sized(self.first_prompt), "chat", number)]
        results = [
            program.later(f"result_{i}", self.sized(self.result)) for i in range(len(pauses))
        ]
        answers = []
        for turn in range(self.turns):
            answer = program.call("turn", prompt, self.sized(self.output))
            answers.append(answer)
            if turn < len(results):
                prompt = [*prompt, answer, results[turn]]
        for turn, answer in enumerate(answers):
            await program.read(answer)
            if turn < len(results):
                await asyncio.sleep(pauses[turn])
                program.began += pauses[turn]
                content = text.data(results[turn].tokens, "result", number, turn)
                await program.set(results[turn], content)


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
        """`own`: tokens of the prompt that no other call has."""
        self._num_calls += 1
        instruction = self._text.constant(self._mix.sized(60), function)
        data = self._text.data(self._mix.sized(own), self._seed, self._num_calls)
        prompt = [instruction, data, *taken]
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


WORKLOADS: dict[str, type[Workload]] = {
    kind.NAME: kind
    for kind in (
        Chain,
        ChainBackground,
        ChainMany,
        MapReduce,
        Copilot,
        Gpts,
        MultiAgent,
        Mixed,
        RefineLoop,
        BestOfN,
        Rag,
        ToolPause,
        FanoutCold,
        Roots4,
        Load256,
        JobMix,
    )
}
