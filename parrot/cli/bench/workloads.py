"""The workloads, each a frozen dataclass of parameters that plans jobs: requests of many users;
summaries of long documents; a team of agents that writes a program. At the end the presets of the
command, at sizes that a laptop finishes."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from parrot.cli.bench.plan import BenchJob, Plan, Workload, numbered, poisson
from parrot.cli.bench.program import Piece, Program, ProgramOutput
from parrot.cli.bench.text import PromptText, TextSource

SYSTEM_TOKENS = 5107
SHORTEST_OUTPUT, LONGEST_OUTPUT = 183, 800
_LENGTHS = Path(__file__).parent / "copilot_prompt_lengths.txt"


def prompt_lengths() -> list[int]:
    """The lengths of recorded requests to a copilot, with the system prompt."""
    return [int(line) for line in _LENGTHS.read_text().split()]


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
) -> BenchJob:
    run = partial(ask, function=function, prompt=prompt, tokens=tokens, streamed=streamed)
    return BenchJob("request", run, start_s)


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


INSTRUCTION = 60
CHUNKS = (512, 1024, 1536, 2048)
OUTPUTS = (25, 50, 75, 100)


@dataclass(frozen=True)
class Chain(Workload):
    """One document after the other; each chunk refines the running summary. `chunk_first` puts the
    chunk before the summary: then all but the summary is known before the step begins."""

    NAME: ClassVar[str] = "chain"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {"chunk": CHUNKS, "output": OUTPUTS}

    documents: int = 10
    document_tokens: int = 20_000
    chunk: int = 1024
    output: int = 50
    chunk_first: bool = False

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("chain", self.documents, self.run, text=text), concurrency=1)

    async def run(self, program: Program, text: TextSource, number: int) -> None:
        instruction = text.constant(self.sized(INSTRUCTION), "chain")
        summary: ProgramOutput | None = None
        chunks = text.document(number, self.sized(self.document_tokens), self.sized(self.chunk))
        for step, chunk in enumerate(chunks, 1):
            prompt = [instruction, *self._order(summary, chunk)]
            summary = program.call(
                "refine_summary", prompt, self.sized(self.output), streamed=step == len(chunks)
            )
        assert summary is not None
        await program.read(summary)

    def _order(self, summary: ProgramOutput | None, chunk: PromptText) -> list[Piece]:
        if summary is None:
            return [chunk]
        return [chunk, summary] if self.chunk_first else [summary, chunk]


@dataclass(frozen=True)
class ChainMany(Chain):
    """All documents at once, each an application of its own."""

    NAME: ClassVar[str] = "chain_many"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {"documents": (10, 15, 20, 25)}

    documents: int = 25
    chunk: int = 2048

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(super().plan(text, seed).jobs)


@dataclass(frozen=True)
class MapReduce(Workload):
    """Summaries of all chunks in parallel, then one of them all; one document after the other."""

    NAME: ClassVar[str] = "map_reduce"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {"chunk": CHUNKS, "output": OUTPUTS}

    documents: int = 1
    document_tokens: int = 20_000
    chunk: int = 1024
    output: int = 50

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("map_reduce", self.documents, self.run, text=text), concurrency=1)

    async def run(self, program: Program, text: TextSource, number: int) -> None:
        instruction = text.constant(self.sized(INSTRUCTION), "map")
        chunks = text.document(number, self.sized(self.document_tokens), self.sized(self.chunk))
        length = self.sized(self.output)
        parts = [program.call("map_part", [instruction, chunk], length) for chunk in chunks]
        joined: list[Piece] = [text.constant(self.sized(INSTRUCTION), "reduce"), *parts]
        await program.read(program.call("reduce", joined, length, streamed=True))


DATA = Path(__file__).parent / "multi_agent_rounds.json"
QUERY = 20  # tokens at the end of a prompt that name the file it is about

Tokens = dict[str, int]  # "prompt_tokens" and "completion_tokens" of a recorded call


@dataclass(frozen=True, slots=True)
class Round:
    """The recorded lengths of one round, for each of its files."""

    constant: int  # instructions, the same for all files
    outputs: Sequence[int]


def rounds() -> list[Round]:
    """Round 0 is the architect, 1 the coders, then reviewers and revisers in turn. The constant
    part is what the recorded prompt has beyond the outputs of earlier rounds that it contains."""
    recorded = [list(r["calls"].values()) for r in json.loads(DATA.read_text())]
    found = [_round(recorded[0], 0)]
    design = recorded[0][0]["completion_tokens"]
    code = design
    for number, calls in enumerate(recorded[1:], 1):
        own_review = number >= 3 and number % 2 == 1
        reviewed = recorded[number - 1][0]["completion_tokens"] if own_review else 0
        found.append(_round(calls, code + reviewed))
        if number % 2 == 1:
            code = sum(call["completion_tokens"] for call in calls)
    return found


def _round(calls: Sequence[Tokens], inputs: int) -> Round:
    constant = calls[0]["prompt_tokens"] - inputs - QUERY
    return Round(max(1, constant), [call["completion_tokens"] for call in calls])


@dataclass(frozen=True)
class MultiAgent(Workload):
    """Prompts are: the team's instructions for the round, the whole code base (for coders the
    design), the file's own review (revisers), the file's name. More than 8 files: the recorded 8
    again."""

    NAME: ClassVar[str] = "multi_agent"
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {"files": (4, 8, 12, 16)}

    files: int = 16
    num_rounds: int = 3
    applications: int = 1

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("multi_agent", self.applications, self.run, text=text))

    async def run(self, program: Program, text: TextSource, number: int) -> None:
        architect, coders, *reviews = rounds()
        task = text.data(self.sized(QUERY), "task", number)
        instruction = text.constant(self.sized(architect.constant), "architect")
        design = program.call("architect", [instruction, task], self.sized(architect.outputs[0]))
        code = self._round(program, text, "coder", coders, [design], None)
        for turn in range(self.num_rounds):
            review, revise = reviews[2 * turn : 2 * turn + 2]
            remarks = self._round(program, text, "reviewer", review, code, None)
            is_last = turn == self.num_rounds - 1
            code = self._round(program, text, "reviser", revise, code, remarks, read=is_last)
        await program.read(*code)

    def _round(
        self,
        program: Program,
        text: TextSource,
        role: str,
        counts: Round,
        shared: Sequence[ProgramOutput],
        own: Sequence[ProgramOutput] | None,
        *,
        read: bool = False,
    ) -> list[ProgramOutput]:
        instruction = text.constant(self.sized(counts.constant), role, counts.constant)
        outputs = []
        for file in range(self.files):
            mine = [] if own is None else [own[file]]
            query = text.data(self.sized(QUERY), "file", file)
            tokens = self.sized(counts.outputs[file % len(counts.outputs)])
            prompt: list[Piece] = [instruction, *shared, *mine, query]
            outputs.append(program.call(role, prompt, tokens, streamed=read))
        return outputs


_OF_DOCUMENTS = {
    "num_requests": "documents",
    "prompt_tokens": "document_tokens",
    "output_tokens": "output",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """`options`: the workload's parameter for each option of the command that it has."""

    workload: Workload
    options: Mapping[str, str]
    is_application: bool = True


PRESETS = {
    "requests": Preset(
        Requests(),
        {
            "num_requests": "requests",
            "prompt_tokens": "prompt",
            "prefix_tokens": "prefix",
            "output_tokens": "output",
        },
        is_application=False,
    ),
    "map_reduce": Preset(
        MapReduce(documents=2, document_tokens=1024, chunk=128, output=32), _OF_DOCUMENTS
    ),
    "chain": Preset(Chain(documents=2, document_tokens=1024, chunk=128, output=32), _OF_DOCUMENTS),
    "multi_agent": Preset(
        MultiAgent(factor=0.1, files=4, num_rounds=1), {"num_requests": "applications"}
    ),
    "copilot": Preset(Copilot(factor=0.1, batch=16, streamed=True), {"num_requests": "batch"}),
}


@dataclass(frozen=True, slots=True)
class TimedWorkload:
    """A workload, and when its jobs begin: at most `concurrency` at once, or also at random times
    with `request_rate` of them a second."""

    name: str
    workload: Workload
    concurrency: int | None
    request_rate: float | None

    @property
    def is_application(self) -> bool:
        return PRESETS[self.name].is_application

    def plan(self, text: TextSource, seed: int) -> Plan:
        """Raises `ValueError` for parameters that contradict each other."""
        jobs = self.workload.plan(text, seed).jobs
        if self.request_rate is not None:
            starts = poisson(random.Random(seed), self.request_rate, len(jobs))
            jobs = [replace(job, start_s=at) for job, at in zip(jobs, starts, strict=True)]
        return Plan(jobs, self.concurrency)


def parse_load(
    text: str,
    options: Mapping[str, int | None],
    concurrency: int | None,
    request_rate: float | None,
) -> TimedWorkload:
    """`text`: NAME[:KEY=VALUE,...]. `options`: those of the command, None where not given. Raises
    `ValueError` that says what there is."""
    name, _, rest = text.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        raise ValueError(f"no workload {name!r}: it may be {', '.join(PRESETS)}")
    changes = dict(_pair(part) for part in rest.split(",") if part)
    for option, value in options.items():
        if value is None:
            continue
        if option not in preset.options:
            own = ", ".join(f"--{known}" for known in preset.options)
            raise ValueError(
                f"--{option} is nothing that {name} has; of such options it has {own}, and "
                f"--workload {name}:KEY=VALUE sets {', '.join(preset.workload.parameters())}"
            )
        changes[preset.options[option]] = str(value)
    return TimedWorkload(name, preset.workload.changed(changes), concurrency, request_rate)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--workload: {text!r} is not KEY=VALUE")
    return name, value
