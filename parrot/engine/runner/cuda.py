"""Runs the steps of the builtin engine with the Triton kernels."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from parrot.engine.attention.gate import GateConfig
from parrot.engine.attention.planner import WorkPlanner
from parrot.engine.attention.tree_attention import Capacity, PlanBuffers, can_be_dense
from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.attention.work_list import SplitConfig, WorkList
from parrot.engine.core.plan import LaunchedStep, RunnerInfo, StepPlan, StepResult
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.linear import FEW_ROWS
from parrot.engine.kernels.sampling_layout import NUM_SETTINGS
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.device import noticing_loss
from parrot.engine.runner.draws import DrawBuilder, Draws
from parrot.engine.runner.forward import make_forward
from parrot.engine.runner.graphs import (
    Bound,
    Decoded,
    Rooms,
    StepGraphs,
    StepSize,
    bucket_list,
    decode,
    mixed_sizes,
)
from parrot.engine.runner.inputs import InputBuilder, IntArray, StepInputs
from parrot.engine.runner.kv_cache import MIB, KVCache, KVLayout
from parrot.engine.runner.launched import Landing, Launched, Sources, WatchedAttention
from parrot.engine.runner.staging import Stage
from parrot.engine.runner.token_choice import SentAdjustments, TokenChooser
from parrot.engine.runner.warm_up import SyntheticPlans
from parrot.protocol.errors import OutOfMemory

_DENSE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """`max_rows`: sequences in a step. `max_tokens`: tokens in a step. `gate` None: read no prefix
    once for several sequences. `overlap`: steps may be launched ahead. `upcast`: compute attention
    in float32."""

    max_rows: int = 256
    max_tokens: int = 2048
    max_seq_len: int | None = None
    gate: GateConfig | None = field(default_factory=GateConfig)
    use_graphs: bool = True
    overlap: bool = True
    upcast: bool = False


class CudaRunner:
    """`OverlappingRunner` over a decoder and a paged KV pool. Steps in which every sequence has one
    token, and small ones with prompts in them, run as CUDA graphs. Kernels of others are launched
    one by one, which takes milliseconds: in a thread, so that the tokens of the step before need
    not wait for it."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        options: CudaOptions | None = None,
    ) -> None:
        options = options or CudaOptions()
        spec, device = model.spec, model.device
        layout = KVLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, model.dtype
        )
        max_seq_len = min(options.max_seq_len or spec.max_seq_len, spec.max_seq_len)
        self._device = device
        self._cache = KVCache(layout, num_blocks + 1, device, paged=True)  # and one for padding
        self._info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_seq_len=max_seq_len,
            vocab_size=spec.vocab_size,
            model_mem=model.num_bytes / MIB,
            cache_mem=self._cache.num_bytes / MIB,
        )
        max_blocks = -(-max_seq_len // block_size)
        max_rows = 2 * options.max_rows
        self._inputs = InputBuilder(max_rows, max_blocks, block_size)
        self._draws = DrawBuilder(max_rows)
        width = self._inputs.width
        self._tables = torch.zeros((max_rows, width), dtype=torch.int32, device=device)
        room = 4 * options.max_tokens + max_rows * (2 * width + NUM_SETTINGS + 8) + 1024
        self._stage = Stage(room, device)
        self._chooser = TokenChooser(device)
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size)
        split = _split_config(shape, model.dtype, device)
        self._planner = WorkPlanner(shape, options.gate, split)
        self._synthetic = SyntheticPlans(
            shape, options.gate, split, options.max_tokens, max_seq_len
        )
        self._overlap = options.overlap
        self._planned: tuple[WorkList, WorkList] | None = None
        self._forward = make_forward(model, max_seq_len)
        self._layer_weights = spec.num_layer_weights
        memory = self._cache.pool.transpose(2, 3)
        self._attention = WatchedAttention(
            memory, spec.num_heads, 1, spec.num_layer_weights, upcast=options.upcast
        )
        self._graphs = None
        if options.use_graphs:
            self._graphs = self._make_graphs(memory, Rooms(shape, split), options)
        self._landings = [Landing(options.max_rows, device) for _ in range(2)]
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._launching: Future[torch.Tensor] = Future()
        self._launching.set_result(torch.empty(0))
        self.shared_tokens_saved = 0

    def _make_graphs(self, memory: torch.Tensor, rooms: Rooms, options: CudaOptions) -> StepGraphs:
        sizes = [StepSize(rows) for rows in bucket_list(options.max_rows)]
        sizes += mixed_sizes(options.max_rows, options.max_tokens, self._layer_weights)
        max_slots = max(rooms.largest(size).slots for size in sizes)
        attention = TritonAttention(memory, self._attention.shape.num_heads, max_slots)
        return StepGraphs(self._forward, attention, rooms, sizes, self._bind)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def num_shared_steps(self) -> int:
        return self._planner.num_shared_steps

    @property
    def num_graph_steps(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_replays

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Raises `OutOfMemory` when the device has no room for the step; the next may succeed."""
        try:
            with noticing_loss(self._device):
                if plan.num_tokens:
                    return self._launch(plan, None).wait()
                self._cache.prepare(plan.copies)
                return StepResult({}, {})
        except torch.OutOfMemoryError:
            self._inputs.forget()
            torch.cuda.empty_cache()
            raise OutOfMemory("the device has not enough memory for this step") from None
        except BaseException:
            self._inputs.forget()
            raise

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> Launched | None:
        if not self._overlap:
            return None
        try:
            with noticing_loss(self._device):
                return self._launch(plan, previous)
        except BaseException:
            self._inputs.forget()
            raise

    def _launch(self, plan: StepPlan, previous: LaunchedStep | None) -> Launched:
        if self._launching.exception() is not None:  # of the step before, now that it is launched
            self._inputs.forget()
        self._cache.prepare(plan.copies)
        inputs = self._inputs.build(plan)
        draws = self._draws.build(inputs)
        work = self._plan_work(inputs)
        self.shared_tokens_saved += work.num_shared_tokens
        sources = None
        if inputs.pending:
            assert isinstance(previous, Launched), "tokens are pending of no step"
            sources = previous.tokens_of(inputs.pending)
        landing, due = self._landings[0], self._attention.due
        self._landings.reverse()
        due.put()  # of a graph, now; of kernels that are launched one by one, later
        size = self._graph_size(inputs)
        arguments = (inputs, draws, work, sources, size, landing)
        if size is None:
            self._launching = self._launcher.submit(self._compute, *arguments)
        else:
            self._launching = Future()
            self._launching.set_result(self._compute(*arguments))
        return Launched(inputs, self._launching, landing, due, self._device)

    @torch.inference_mode()
    def _compute(
        self,
        inputs: StepInputs,
        draws: Draws,
        work: WorkList,
        sources: Sources | None,
        size: StepSize | None,
        landing: Landing,
    ) -> torch.Tensor:
        """A token for each of the step's samples, on the device; -1: not finite."""
        found = None if size is None else self._run_graph(inputs, draws, work, sources, size)
        decoded, sent = found or self._run_eagerly(inputs, draws, work, sources)
        count = len(inputs.samples)
        tokens = self._chooser.choose(
            decoded.logits[:count],
            decoded.tokens[:count],
            sent.parts[0],
            draws.choice,
            sent.settings,
            sent.adjustments,
        )
        landing.receive(tokens)
        return tokens

    def _plan_work(self, inputs: StepInputs) -> WorkList:
        """The step's plan, with the rows of the device's table in place of the step's own."""
        work = self._planner.plan(inputs.versions, inputs.step)
        if self._planned is None or self._planned[0] is not work:
            self._planned = (work, work.with_table_rows(inputs.rows))
        return self._planned[1]

    def _run_eagerly(
        self, inputs: StepInputs, draws: Draws, work: WorkList, sources: Sources | None
    ) -> tuple[Decoded, "_Sent"]:
        parts = (inputs.token_ids, inputs.positions, inputs.table_rows, inputs.logit_rows)
        sent = self._send(parts, inputs, draws, sources)
        return self._forward_eagerly(sent.parts, work), sent

    def _forward_eagerly(self, sent: Sequence[torch.Tensor], work: WorkList) -> Decoded:
        token_ids, positions, table_rows, logit_rows = sent
        buffers = PlanBuffers(Capacity.of(work), self._device)
        buffers.upload(work)
        self._stage.sent()
        self._attention.ensure_slots(work.num_slots)
        self._attention.expect(len(token_ids))
        plan = TritonPlan(buffers, self._tables, positions, table_rows)
        return decode(self._forward(token_ids, self._attention, plan, logit_rows))

    def _run_graph(
        self,
        inputs: StepInputs,
        draws: Draws,
        work: WorkList,
        sources: Sources | None,
        size: StepSize,
    ) -> "tuple[Decoded, _Sent] | None":
        """None: no graph is large enough."""
        assert self._graphs is not None, "there are no graphs"
        parts = [_pad(inputs.token_ids, size.rows, 0), _pad(inputs.positions, size.rows, 0)]
        parts.append(_pad(inputs.table_rows, size.rows, -1))
        if size.logits is not None:
            parts.append(_pad(inputs.logit_rows, size.logits, 0))
        sent = self._send(parts, inputs, draws, sources)
        graph = self._graphs.find(size, work)
        self._stage.sent()
        return None if graph is None else (self._graphs.replay(graph), sent)

    def _graph_size(self, inputs: StepInputs) -> StepSize | None:
        """That of the graphs for such a step; None: there are none."""
        if self._graphs is None:
            return None
        num_logits = None if inputs.only_decodes else len(inputs.logit_rows)
        return self._graphs.size(inputs.num_tokens, num_logits)

    def _send(
        self,
        parts: Sequence[IntArray],
        inputs: StepInputs,
        draws: Draws,
        sources: Sources | None,
    ) -> "_Sent":
        """`parts` begin with the tokens, of which `sources` are the pending ones."""
        known, rows = (None, _NONE) if sources is None else sources
        changes = (inputs.changed_at, inputs.changed_to, inputs.pending_at, rows)
        extra = (*changes, draws.settings.reshape(-1))
        *sent, at, to, pending_at, row, settings = self._stage.send((*parts, *extra))
        if len(at):
            self._tables.view(-1)[at] = to
        if known is not None:
            where = slice(len(row)) if len(row) == inputs.num_tokens else pending_at
            sent[0][where] = known[row].clamp(min=0)  # -1: of a job that has failed, any will do
        adjustments = None
        if draws.adjustments is not None:
            adjustments = self._chooser.send(draws.adjustments)
        return _Sent(sent, settings, adjustments)

    def _bind(self, size: StepSize, work: PlanBuffers) -> Bound:
        """Where `_run_graph` leaves the arrays of a step of this size."""
        logits = 0 if size.logits is None else size.logits
        places = self._stage.places([size.rows] * 3 + [logits])
        plan = TritonPlan(work, self._tables, places[1], places[2])
        return Bound(places[0], plan, None if size.logits is None else places[3])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels and capture graphs, so that no request waits for them. No context's
        block is written."""
        for work in self._synthetic.for_kernels():
            token_ids, logits = self._launcher.submit(self._run_padding, work).result()
        self._chooser.warm_up(logits[:1], token_ids)
        for num_tokens in self._synthetic.dense_lengths():  # cuDNN's plans belong to one thread
            self._launcher.submit(self._attention.prepare_dense, num_tokens).result()
        if self._graphs is not None:
            for size in reversed(self._graphs.sizes):
                self._stage_padding(size.rows, size.logits or 0)
                for work in self._synthetic.for_graphs(size):
                    self._graphs.prepare(size, work)
                self._graphs.prepare(size, work, largest=True)
                self._stage.sent()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def _run_padding(self, work: WorkList) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, and the logits of as many as products of few rows take."""
        num_tokens = len(work.token_order)
        sent = self._stage_padding(num_tokens, min(num_tokens, FEW_ROWS))
        return sent[0], self._forward_eagerly(sent, work).logits

    def _stage_padding(self, num_tokens: int, num_logits: int) -> list[torch.Tensor]:
        positions = np.arange(num_tokens, dtype=np.int32) % self._info.max_seq_len
        tokens, none = _pad(_NONE, num_tokens, 0), _pad(_NONE, num_tokens, -1)
        return self._stage.send([tokens, positions, none, _pad(_NONE, num_logits, 0)])


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a step needs, on the device. `parts` begin with its tokens."""

    parts: Sequence[torch.Tensor]
    settings: torch.Tensor
    adjustments: SentAdjustments | None


_NONE: IntArray = np.empty(0, dtype=np.int32)


def _pad(values: IntArray, length: int, fill: int) -> IntArray:
    padded = np.full(length, fill, dtype=np.int32)
    padded[: len(values)] = values
    return padded


def _split_config(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> SplitConfig:
    if device.type != "cuda":
        return SplitConfig()
    return SplitConfig(
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        dense=_DENSE_TOKENS if can_be_dense(shape, dtype, device) else None,
    )
