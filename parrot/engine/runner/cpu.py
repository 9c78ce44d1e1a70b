"""Runs the steps of the builtin engine in plain torch: a plan in, sampled tokens out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import WHOLE_SPANS, TorchAttention
from parrot.engine.attention.work_list import StepRows, WorkList
from parrot.engine.attention.work_planner import WorkPlanner
from parrot.engine.core.plan import (
    Landed,
    RunnerInfo,
    StepPlan,
    StepResult,
    Transfer,
)
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.device import Reads, noticing_loss
from parrot.engine.runner.inputs import InputBuilder, StepInputs
from parrot.engine.runner.kv_cache import KVCache, KVLayout, runner_info
from parrot.engine.runner.ranks import RankCopies, RankStep, Unit, together
from parrot.engine.runner.sampling import needs_logits, results, sample
from parrot.engine.runner.threads import StepThreads

_DRAFT_SIZES = (2, 4, 8, 16, 32, 64, 128)


class Layers(Protocol):
    """Computes a decoder's layers for a step in another way than torch's operators do."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: IntArray,
        step: StepRows,
        work: WorkList,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the last layer's output for `rows`, or for all."""


MakeLayers = Callable[[Decoder, PooledKV, TorchAttention], Layers]


class ModelRunner:
    """`TieredRunner` over a decoder and its KV pool.

    `max_rows`: sequences in a step. `gate` None: read no prefix once for several sequences.
    `quantised`: keep KV in e4m3. `max_threads`: adapt the number of threads, up to so many, to what
    else runs on the machine; None: leave it as it is. `make_layers`: for layers that torch's
    operators shall not compute."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_seq_len: int | None = None,
        *,
        max_rows: int = 256,
        gate: GateConfig | None = None,
        quantised: bool = False,
        num_host_blocks: int = 0,
        max_threads: int | None = None,
        unit: Unit | None = None,
        make_layers: MakeLayers | None = None,
    ) -> None:
        spec = model.spec
        layout = KVLayout.of(spec, block_size, model.dtype, quantised=quantised)
        self._model = model
        self._cache = KVCache(layout, num_blocks, model.device)
        self._copies = RankCopies(self._cache.host_copies(num_host_blocks), unit)
        self._info = runner_info(
            model, self._cache, num_blocks, max_seq_len, num_host_blocks, draft_sizes=_DRAFT_SIZES
        )
        self._attention = TorchAttention(self._cache.pooled, spec.num_heads)
        max_blocks = -(-self._info.max_seq_len // block_size)
        self._inputs = InputBuilder(2 * max_rows, max_blocks, block_size)
        self._threads = None if max_threads is None else StepThreads(max_threads)
        self._layers: Layers | None = None
        if make_layers is not None:
            self._layers = make_layers(model, self._cache.pooled, self._attention)
        self.planner = WorkPlanner(self._attention.shape, gate, WHOLE_SPANS)
        self._unit = unit

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def when_lost(self, tell: Callable[[], None]) -> None:
        if self._unit is not None:
            self._unit.when_lost(tell)

    def close(self) -> None:
        if self._unit is not None:
            self._unit.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        with noticing_loss(self._model.device):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        inputs = self._inputs.build(plan)
        work = self.planner.plan(inputs.versions, inputs.step) if inputs.num_tokens else None
        needs_all = self._unit is None or needs_logits(inputs.samples)
        step = RankStep(plan.copies, inputs, work, Reads.of(plan.sequences), needs_all)
        if self._threads is None or work is None:
            return self._sampled(step)
        with self._threads.step(inputs.num_tokens):
            return self._sampled(step)

    def _sampled(self, step: RankStep) -> StepResult:
        with together(self._unit):
            if self._unit is not None:
                self._unit.tell(step)
            found = self._compute(step)
        read = {} if step.reads is None else step.reads.landed()
        if found is None:
            return StepResult({}, {}, read=read)
        specs = [spec for spec in step.inputs.samples if spec is not None]
        chosen = sample(found, specs) if step.needs_logits else results(specs, found.tolist())
        return replace(chosen, read=read)

    @torch.inference_mode()
    def compute(self, step: RankStep) -> None:
        """Do what the ranks besides rank 0 do for a step."""
        self._copies.follow(step.transfers)
        self._compute(step)

    def _compute(self, step: RankStep) -> torch.Tensor | None:
        """Do what every rank does for a step; returns the logits of the rows that are sampled,
        float32 [rows, vocab], if any are; or the tokens of the largest [rows], if the step needs no
        more. `step.reads` get what they want."""
        inputs, reads = step.inputs, step.reads
        self._cache.prepare(step.copies, inputs.step.fresh_pages(self._info.block_size))
        if step.work is None:
            return None
        asked = [row for row, spec in enumerate(inputs.samples) if spec is not None]
        logit_rows = self._tensor(inputs.logit_rows[asked])
        needs_all = reads is not None or len(asked) == inputs.num_tokens
        hidden = self._forward(inputs, step.work, None if needs_all else logit_rows)
        if reads is not None:
            reads.take(self._model.final(hidden), self._model.head)
            hidden = hidden.index_select(0, logit_rows)
        if not asked:
            return None
        return self._model.logits(hidden) if step.needs_logits else self._model.best(hidden)

    def _forward(
        self, inputs: StepInputs, work: WorkList, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The last layer's output for `rows`, or for all."""
        token_ids = self._tensor(inputs.token_ids)
        if self._layers is not None:
            return self._layers.forward(token_ids, inputs.positions, inputs.step, work, rows)
        attend = partial(self._attention.run, plan=self._attention.plan(work, inputs.step))
        return self._model.forward(token_ids, self._tensor(inputs.positions), attend, rows)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        self._copies.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        return self._copies.landed(wait=wait)

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).long().to(self._model.device)
