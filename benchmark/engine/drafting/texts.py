"""The outputs that the benchmark of drafts forces: files after an edit, new text, and the calls of
applications."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmark.engine.drafting.edit_pairs import EditPair
from parrot.engine.core.steps import SampleSpec, StepPlan, StepResult, sample_specs
from parrot.engine.runner.sampling import results

ANY_TOKEN = 7
EDITS, REQUEST = 8, 30  # Edits in the loop, and tokens of a request.
FILES, REVISIONS, REVIEW, NAME = 16, 3, 150, 20  # Tokens for REVIEW and NAME.


@dataclass
class Targets:
    """The target of each output, by the seed of its request. `starts`: the lengths of the
    prompts."""

    texts: dict[int, Sequence[int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)

    def token(self, spec: SampleSpec | None) -> int:
        if spec is None or spec.seed not in self.texts:
            return ANY_TOKEN
        text, place = self.texts[spec.seed], spec.position - self.starts[spec.seed]
        return text[place] if place < len(text) else ANY_TOKEN

    def result(self, plan: StepPlan) -> StepResult:
        specs = [spec for sequence in plan.sequences for spec in sample_specs(sequence)]
        return results(specs, [self.token(s) for s in specs]) if specs else StepResult({}, {})


@dataclass(frozen=True)
class Task:
    """`versions`: the text before the edit, and after it."""

    prompt: list[int]
    target: list[int]
    versions: tuple[list[int], list[int]] = ([], [])


def tasks_of(
    pairs: Sequence[EditPair], case: str, count: int, length: int, tokenizer: Tokenizer
) -> list[Task]:
    """Tasks of these pairs. Pairs repeat if there are too few. Targets have at most `length`
    tokens."""
    tasks = []
    for i in range(count):
        pair = pairs[i % len(pairs)]
        after = pair.after
        if case == "new":
            others = [other for other in pairs if other.path != pair.path]
            after = others[(i * 7) % len(others)].after
        prompt = f"{pair.subject}\n\nThe file {pair.path}:\n{pair.before}\nThe new file {i}:\n"
        ids = tokenizer.encode(after).ids[:length]
        before = tokenizer.encode(pair.before).ids[:length]
        tasks.append(Task(tokenizer.encode(prompt).ids, ids, (before, ids)))
    return tasks


class Round(NamedTuple):
    """Calls that begin after all calls of the previous round have ended."""

    name: str
    tasks: list[Task]


def refine_loop(pairs: Sequence[EditPair], length: int, tokenizer: Tokenizer) -> list[Round]:
    edits = tasks_of(pairs, "edit", 1, length, tokenizer)[0]
    version, other = edits.versions
    rounds = []
    for number in range(EDITS):
        request = [200 + number] * REQUEST
        rounds.append(Round("revise", [Task([*version, *request], other)]))
        version, other = other, version
    return rounds


def multi_agent(pairs: Sequence[EditPair], length: int, tokenizer: Tokenizer) -> list[Round]:
    edits = tasks_of(pairs, "edit", FILES, length, tokenizer)
    news = [task.target for task in tasks_of(pairs[::-1], "new", FILES, length, tokenizer)]
    files = [task.versions for task in edits]
    design = news[0]
    names = [[300 + i] * NAME for i in range(FILES)]
    written = [Task([*design, *name], own) for name, (own, _) in zip(names, files, strict=True)]
    rounds = [Round("design", [Task([7] * REQUEST, design)]), Round("write", written)]
    for _ in range(REVISIONS):
        code = [token for own, _ in files for token in own]
        reviews = [new[:REVIEW] for new in news]
        reviewed = [Task([*code, *n], r) for n, r in zip(names, reviews, strict=True)]
        revised = [
            Task([*code, *review, *name], other)
            for name, review, (_, other) in zip(names, reviews, files, strict=True)
        ]
        rounds += [Round("review", reviewed), Round("revise", revised)]
        files = [(other, own) for own, other in files]
    return rounds


APPLICATIONS = {"refine_loop": refine_loop, "multi_agent": multi_agent}
