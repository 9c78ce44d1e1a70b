"""Engine cores with a tiny float32 model, whose steps and copies fail as a trace prescribes."""

import asyncio
import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import (
    PENDING,
    Landed,
    LaunchedStep,
    RunnerInfo,
    SequenceStep,
    StepPlan,
    StepResult,
    Transfer,
)
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.grammar.constraint import Constraint
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import SamplingConfig
from tests.fuzz.traces import Setup
from tests.support.tiny_model import make_tiny_model

EAGER_GATE = GateConfig(
    memory_rate=1.0, l2_bytes=0, row_tile=1 << 30, partial_rate=1e30, launch_s=0.0
)
"""Shares every prefix that it can."""


@dataclass
class VirtualClock:
    """A clock that only steps advance."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("an engine core never sleeps")


@cache
def model() -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(str(make_tiny_model(Path(folder) / "tiny")))
        return load_decoder(checkpoint, torch.float32, torch.device("cpu"))


@cache
def language() -> Language:
    """Return the tokenizer without grammars, since requests to a core contain their constraints."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(str(make_tiny_model(Path(folder) / "tiny")))
        return Language.of(checkpoint.load_tokenizer())


def grammars() -> GrammarCompiler:
    found = GrammarCompiler.of(language().response, model().spec.vocab_size)
    assert found is not None
    return found


@cache
def _compiler() -> tuple[GrammarCompiler, asyncio.AbstractEventLoop]:
    """Return a compiler with its own event loop, since the caller may run in another one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grammars", daemon=True).start()
    return grammars(), loop


def constraint(sampling: SamplingConfig) -> Constraint | None:
    if sampling.constraint is None:
        return None
    compiler, loop = _compiler()
    return asyncio.run_coroutine_threadsafe(compiler.constraint(sampling), loop).result()


class PoisonedStep(Exception):
    pass


class FuzzedRunner:
    """A `ModelRunner` with the interface of a GPU runner. A launched step runs at once, but its
    tokens are available only after `wait`."""

    def __init__(self, setup: Setup, clock: VirtualClock) -> None:
        self._runner = ModelRunner(
            model(),
            setup.num_blocks,
            setup.block_size,
            CpuOptions(
                max_rows=max(setup.max_batch, 16),
                max_seq_len=setup.max_seq_len,
                gate=EAGER_GATE if setup.shares_prefix else None,
                num_host_blocks=setup.num_host_blocks,
            ),
        )
        self._setup = setup
        self._clock = clock
        self._rng = random.Random(setup.seed)
        self._reports: list[Landed] = []
        self.breaks_next = False
        self.num_loaded = 0
        self.num_launched = 0

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.seconds += 2e-2 + 2e-5 * plan.num_tokens
        if self.breaks_next:
            self.breaks_next = False
            self._spoil(plan)
            raise RuntimeError("this step must fail")
        if any(self._setup.poison in sequence.token_ids for sequence in plan.sequences):
            self._spoil(plan)
            raise PoisonedStep
        return self._runner.run(plan)

    def _spoil(self, plan: StepPlan) -> None:
        """Write wrong KV to the slots of the failed step."""
        wrong = [s._replace(token_ids=[0] * len(s.token_ids), sample=None) for s in plan.sequences]
        self._runner.run(StepPlan(tuple(s._replace(read=None) for s in wrong), plan.copies))

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> "Launched | None":
        if not self._setup.launches:
            return None
        assert previous is None or isinstance(previous, Launched)
        known = tuple(_with_token(sequence, previous) for sequence in plan.sequences)
        if any(sequence is None for sequence in known):
            raise RuntimeError("the previous step has failed")
        self.num_launched += 1
        sequences = tuple(sequence for sequence in known if sequence is not None)
        try:
            return Launched(plan, self.run(StepPlan(sequences, plan.copies)))
        except RuntimeError as error:
            return Launched(plan, error)
        except PoisonedStep as error:
            return Launched(plan, error)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        self.num_loaded += sum(not transfer.to_host for transfer in transfers)
        self._runner.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        for report in self._runner.landed(wait=False):
            fails = self._setup.reports_late and self._rng.random() < 0.1
            self._reports.append(Landed(report.transfer_id, not fails, 1e-6))
        count = len(self._reports)
        if self._setup.reports_late:
            count = max(self._rng.randint(0, 4), int(wait))
        over, self._reports = self._reports[:count], self._reports[count:]
        return over


@dataclass(slots=True, eq=False)
class Launched:
    plan: StepPlan
    result: StepResult | Exception

    def wait_until_due(self) -> None:
        """Return at once: the step has already run."""

    def wait(self) -> StepResult:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def token(self, context_id: int) -> int | None:
        """Return the sampled token of a context, or None if the step has failed."""
        if isinstance(self.result, Exception):
            return None
        for sequence in self.plan.sequences:
            if sequence.context_id == context_id and sequence.sample is not None:
                return self.result.tokens.get(sequence.sample.job_id, 0)
        raise AssertionError(f"no token was sampled for context {context_id}")


def _with_token(sequence: SequenceStep, previous: Launched | None) -> SequenceStep | None:
    """Return the sequence with the token of the previous step, or None if that step has failed.
    Lists are copied, because the core appends to its own later."""
    ids, spec = list(sequence.token_ids), sequence.sample
    output = [] if spec is None else list(spec.output_ids)
    context = [] if spec is None else list(spec.context_ids)
    if PENDING in ids:
        assert ids.index(PENDING) == len(ids) - 1, ids
        assert previous is not None, f"context {sequence.context_id} waits for no step"
        token = previous.token(sequence.context_id)
        if token is None:
            return None
        ids[-1] = token
        output.append(token)
        context.append(token)
        if spec is not None and spec.constraint is not None:
            spec = _with_constraint(spec, output)
    if spec is not None:
        spec = spec._replace(output_ids=output, context_ids=context)
    return sequence._replace(token_ids=ids, sample=spec)


def _with_constraint(spec: Any, output: list[int]) -> Any:
    """Return the spec without its constraint if the output has ended."""
    try:
        masked = spec.constraint.is_masked(len(output), output[-1])
    except InvalidRequest:
        masked = False
    return spec if masked else spec._replace(constraint=None)


def make_config(setup: Setup) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": "tiny",
            "fill_chunk_size": setup.chunk,
            "random_seed": setup.seed,
            "scheduler": {
                "max_batch_size": setup.max_batch,
                "max_num_batched_tokens": setup.max_batched,
                "max_total_tokens": setup.max_total,
                "mixed_fill_tokens": setup.mixed_fill,
                "policy": setup.policy,
                "prefix_caching": setup.prefix_caching,
                "max_draft_tokens": setup.max_draft,
            },
        }
    )


def make_core(setup: Setup, speech: Language | None = None) -> tuple[EngineCore, FuzzedRunner]:
    clock = VirtualClock()
    runner = FuzzedRunner(setup, clock)
    return EngineCore(make_config(setup), runner, speech or language(), clock), runner


def calm(setup: Setup, chunk: int | None = None) -> Setup:
    """Return a setup with the same limits, but without optional features."""
    plain = Setup(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_seq_len=setup.max_seq_len,
        chunk=chunk,
        prefix_caching=False,
        shares_prefix=False,
        seed=setup.seed,
    )
    return replace(plain, max_batched=256)
