"""The gain of drafts: tokens of edited files and of new text, with and without drafts, in turns.

    python -m benchmark.engine.drafting.edit_pairs PAIRS.json
    python -m benchmark.engine.bench_drafts PAIRS.json --model llama-3.1-8b \\
        --output benchmark/results/drafts_h200.json

With random weights no draft would ever be accepted, so outputs are forced: the model computes its
usual work, and then the next token of a given text is chosen. In `edit` the prompt is a file before
a commit, and the text is the file after the commit. In `new` the text is another file. The measured
time starts when all outputs have begun and ends when the first output ends. Every second pair of
runs begins with the run with drafts.

`refine_loop` and `multi_agent` are all calls of these applications: a text that is edited eight
times, and 16 files that are written, then reviewed and revised three times. The versions of a file
alternate between the two texts of a pair. Designs and reviews are new text. The figures are seconds
of all calls and of the revising calls.

`--simulate` predicts all figures in virtual time, without a GPU (drafting/device.py). The engine's
own code decides when to draft, and steps take their measured times.
"""

import argparse
import gc
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmark.engine.drafting.device import SimulatedDevice
from benchmark.engine.drafting.edit_pairs import EditPair, read_pairs
from benchmark.engine.drafting.texts import APPLICATIONS, Round, Targets, Task, tasks_of
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import RunnerInfo, SampleSpec, StepPlan, StepResult
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tokenizers import word_tokenizer
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.staging import Landing
from parrot.engine.runner.step_computer import PlannedStep
from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import Clock, MonotonicClock


class ForcedRunner:
    """A plain runner whose chosen tokens are replaced."""

    def __init__(self, runner: Any, targets: Targets) -> None:
        self._runner = runner
        self._targets = targets

    @property
    def info(self) -> RunnerInfo:
        info: RunnerInfo = self._runner.info
        return info

    def run(self, plan: StepPlan) -> StepResult:
        self._runner.run(plan)
        return self._targets.result(plan)


class ForcingLanding:
    """Replaces a step's tokens on the device before any other use. This happens after the launch of
    the model's kernels, so that the device does not wait."""

    def __init__(
        self, landing: Landing, targets: Targets, specs: Sequence[SampleSpec | None]
    ) -> None:
        self._landing = landing
        self._targets = targets
        self._specs = specs

    def receive(self, tokens: torch.Tensor, *rest: Any) -> None:
        wanted = [self._targets.token(spec) for spec in self._specs]
        pinned = torch.tensor(wanted, dtype=torch.int32).pin_memory()
        tokens.copy_(pinned, non_blocking=True)
        self._landing.receive(tokens, *rest)


def force(runner: CudaRunner, targets: Targets) -> None:
    launch = runner.computer.launch

    def forced(step: PlannedStep, landing: Landing) -> Any:
        forcing = ForcingLanding(landing, targets, step.inputs.samples)
        return launch(step, forcing)  # type: ignore[arg-type]

    runner.computer.launch = forced  # type: ignore[method-assign]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.targets = Targets()
        self.tokenizer = _tokenizer(args.tokenizer)
        self.num_requests = 0
        self.clock: Clock = MonotonicClock()
        if args.simulate:
            self.config = BuiltinConfig(model=args.model)
            self.runner: Any = SimulatedDevice(self.targets)
            self.clock = self.runner.clock
            self.language = Language.of(word_tokenizer(self.tokenizer.get_vocab_size()))
        else:
            self._load()

    def _load(self) -> None:
        args = self.args
        is_shape = args.model in KNOWN_SHAPES
        self.config = BuiltinConfig.model_validate(
            {
                "model": args.model,
                "device": args.device,
                "dtype": "bfloat16" if is_shape else "auto",
                "instance": {"load_format": "dummy" if is_shape else "auto", "max_seq_len": 32768},
            }
        )
        runner, tokenizer, _ = load_runner(self.config)
        self.language = Language.of(tokenizer)
        self.runner = runner
        gc.collect()
        gc.freeze()  # As in an engine.
        if isinstance(runner, CudaRunner):
            runner.warm_up()
            force(runner, self.targets)
        else:
            self.runner = ForcedRunner(runner, self.targets)

    def _core(self, max_draft: int) -> EngineCore:
        limits = self.config.scheduler.model_copy(update={"max_draft_tokens": max_draft})
        config = self.config.model_copy(update={"scheduler": limits})
        return EngineCore(config, self.runner, self.language, self.clock)

    def _submit(
        self, core: EngineCore, tasks: Sequence[Task], *, are_filled: bool = False
    ) -> list[list[Any]]:
        """The results by task. `are_filled`: the KV of each prompt, except its last token, is
        computed before any output begins."""
        if are_filled:
            for key, task in enumerate(tasks, self.num_requests + 1):
                fill = EngineRequest(-key, (Piece(key, array("i", task.prompt[:-1])),))
                core.requests.submit(fill, lambda _: None)
            while core.has_work:
                _step(core)
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
            prompt = task.prompt[-1:] if are_filled else task.prompt
            piece = Piece(key, array("i", prompt))
            core.requests.submit(
                EngineRequest(key, (piece,), sampling=sampling, stream=True), outcome.append
            )
        return outcomes

    def measured(self, tasks: Sequence[Task], max_draft: int) -> dict[str, float]:
        """The figures of one run, with times in milliseconds."""
        core = self._core(max_draft)
        first = self.num_requests
        outcomes = self._submit(core, tasks, are_filled=True)
        while not all(outcomes):
            _step(core)
        num_steps, began, num_before = 0, self.clock.now(), _num_tokens(outcomes)
        while not any(_response(outcome) for outcome in outcomes):
            _step(core)
            num_steps += 1
        seconds = self.clock.now() - began
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

    def _seconds(self, rounds: Sequence[Round], max_draft: int) -> dict[str, float]:
        """The seconds of each kind of round."""
        core = self._core(max_draft)
        seconds = dict.fromkeys([name for name, _ in rounds], 0.0)
        for name, tasks in rounds:
            began = self.clock.now()
            self._submit(core, tasks)
            while core.has_work:
                _step(core)
            seconds[name] += self.clock.now() - began
        return seconds

    def _turns(self) -> list[int]:
        """The maximum draft length of each run."""
        pair = [0, self.args.max_draft]
        return [n for number in range(self.args.repeats) for n in pair[:: 1 - number % 2 * 2]]

    def application(self, pairs: Sequence[EditPair], name: str) -> dict[str, Any]:
        rounds = APPLICATIONS[name](pairs, self.args.length, self.tokenizer)
        found: dict[int, list[dict[str, float]]] = {0: [], self.args.max_draft: []}
        for max_draft in self._turns():
            found[max_draft].append(self._seconds(rounds, max_draft))
        off, on = (median(sum(run.values()) for run in runs) for runs in found.values())
        revising = [median(run["revise"] for run in runs) for runs in found.values()]
        return {
            "case": name,
            "calls": sum(len(tasks) for _, tasks in rounds),
            "off_s": off,
            "on_s": on,
            "speedup": off / on,
            "revise_off_s": revising[0],
            "revise_on_s": revising[1],
            "revise_speedup": revising[0] / revising[1],
        }

    def row(self, pairs: Sequence[EditPair], case: str, batch: int) -> dict[str, Any]:
        tasks = tasks_of(pairs, case, batch, self.args.length, self.tokenizer)
        found: dict[int, list[dict[str, float]]] = {0: [], self.args.max_draft: []}
        self.measured(tasks, self.args.max_draft)  # Warm up.
        for max_draft in self._turns():
            found[max_draft].append(self.measured(tasks, max_draft))
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
            "off_runs_ms": [run["ms"] for run in found[0]],
            "on_runs_ms": [run["ms"] for run in found[self.args.max_draft]],
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
    """The whole response, after it has finished."""
    if outcome and not isinstance(outcome[-1], StreamChunk):
        assert isinstance(outcome[-1], GenerateResponse), outcome[-1]
        return outcome[-1]
    return None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pairs", type=Path, help="a file from benchmark.engine.drafting.edit_pairs")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json; default: the embedded model's"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--simulate", action="store_true", help="simulate in virtual time, without a GPU"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--cases", nargs="*", choices=["edit", "new"], default=["edit", "new"])
    parser.add_argument(
        "--applications", nargs="*", choices=[*APPLICATIONS], default=[*APPLICATIONS]
    )
    parser.add_argument("--length", type=int, default=512, help="the maximum tokens of a target")
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
