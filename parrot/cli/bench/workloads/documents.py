"""Summaries of long documents: step by step, or by map and reduce."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from parrot.cli.bench.plan import Plan, Workload, numbered
from parrot.cli.bench.program import Output, Piece, Program
from parrot.cli.bench.text import Text, TextSource

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
        summary: Output | None = None
        chunks = text.document(number, self.sized(self.document_tokens), self.sized(self.chunk))
        for step, chunk in enumerate(chunks, 1):
            prompt = [instruction, *self._order(summary, chunk)]
            summary = program.call(
                "refine_summary", prompt, self.sized(self.output), streamed=step == len(chunks)
            )
        assert summary is not None
        await program.read(summary)

    def _order(self, summary: Output | None, chunk: Text) -> list[Piece]:
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
