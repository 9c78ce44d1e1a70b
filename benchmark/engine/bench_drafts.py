"""What drafts bring: tokens of edited files and of new text, with drafts and without, in turns.

    python -m benchmark.engine.edit_pairs PAIRS.json
    python -m benchmark.engine.bench_drafts PAIRS.json --model llama-3.1-8b \\
        --output benchmark/results/drafts_h200.json

With random weights nothing would ever be accepted, so the targets are forced: the model computes
all that it would, and then the token that is chosen is the next one of a given text. `edit`: the
prompt is a file before a commit and the text is the file after it. `new`: the text is another file.
Measured is the time from the last prompt's end to the first output's, while all sequences run.

`refine_loop` and `multi_agent` are the calls of the applications of these names, whole: a text that
is edited eight times, and 16 files that are written, then reviewed and revised three times. The
versions of a file are those of a pair, in turns; designs and reviews are new text. Measured are
seconds.
"""

import argparse
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmark.engine.edit_pairs import EditPair, read_pairs
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.plan import RunnerInfo, SampleSpec, StepPlan, StepResult, sample_specs
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.device import Landing
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.sampling import results
from parrot.engine.runner.step_computer import PlannedStep
from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

ANY_TOKEN = 7
EDITS, REQUEST = 8, 30  # of the loop, and tokens of a request
FILES, REVISIONS, REVIEW, NAME = 16, 3, 150, 20  # of the agents; tokens of a review and of a name


@dataclass
class Targets:
    """What each output is to be, by the seed of its request; `starts`: the lengths of the
    prompts."""

    texts: dict[int, Sequence[int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)

    def token(self, spec: SampleSpec | None) -> int:
        if spec is None or spec.seed not in self.texts:
            return ANY_TOKEN
        text, place = self.texts[spec.seed], spec.position - self.starts[spec.seed]
        return text[place] if place < len(text) else ANY_TOKEN


class ForcedRunner:
    """A plain runner whose choices are replaced."""

    def __init__(self, runner: Any, targets: Targets) -> None:
        self._runner = runner
        self._targets = targets

    @property
    def info(self) -> RunnerInfo:
        info: RunnerInfo = self._runner.info
        return info

    def run(self, plan: StepPlan) -> StepResult:
        self._runner.run(plan)
        specs = [spec for sequence in plan.sequences for spec in sample_specs(sequence)]
        return results(specs, [self._targets.token(spec) for spec in specs])


class ForcingLanding:
    """Replaces a step's tokens where they are, on the device, before they go anywhere."""

    def __init__(self, landing: Landing, tokens: list[int]) -> None:
        self._landing = landing
        self._wanted = torch.tensor(tokens, dtype=torch.int32).pin_memory()

    def receive(self, tokens: torch.Tensor, *rest: Any) -> None:
        tokens.copy_(self._wanted, non_blocking=True)
        self._landing.receive(tokens, *rest)


def force(runner: CudaRunner, targets: Targets) -> None:
    launch = runner.computer.launch

    def forced(step: PlannedStep, landing: Landing) -> Any:
        wanted = [targets.token(spec) for spec in step.inputs.samples]
        return launch(step, ForcingLanding(landing, wanted))  # type: ignore[arg-type]

    runner.computer.launch = forced  # type: ignore[method-assign]


@dataclass(frozen=True)
class Task:
    """`versions`: the text before the edit, and after it."""

    prompt: list[int]
    target: list[int]
    versions: tuple[list[int], list[int]] = ([], [])


def tasks_of(
    pairs: Sequence[EditPair], case: str, count: int, length: int, tokenizer: Tokenizer
) -> list[Task]:
    """Pairs come again where there are too few; targets have at most `length` tokens."""
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


Rounds = list[list[Task]]  # the calls of a round begin when all of the one before have ended


def refine_loop(pairs: Sequence[EditPair], length: int, tokenizer: Tokenizer) -> Rounds:
    edits = tasks_of(pairs, "edit", 1, length, tokenizer)[0]
    version, other = edits.versions
    rounds = []
    for number in range(EDITS):
        request = [200 + number] * REQUEST
        rounds.append([Task([*version, *request], other)])
        version, other = other, version
    return rounds


def multi_agent(pairs: Sequence[EditPair], length: int, tokenizer: Tokenizer) -> Rounds:
    edits = tasks_of(pairs, "edit", FILES, length, tokenizer)
    news = [task.target for task in tasks_of(pairs[::-1], "new", FILES, length, tokenizer)]
    files = [task.versions for task in edits]
    design = news[0]
    names = [[300 + i] * NAME for i in range(FILES)]
    rounds = [[Task([7] * REQUEST, design)]]
    rounds.append(
        [Task([*design, *name], own) for name, (own, _) in zip(names, files, strict=True)]
    )
    for _ in range(REVISIONS):
        code = [token for own, _ in files for token in own]
        reviews = [new[:REVIEW] for new in news]
        rounds.append([Task([*code, *n], r) for n, r in zip(names, reviews, strict=True)])
        rounds.append(
            [
                Task([*code, *review, *name], other)
                for name, review, (_, other) in zip(names, reviews, files, strict=True)
            ]
        )
        files = [(other, own) for own, other in files]
    return rounds


APPLICATIONS = {"refine_loop": refine_loop, "multi_agent": multi_agent}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        is_shape = args.model in KNOWN_SHAPES
        self.config = BuiltinConfig.model_validate(
            {
                "model": args.model,
                "device": args.device,
                "dtype": "bfloat16" if is_shape else "auto",
                "instance": {"load_format": "dummy" if is_shape else "auto", "max_seq_len": 32768},
            }
        )
        runner, tokenizer = load_runner(self.config)
        self.language = Language.of(tokenizer)
        self.targets = Targets()
        self.runner: Any = runner
        if isinstance(runner, CudaRunner):
            runner.warm_up()
            force(runner, self.targets)
        else:
            self.runner = ForcedRunner(runner, self.targets)
        self.tokenizer = _tokenizer(args.tokenizer)
        self.num_requests = 0

    def _core(self, max_draft: int) -> EngineCore:
        limits = self.config.scheduler.model_copy(update={"max_draft_tokens": max_draft})
        config = self.config.model_copy(update={"scheduler": limits})
        return EngineCore(config, self.runner, self.language, MonotonicClock())

    def _submit(self, core: EngineCore, tasks: Sequence[Task]) -> list[list[Any]]:
        """What comes of each."""
        outcomes: list[list[Any]] = [[] for _ in tasks]
        for task, outcome in zip(tasks, outcomes, strict=True):
            self.num_requests += 1
            key = self.num_requests
            self.targets.texts[key] = task.target
            self.targets.starts[key] = len(task.prompt)
            sampling = SamplingConfig(
                temperature=0.0,
                seed=key,
                max_gen_length=len(task.target),
                ignore_tokenizer_eos=True,
            )
            piece = Piece(key, array("i", task.prompt))
            core.requests.submit(
                EngineRequest(key, (piece,), sampling=sampling, stream=True), outcome.append
            )
        return outcomes

    def measured(self, tasks: Sequence[Task], max_draft: int) -> dict[str, float]:
        """One run; times in milliseconds."""
        core = self._core(max_draft)
        first = self.num_requests
        outcomes = self._submit(core, tasks)
        began, num_before, num_steps = 0.0, 0, 0
        while core.has_work and not any(_response(outcome) for outcome in outcomes):
            _step(core)
            num_steps += 1
            if not began and all(outcomes):
                began, num_before, num_steps = time.perf_counter(), _num_tokens(outcomes), 0
        seconds = time.perf_counter() - began
        num_tokens = _num_tokens(outcomes) - num_before
        while core.has_work:
            _step(core)
        usages = [_response(outcome).usage for outcome in outcomes]
        core.requests.free(range(first + 1, self.num_requests + 1))
        return {
            "ms": seconds / num_tokens * len(tasks) * 1e3,
            "step_ms": seconds / num_steps * 1e3,
            "tokens_per_step": num_tokens / num_steps / len(tasks),
            "drafted": sum(usage.drafted_tokens for usage in usages),
            "accepted": sum(usage.accepted_tokens for usage in usages),
            "tokens": sum(usage.output_tokens for usage in usages),
        }

    def _seconds(self, rounds: Rounds, max_draft: int) -> float:
        core = self._core(max_draft)
        began = time.perf_counter()
        for tasks in rounds:
            self._submit(core, tasks)
            while core.has_work:
                _step(core)
        return time.perf_counter() - began

    def application(self, pairs: Sequence[EditPair], name: str) -> dict[str, Any]:
        rounds = APPLICATIONS[name](pairs, self.args.length, self.tokenizer)
        found: dict[int, list[float]] = {0: [], self.args.max_draft: []}
        for _ in range(self.args.repeats):
            for max_draft, runs in found.items():
                runs.append(self._seconds(rounds, max_draft))
        off, on = (median(runs) for runs in found.values())
        num_calls = sum(map(len, rounds))
        return {"case": name, "calls": num_calls, "off_s": off, "on_s": on, "speedup": off / on}

    def row(self, pairs: Sequence[EditPair], case: str, batch: int) -> dict[str, Any]:
        tasks = tasks_of(pairs, case, batch, self.args.length, self.tokenizer)
        found: dict[int, list[dict[str, float]]] = {0: [], self.args.max_draft: []}
        self.measured(tasks, self.args.max_draft)  # warm
        for _ in range(self.args.repeats):
            for max_draft, runs in found.items():
                runs.append(self.measured(tasks, max_draft))
        off, on = [
            {name: median(r[name] for r in runs) for name in runs[0]} for runs in found.values()
        ]
        return {
            "case": case,
            "batch": batch,
            "off_ms": off["ms"],
            "on_ms": on["ms"],
            "speedup": off["ms"] / on["ms"],
            "step_ms": on["step_ms"],
            "tokens_per_step": on["tokens_per_step"],
            "drafted": on["drafted"] / on["tokens"],
            "acceptance": on["accepted"] / on["drafted"] if on["drafted"] else None,
        }


def _tokenizer(path: Path | None) -> Tokenizer:
    if path is not None:
        return Tokenizer.from_file(str(path))
    return Tokenizer.from_str(open_checkpoint("embedded").load_tokenizer().tokenizer_json)


def _step(core: EngineCore) -> None:
    core.wait_until_due()
    core.step()
    for call, argument in core.requests.outbox.take():
        call(argument)


def _num_tokens(outcomes: Sequence[Sequence[Any]]) -> int:
    return sum(len(c.ids) for outcome in outcomes for c in outcome if isinstance(c, StreamChunk))


def _response(outcome: Sequence[Any]) -> Any:
    """The whole response, once it is there."""
    if outcome and not isinstance(outcome[-1], StreamChunk):
        assert isinstance(outcome[-1], GenerateResponse), outcome[-1]
        return outcome[-1]
    return None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pairs", type=Path, help="made by benchmark.engine.edit_pairs")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json; default: the embedded model's"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--cases", nargs="*", choices=["edit", "new"], default=["edit", "new"])
    parser.add_argument(
        "--applications", nargs="*", choices=[*APPLICATIONS], default=[*APPLICATIONS]
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a target, at most")
    parser.add_argument("--max-draft", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)


def measure(args: argparse.Namespace, report: Report) -> None:
    bench = Bench(args)
    pairs = read_pairs(args.pairs)
    report.uses(args.model, bench.config.model_dump(mode="json"))
    report.uses("pairs", args.pairs)
    report["pairs"] = [f"{pair.commit} {pair.path}" for pair in pairs]
    for case in args.cases:
        for batch in args.batches:
            report.add("rows", bench.row(pairs, case, batch))
    for name in args.applications:
        report.add("applications", bench.application(pairs, name))


if __name__ == "__main__":
    run(__name__)
