"""Workloads over long documents."""

import asyncio
from dataclasses import dataclass, replace

from parrot.cli.bench.plan import Plan, Workload, numbered
from parrot.cli.bench.program import Piece, Program, ProgramOutput
from parrot.cli.bench.text import PromptText, TextSource

INSTRUCTION = 60  # Tokens.


@dataclass(frozen=True)
class Chain(Workload):
    """Each chunk of a document refines the running summary. `chunk_first` puts the chunk before the
    summary, so that only the summary is unknown before a step starts. `at_once` limits how many
    documents run at the same time; 0: no limit."""

    documents: int = 10
    document_tokens: int = 20_000
    chunk: int = 1024
    output: int = 50
    chunk_first: bool = False
    at_once: int = 1

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan(numbered("chain", self.documents, self.run, text=text), self.at_once or None)

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
class MapReduce(Workload):
    """Summaries of all chunks in parallel, then one of all summaries. One document runs at a
    time."""

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


@dataclass(frozen=True)
class RefineLoop(Workload):
    """A text is edited several times. Each call reads the text and writes all of it again."""

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
class Rag(Workload):
    """Documents are known `lead_s` before the question about them. The completion time counts from
    the question."""

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
        instruction = text.constant(self.sized(INSTRUCTION), "rag")
        found = text.data(self.sized(self.documents), "documents", number)
        question = program.later("question", self.sized(self.question))
        answer = program.call("answer", [instruction, found, question], self.sized(self.output))
        reading = asyncio.create_task(program.read(answer))
        await asyncio.sleep(self.lead_s)
        program.begin_now()
        await program.set(question, text.data(question.tokens, "question", number))
        await reading
