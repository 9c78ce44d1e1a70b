"""Runs the steps of the builtin engine with the Triton kernels."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.work_list import WorkPlanner
from parrot.engine.core.steps import (
    Landed,
    LaunchedStep,
    RunnerInfo,
    StepPlan,
    StepResult,
    Transfer,
)
from parrot.engine.kernels.launch import E4M3_RATE, MATRIX_RATE
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.forward import make_forward
from parrot.engine.models.fp8 import Fp8Linear
from parrot.engine.models.tensors import num_layer_weights
from parrot.engine.runner.device import StepReads, detect_device_loss
from parrot.engine.runner.graphs import (
    LAUNCH_S,
    GraphCapacities,
    StepSize,
    bucket_list,
    limited,
    mixed_sizes,
)
from parrot.engine.runner.host.copies import HostCopies
from parrot.engine.runner.inputs import NO_DRAWS, DrawBuilder, InputBuilder, Scored, StepInputs
from parrot.engine.runner.kv_cache import KVCache, KVLayout, runner_info
from parrot.engine.runner.ranks import RankCopies, RankStep, Unit, together
from parrot.engine.runner.sampling import needs_logits, results
from parrot.engine.runner.staging import Landing, Mark
from parrot.engine.runner.step_computer import (
    PlannedStep,
    Report,
    Sources,
    StepComputer,
    SyntheticPlans,
    WatchedAttention,
)
from parrot.protocol.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class CudaOptions:
    max_rows: int = 256  # Sequences in a step.
    max_tokens: int = 2048  # Tokens in a step.
    max_seq_len: int | None = None
    # None: never read a shared prefix once for several sequences.
    gate: GateConfig | None = field(default_factory=GateConfig)
    use_graphs: bool = True
    overlap: bool = True  # Launch a step while the previous step runs.
    upcast: bool = False  # Compute attention in float32.
    quantised: bool = False  # Store KV in e4m3.
    num_host_blocks: int = 0  # Blocks in the host tier.
    num_slots: int = 0  # Window slots; 0: blocks have the KV of all layers.
    num_host_slots: int = 0  # Window slots in the host tier.


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is launched or in the launcher thread."""

    inputs: StepInputs
    scored: Scored
    # One token per sample, on the device. Resolved once all kernels are launched. The tensor is
    # valid until the next step has run.
    tokens: "Future[torch.Tensor]"
    landing: Landing
    due: Mark  # Passed when the next step should be planned. Valid until the next launch.
    device: torch.device
    reads: StepReads | None
    unit: Unit | None

    def wait_until_due(self) -> None:
        with together(self.unit):
            wait((self.tokens,))
            self.due.wait()

    def wait(self) -> StepResult:
        with detect_device_loss(self.device), together(self.unit):
            tokens = self.landing.wait(len(self.tokens.result()))
        result = self._chosen(tokens)
        return result if self.reads is None else replace(result, read=self.reads.landed())

    def _chosen(self, tokens: Sequence[int]) -> StepResult:
        samples = self.inputs.samples
        specs = [spec for spec in samples if spec is not None]
        if not specs:
            return StepResult({}, {})
        if len(specs) < len(samples):
            tokens = [t for t, spec in zip(tokens, samples, strict=True) if spec is not None]
        rows, num_top = self.scored
        if not len(rows):
            return results(specs, tokens)
        wanted = [spec for row in rows.tolist() if (spec := samples[row]) is not None]
        return results(specs, tokens, wanted, self.landing.scores(len(rows), num_top))

    def landed(self) -> dict[int, int]:
        """Wait for the step. The token of each context; -1 if its logits are not finite."""
        tokens = self.landing.wait(len(self.tokens.result()))
        return dict(zip(self.inputs.sampled, tokens, strict=True))

    def tokens_of(self, context_ids: Sequence[int]) -> Sources:
        row_of = {context_id: row for row, context_id in enumerate(self.inputs.sampled)}
        return self.tokens.result(), np.array([row_of[c] for c in context_ids], dtype=np.int32)


class CudaRunner:
    """`OverlappingRunner` and `TieredRunner` over a decoder and a paged KV pool.

    Steps run in launch order on one stream."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        options: CudaOptions | None = None,
        unit: Unit | None = None,
    ) -> None:
        """`unit`: the other ranks, on rank 0 of several."""
        options = options or CudaOptions()
        spec, device = model.spec, model.device
        self._cache = _make_cache(model, num_blocks, block_size, options)
        self._copies = _make_copies(self._cache, options, unit)
        token_s = _layer_token_s(model)
        least_tokens, most_tokens = (int(launch_s / token_s) for launch_s in LAUNCH_S)
        most = mixed_sizes(options.max_rows, min(options.max_tokens, most_tokens))
        least = limited(most, least_tokens)
        self._info = runner_info(
            model,
            self._cache,
            num_blocks,
            options.max_seq_len,
            options.num_host_blocks,
            draft_sizes=[size.rows for size in least if size.rows <= options.max_rows],
            num_slots=options.num_slots,
            num_host_slots=options.num_host_slots,
        )
        max_seq_len, max_rows = self._info.max_seq_len, 2 * options.max_rows
        self._device = device
        self._unit = unit
        self._overlap = options.overlap
        self._inputs = InputBuilder(max_rows, -(-max_seq_len // block_size), block_size)
        self._draws = DrawBuilder(max_rows)
        self._attention = WatchedAttention(
            self._cache.pooled_layers(),
            spec.attention.num_heads,
            1,
            rules=spec.rules,
            upcast=options.upcast,
            token_s=token_s,
        )
        shape, split = self._attention.shape, self._attention.split_config()
        self.planner = WorkPlanner(shape, options.gate, split)
        self.computer = StepComputer(
            make_forward(model, max_seq_len),
            self._attention,
            SyntheticPlans(shape, options.gate, split, options.max_tokens, max_seq_len),
            (max_rows, self._inputs.width),
            options.max_tokens,
            self._cache.num_blocks if options.num_slots else 0,
        )
        if options.use_graphs:
            # All ranks must have the same graphs, so their launches are not timed.
            is_alone = model.vocabulary is None
            mixed = most if is_alone else least
            sizes = [*(StepSize(rows) for rows in bucket_list(options.max_rows)), *mixed]
            self.computer.use_graphs(GraphCapacities(shape, split), sizes, is_alone=is_alone)
        self._landings = [Landing(options.max_rows, device) for _ in range(2)]
        self._launching: Future[torch.Tensor] = Future()
        self._launching.set_result(torch.empty(0))

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def on_lost(self, tell: Callable[[], None]) -> None:
        if self._unit is not None:
            self._unit.on_lost(tell)

    def close(self) -> None:
        self.computer.close()  # First: aborting NCCL waits until its graphs are gone.
        if self._unit is not None:
            self._unit.close()

    def warm_up(self, report: Report = lambda _: None) -> None:
        """Compile all kernels and capture the usual graphs before the first request."""
        try:
            self.computer.warm_up(report)
        except BaseException:
            self.computer.close()  # Aborting NCCL would wait for its graphs.
            raise
        if self._copies is not None:
            report("trying copies to the host")
            self._copies.warm_up(self._cache.num_blocks - 1)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        assert self._copies is not None, "there is no host tier"
        with together(self._unit):
            wait((self._launching,))
            self._copies.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        assert self._copies is not None, "there is no host tier"
        return self._copies.landed(wait=wait)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it.

        Raises `OutOfMemory` if the GPU has too little memory for the step. Later steps may
        succeed."""
        try:
            with detect_device_loss(self._device), together(self._unit):
                if plan.num_tokens:
                    return self._launch(plan, None).wait()
                if self._copies is not None:
                    self._copies.guard(plan)
                inputs = self._inputs.build(plan)
                changes = plan.slot_changes
                self._send(RankStep(plan.copies, inputs, None, None, False, slot_changes=changes))
                self._cache.prepare(plan.copies)
                self.computer.change_slots(changes)
                return StepResult({}, {})
        except torch.OutOfMemoryError:
            self._forget()
            torch.cuda.empty_cache()
            raise OutOfMemory("the device has not enough memory for this step") from None
        except BaseException:
            self._forget()
            raise

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> Launched | None:
        if not self._overlap:
            return None
        try:
            with detect_device_loss(self._device), together(self._unit):
                return self._launch(plan, previous)
        except BaseException:
            self._forget()
            raise

    def _launch(self, plan: StepPlan, previous: LaunchedStep | None) -> Launched:
        # Wait until the previous step is launched. If the launch failed, the block table in GPU
        # memory may be stale.
        if self._launching.exception() is not None:
            self._forget()
        if self._copies is not None:
            self._copies.guard(plan)
        self._cache.prepare(plan.copies)
        inputs = self._inputs.build(plan)
        work = self.planner.plan(inputs.versions, inputs.step, inputs.rows)
        sources = None
        if inputs.pending:
            assert isinstance(previous, Launched), "pending tokens without a previous step"
            sources = previous.tokens_of(inputs.pending)
        landing, due = self._landings[0], self._attention.due
        self._landings.reverse()
        # A graph is due at its start. An eager step records the mark again in a late layer.
        due.put()
        landed = previous.landed if isinstance(previous, Launched) else dict
        draws, reads = self._draws.build(inputs, landed), StepReads.of(plan.sequences)
        needs_all = self._unit is None or needs_logits(inputs.samples)
        changes = plan.slot_changes
        step = PlannedStep(inputs, draws, work, sources, reads, needs_all, changes)
        self._send(RankStep(plan.copies, inputs, work, reads, needs_all, slot_changes=changes))
        self._launching = self.computer.launch(step, landing)
        launched = (self._launching, landing, due, self._device)
        return Launched(inputs, draws.scored, *launched, reads, self._unit)

    def _forget(self) -> None:
        """Send all tables again, because they may be stale in GPU memory after an error."""
        self._inputs.forget()
        self.computer.forget_slots()

    def _send(self, step: RankStep) -> None:
        if self._unit is not None:
            self._unit.send(step)

    @torch.inference_mode()
    def compute(self, step: RankStep) -> None:
        """Launch a step of rank 0 on another rank."""
        if self._copies is not None:
            self._copies.follow(step.transfers)
        self._cache.prepare(step.copies)
        if step.work is None:
            self.computer.change_slots(step.slot_changes)
            return
        planned = (step.inputs, NO_DRAWS, step.work, None, step.reads, step.needs_logits)
        self.computer.compute(PlannedStep(*planned, step.slot_changes))


def _layer_token_s(model: Decoder) -> float:
    """The seconds that the products of a layer take per token of a long prompt."""
    rate = E4M3_RATE if isinstance(model.layers[0].qkv, Fp8Linear) else MATRIX_RATE
    return 2 * num_layer_weights(model.spec) / rate


def _make_cache(model: Decoder, num_blocks: int, block_size: int, options: CudaOptions) -> KVCache:
    num_slots = options.num_slots
    layout = KVLayout.of(
        model.spec,
        block_size,
        model.dtype,
        quantised=options.quantised,
        with_slots=num_slots > 0,
    )
    # The last block and the last slot belong to no context. Padding and warm-up write to them.
    more = num_slots and num_slots + 1
    return KVCache(layout, num_blocks + 1, model.device, paged=True, num_slots=more)


def _make_copies(cache: KVCache, options: CudaOptions, unit: Unit | None) -> HostCopies | None:
    copies = cache.host_copies(options.num_host_blocks, options.num_host_slots)
    return copies if copies is None or unit is None else RankCopies(copies, unit)
