"""Workloads of agents: a team, candidates for an answer, pauses for tools."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parrot.cli.bench.documents import INSTRUCTION
from parrot.cli.bench.plan import BenchJob, Plan, Workload, numbered
from parrot.cli.bench.program import Piece, Program, ProgramOutput
from parrot.cli.bench.text import TextSource

DATA = Path(__file__).parent / "multi_agent_rounds.json"
QUERY = 20  # tokens at the end of a prompt that name its file

Tokens = dict[str, int]  # "prompt_tokens" and "completion_tokens" of a recorded call


@dataclass(frozen=True, slots=True)
class Round:
    """The recorded lengths of one round, in tokens. `constant`: instructions, the same for all
    files. `outputs`: one for each file."""

    constant: int
    outputs: Sequence[int]


def rounds() -> list[Round]:
    """Round 0 is the architect, 1 the coders, then reviewers and revisers alternate. The constant
    part is the recorded prompt without the outputs of earlier rounds that it contains."""
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
    """A team writes a program. A prompt is the role's instructions, the whole code base (for
    coders, the design), for a reviser the file's review, and the file's name. With more than 8
    files the 8 recorded ones repeat."""

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


@dataclass(frozen=True)
class FanoutCold(Workload):
    """Siblings of one application share a long prefix that no engine has computed."""

    siblings: int = 32
    prefix: int = 8192
    query: int = 50
    output: int = 100

    def plan(self, text: TextSource, seed: int) -> Plan:
        return Plan([BenchJob("fanout", partial(self.run, text=text))])

    async def run(self, program: Program, text: TextSource) -> None:
        prefix = text.data(self.sized(self.prefix), "prefix")
        queries = [text.data(self.sized(self.query), "query", i) for i in range(self.siblings)]
        length = self.sized(self.output)
        await program.read(*(program.call("sibling", [prefix, own], length) for own in queries))


@dataclass(frozen=True)
class BestOfN(Workload):
    """Candidates for one question, each sampled with its own seed. The first `winners` that end are
    judged, and the others are cancelled."""

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
        judge = text.constant(self.sized(INSTRUCTION), "judge")
        await program.read(program.call("judge", [judge, *best], self.sized(self.verdict)))


@dataclass(frozen=True)
class ToolPause(Workload):
    """Chats whose turns wait for a tool or a person, `shortest_s` to `longest_s` each. A ServeCore
    receives all turns at the start. The completion time does not include the pauses."""

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
        system = text.constant(self.sized(INSTRUCTION), "tools")
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
