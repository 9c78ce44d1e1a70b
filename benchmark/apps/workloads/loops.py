"""Applications that the original evaluation lacks: loops, candidates, late inputs, pauses."""

import asyncio
import random
from dataclasses import dataclass, replace
from typing import ClassVar

from parrot.cli.bench.plan import Plan, Workload, numbered
from parrot.cli.bench.program import Output, Piece, Program, TextSource


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
        assert isinstance(current, Output)
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
