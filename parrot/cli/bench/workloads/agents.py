"""A team of agents that writes a program: an architect, coders, and rounds of review."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from parrot.cli.bench.plan import Plan, Workload, numbered
from parrot.cli.bench.program import Output, Piece, Program
from parrot.cli.bench.text import TextSource

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
        shared: Sequence[Output],
        own: Sequence[Output] | None,
        *,
        read: bool = False,
    ) -> list[Output]:
        instruction = text.constant(self.sized(counts.constant), role, counts.constant)
        outputs = []
        for file in range(self.files):
            mine = [] if own is None else [own[file]]
            query = text.data(self.sized(QUERY), "file", file)
            tokens = self.sized(counts.outputs[file % len(counts.outputs)])
            prompt: list[Piece] = [instruction, *shared, *mine, query]
            outputs.append(program.call(role, prompt, tokens, streamed=read))
        return outputs
