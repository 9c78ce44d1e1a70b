"""Runs planned steps on the GPU, as CUDA graphs or eagerly."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.tree_attention import PlanBuffers, config_for
from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.core.steps import SampleSpec
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.kernels.sampling import (
    adjust_logits,
    best_tokens,
    draw_tokens,
    mask_logits,
)
from parrot.engine.kernels.sampling_layout import NUM_COLUMNS, NUM_FIELDS, NUM_SETTINGS
from parrot.engine.kernels.small_copies import copy_numbers
from parrot.engine.models.forward import Forward
from parrot.engine.runner.device import StepReads
from parrot.engine.runner.graphs import (
    LAUNCH_S,
    Decoded,
    GraphCapacities,
    StepGraphs,
    StepSize,
)
from parrot.engine.runner.inputs import (
    DRAWN,
    LIMITED,
    AdjustedRow,
    AdjustedTokens,
    Adjustments,
    Draws,
    Masks,
    StepInputs,
    adjustments_of,
    draw_settings,
)
from parrot.engine.runner.log_probabilities import score_tokens
from parrot.engine.runner.staging import Landing, Mark, Stage
from parrot.protocol.sampling import MAX_LOGPROBS, ResolvedSampling

if TYPE_CHECKING:
    from parrot.engine.runner.windows import DeviceSlots

_NUM_NUMBERS = 2**16  # Initial size of the buffers for adjustments and masks, in int32 numbers.

SentAdjustments = tuple[torch.Tensor, torch.Tensor]
"""The rows and entries of `Adjustments`, in GPU memory."""


class Sampler:
    """The sampler: adjusts logits, samples tokens, and looks up their log probabilities."""

    def __init__(self, device: torch.device) -> None:
        # Adjustments and masks have buffers that grow, because their number is not bounded. Steps
        # without adjustments and masks do not pay for their copies.
        self._stage = Stage(_NUM_NUMBERS, device)
        self._mask_stage = Stage(_NUM_NUMBERS, device)  # Sent after the model's kernels.

    def send(self, adjustments: Adjustments) -> SentAdjustments:
        """The result is valid on the current stream until the next `send`."""
        parts = (adjustments.rows.reshape(-1), adjustments.entries.reshape(-1))
        self._stage.make_room([len(part) for part in parts])
        rows, entries = self._stage.send(parts)
        self._stage.sent()
        return rows.view(-1, NUM_COLUMNS), entries.view(-1, NUM_FIELDS)

    def sample(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        token_ids: torch.Tensor,
        choice: int,
        settings: torch.Tensor,
        adjustments: SentAdjustments | None,
        masks: Masks | None = None,
        scored: torch.Tensor | None = None,
        num_top: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample int32 [rows]: a token per row of `logits`, or -1 if the row is not finite.

        Also returns the result of `score_tokens` for the rows in `scored`, or None without any.
        `best` is `best_tokens(logits)`. The call may change `logits` and `best` in place.
        `token_ids` are the step's tokens without pending ones. `choice`, `settings`: see `Draws`.
        """
        # Copy the scored rows, because logits may be changed in place.
        plain = None if scored is None or not len(scored) else logits[scored]
        if adjustments is not None:
            logits = logits.float()
            adjust_logits(logits, token_ids, *adjustments)
        if masks is not None:
            logits = logits.float()
            mask_logits(logits, *self._send_masks(masks))
        if adjustments is not None or masks is not None:
            best = best_tokens(logits)
        if choice & DRAWN:
            limited = bool(choice & LIMITED)
            draw_tokens(logits, best, settings.view(-1, NUM_SETTINGS), limited=limited)
        return best, None if plain is None else score_tokens(plain, best[scored], num_top)

    def _send_masks(self, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (masks.rows, masks.words.reshape(-1))
        self._mask_stage.make_room([len(part) for part in parts])
        rows, words = self._mask_stage.send(parts)
        self._mask_stage.sent()
        return rows, words.view(masks.words.shape)

    def warm_up(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Compile all kernels for `logits` [1, vocab], in their type and in float32."""
        row = draw_settings(ResolvedSampling(top_k=4, top_p=0.9))
        for choice in (DRAWN | LIMITED, DRAWN):
            for scores in (logits, logits.float()):
                (settings,) = self._stage.send([row])
                self.sample(scores, best_tokens(scores), token_ids, choice, settings, None)
                self._stage.sent()
        config = ResolvedSampling(presence_penalty=1.0)
        adjusted = AdjustedRow(0, -1, AdjustedTokens(0, config), SampleSpec(0, config, 0, 0))
        sent = self.send(adjustments_of([adjusted]))
        self.sample(logits, best_tokens(logits), token_ids, 0, settings, sent)
        num_words = -(-logits.shape[1] // 32)
        masks = Masks(np.zeros(1, dtype=np.int32), np.full((1, num_words), -1, dtype=np.int32))
        first = torch.zeros(1, dtype=torch.int32, device=logits.device)
        best = best_tokens(logits)
        self.sample(logits, best, token_ids, 0, settings, None, masks, first, MAX_LOGPROBS)


_CONTEXTS = (64, 2048)  # Context lengths, in tokens, of the plans for which graphs are captured.
# Prompt lengths, in tokens, that together use every kernel. Products of few rows have variants for
# the next power of two, for multiples of 16, and for 1 and 2 rows.
_PROMPTS = (1, 2, 8, 16, 24, 32, 40, 64, 256)
_LONG = 640  # Rows of a step for the kernels of many rows: more than 512 in e4m3.
_NUM_LAUNCHES = 5  # Launches that the warm-up times.


@dataclass(frozen=True, slots=True)
class SyntheticPlans:
    """Plans of all kinds of steps, for warm-up. All entries of their block tables are block 0."""

    shape: AttentionShape
    gate: GateConfig | None
    split: SplitConfig
    max_tokens: int
    max_seq_len: int

    def for_kernels(self) -> list[WorkList]:
        """Eager steps that together launch every kernel.

        The steps are prompts, and decodes with and without a prompt. One variant of the decodes has
        enough programs for the light tiles (`KernelConfig`). The last step has many rows, and a
        context that is split."""
        short = min(_CONTEXTS[0], self.max_seq_len)
        plans = [self.prompt(n) for n in (*_PROMPTS, *self.dense_lengths()[:1])]
        for q_lens in ([1], [1, short]):
            few = self._plan(q_lens, short)
            enough = config_for(self.shape).deep_resident // self.shape.num_kv_heads + 1
            plans += [few, replace(few, narrow=np.repeat(few.narrow, enough, axis=0))]
        if self.max_tokens > _LONG:
            length = min(_CONTEXTS[1], self.max_seq_len)
            prompt = min(_LONG, length)
            plans.append(self._plan([1, *[prompt] * -(-_LONG // prompt)], length))
        return plans

    def prompt(self, length: int) -> WorkList:
        return self._plan([length], length)

    def for_graphs(self, size: StepSize) -> list[WorkList]:
        """Prompts with and without converted pages, or decodes with short contexts, with long
        contexts and with a shared prefix."""
        rows = size.rows
        if size.logits is not None:
            length = min(rows, self.max_seq_len)
            work = self._plan([length] * (rows // length), length)
            work = work.with_table_rows(np.zeros(rows, dtype=np.int32))  # Any row is valid.
            none = work.converted_fills[:0]
            return [work, replace(work, converted_fills=none, converted_pages=none[:, 0])]
        lengths = [min(n, self.max_seq_len - 1) for n in _CONTEXTS]
        plans = [self._plan([1] * rows, n) for n in lengths]
        if self.gate is not None and rows > 1:
            plans.append(self._plan([1] * rows, lengths[-1], self.gate))
        # Most real decodes are uneven, which selects other tiles for some sizes.
        return plans + [replace(plan, narrow_is_even=False) for plan in plans]

    def dense_lengths(self) -> range:
        """Lengths of prompt prefixes that one step may compute with cuDNN."""
        if self.split.dense is None:
            return range(0)
        return range(self.split.dense_min, self.max_tokens + 1, self.split.dense)

    def _plan(self, q_lens: Sequence[int], length: int, gate: GateConfig | None = None) -> WorkList:
        """A plan of contexts with `length` tokens. The step computes the last `q_lens` tokens."""
        num_blocks = -(-length // self.shape.page_size)
        tables = np.zeros((len(q_lens), num_blocks + 1), dtype=np.int32)
        counts = np.array(q_lens, dtype=np.int32)
        return plan_work(StepRows(tables, length - counts, counts), self.shape, gate, self.split)


# An eager step passes `due` at least this long before its end, in seconds. A larger value plans the
# next step earlier, so it misses more arrivals.
_LEAD_S = 1e-3

Sources = tuple[torch.Tensor, IntArray]
"""The previous step's tokens in GPU memory, and the index in it of each pending token."""

Report = Callable[[str], None]
"""Receives the name of the next phase of the warm-up."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step's inputs and plan, before they are sent to the GPU."""

    inputs: StepInputs
    draws: Draws
    work: WorkList  # Its items use rows of the block table in GPU memory.
    sources: Sources | None  # None if no token is pending.
    reads: StepReads | None = None  # None if no hidden states are pooled or scored.
    needs_logits: bool = True  # False if the tokens of the largest logits are enough.
    slot_changes: tuple[tuple[int, int], ...] = ()  # See `StepPlan`.


@dataclass(frozen=True, slots=True)
class _Sent:
    """The arrays of a step in GPU memory."""

    parts: Sequence[torch.Tensor]  # The first part is the step's tokens.
    settings: torch.Tensor
    scored: torch.Tensor  # Rows of the logits whose log probabilities are requested.
    adjustments: SentAdjustments | None


class WatchedAttention(TritonAttention):
    """Attention that records the mark `due` in one of a step's last layers.

    The rest of the step takes long enough for the CPU to plan the next step and launch its first
    kernels."""

    def __init__(self, *args: Any, token_s: float, **kwargs: Any) -> None:
        """`token_s`: the seconds that a layer takes per token. Other arguments: see the base."""
        super().__init__(*args, **kwargs)
        self.token_s = token_s
        self._lead_tokens = _LEAD_S / token_s
        self._due_layer = 0
        self.due = Mark(self.device)

    def expect(self, num_tokens: int) -> None:
        """Choose the layer of `due` for a step of `num_tokens`."""
        # At its start the last layer is counted as finished.
        layers_left = 1 + math.ceil(self._lead_tokens / num_tokens)
        self._due_layer = max(0, self.num_layers - layers_left)

    def attend(self, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer == self._due_layer:
            self.due.put()
        return super().attend(layer, *args, **kwargs)


class StepComputer:
    """Owns the block table in GPU memory and the buffers through which steps are sent.

    With `graphs`, decode-only steps and small steps with prompts run as CUDA graphs. Other steps
    run eagerly. A thread launches them, which takes milliseconds, so that the tokens of the
    previous step are not delayed."""

    def __init__(
        self,
        forward: Forward,
        attention: WatchedAttention,
        synthetic: SyntheticPlans,
        table_size: tuple[int, int],
        max_tokens: int,
        num_blocks_with_slots: int = 0,
    ) -> None:
        """`table_size`: rows and columns of the block table.

        `num_blocks_with_slots`: all blocks if layers have window slots, else 0."""
        rows, width = table_size
        device = attention.device
        self._device = device
        self._forward, self._vocabulary = forward, forward.vocabulary
        self._attention = attention
        self.graphs: StepGraphs | None = None
        self._synthetic = synthetic
        self._tables = torch.zeros(table_size, dtype=torch.int32, device=device)
        self._slots: DeviceSlots | None = None
        if num_blocks_with_slots:
            self._slots = _device_slots(num_blocks_with_slots, self._tables)
        self._stage = Stage(4 * max_tokens + rows * (2 * width + NUM_SETTINGS + 8) + 1024, device)
        self._sampler = Sampler(device)
        self._launcher = ThreadPoolExecutor(
            1, thread_name_prefix="launcher", initializer=_use, initargs=(device,)
        )

    def use_graphs(
        self, capacities: GraphCapacities, sizes: Sequence[StepSize], *, is_alone: bool
    ) -> None:
        """Run steps of these sizes as graphs. See `StepGraphs`."""
        self.graphs = StepGraphs(
            self._attention, capacities, sizes, self.compute_in_place, is_alone=is_alone
        )

    def launch(self, step: PlannedStep, landing: Landing) -> "Future[torch.Tensor]":
        """Launch a step. Its tokens are also copied to `landing`.

        The future resolves once all kernels are launched. Its result is a token per sample, in GPU
        memory; -1 if the logits are not finite."""
        size = None if step.reads is not None else self._graph_size(step.inputs)
        if size is None:
            return self._launcher.submit(self._compute, step, size, landing)
        done: Future[torch.Tensor] = Future()
        done.set_result(self._compute(step, size, landing))
        return done

    @torch.inference_mode()
    def _compute(self, step: PlannedStep, size: StepSize | None, landing: Landing) -> torch.Tensor:
        decoded, sent = self._decoded(step, size)
        count = len(step.inputs.samples)
        tokens, scores = self._sampler.sample(
            decoded.logits[:count],
            decoded.tokens[:count],
            sent.parts[0],
            step.draws.choice,
            sent.settings,
            sent.adjustments,
            step.draws.masks(),  # May wait for the previous step, so the model is launched first.
            sent.scored,
            step.draws.scored.num_top,
        )
        landing.receive(tokens, scores)
        return tokens

    def compute(self, step: PlannedStep) -> None:
        """Launch a step without sampling, on ranks other than rank 0."""
        size = None if step.reads is not None else self._graph_size(step.inputs)
        if size is None:
            # cuDNN's plans belong to the launcher thread.
            self._launcher.submit(self._decoded, step, size).result()
        else:
            self._decoded(step, size)

    @torch.inference_mode()
    def _decoded(self, step: PlannedStep, size: StepSize | None) -> tuple[Decoded, _Sent]:
        """Run the model. With several ranks the logits are gathered only if the step needs them."""
        found = None if size is None else self._run_graph(step, size)
        decoded, sent = found or self._run_eagerly(step)
        if step.needs_logits:
            decoded = decoded._replace(
                logits=self._gathered(decoded.logits[: len(step.inputs.samples)])
            )
        return decoded, sent

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, from the logits of all ranks."""
        return logits if self._vocabulary is None else self._vocabulary.gather(logits)

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        return self._gathered(self._forward.head(states))

    def _run_eagerly(self, step: PlannedStep) -> tuple[Decoded, _Sent]:
        inputs = step.inputs
        parts = (inputs.token_ids, inputs.positions, inputs.table_rows, inputs.logit_rows)
        sent = self._send(parts, step)
        return self._forward_eagerly(sent.parts, step.work, step.reads), sent

    def _forward_eagerly(
        self, sent: Sequence[torch.Tensor], work: WorkList, reads: StepReads | None = None
    ) -> Decoded:
        buffers = PlanBuffers(work, self._device)
        self._stage.sent()
        self._attention.ensure_slots(work.num_slots)
        self._attention.expect(len(sent[0]))
        if reads is None:
            return self._decode(sent[:3], sent[3], buffers, self._attention)
        plan = self._plan(buffers, sent[1], sent[2])
        states = self._forward.states(sent[0], self._attention, plan)
        reads.take(states, self._head)
        logits = self._forward.head(states.index_select(0, sent[3]))
        return Decoded(best_tokens(logits, self._vocabulary), logits)

    def _decode(
        self,
        rows: Sequence[torch.Tensor],
        logit_rows: torch.Tensor | None,
        work: PlanBuffers,
        attention: TritonAttention,
    ) -> Decoded:
        token_ids, positions, table_rows = rows
        plan = self._plan(work, positions, table_rows)
        logits = self._forward(token_ids, attention, plan, logit_rows)
        return Decoded(best_tokens(logits, self._vocabulary), logits)

    def _plan(
        self, work: PlanBuffers, positions: torch.Tensor, table_rows: torch.Tensor
    ) -> TritonPlan:
        slots = None if self._slots is None else self._slots.tables
        return TritonPlan(work, self._tables, positions, table_rows, slots)

    def _run_graph(self, step: PlannedStep, size: StepSize) -> tuple[Decoded, _Sent] | None:
        """Replay a graph; None if no graph is large enough."""
        assert self.graphs is not None, "there are no graphs"
        inputs = step.inputs
        parts = [_pad(inputs.token_ids, size.rows, 0), _pad(inputs.positions, size.rows, 0)]
        parts.append(_pad(inputs.table_rows, size.rows, -1))
        if size.logits is not None:
            parts.append(_pad(inputs.logit_rows, size.logits, 0))
        sent = self._send(parts, step)
        graph = self.graphs.find(size, step.work)
        self._stage.sent()
        return None if graph is None else (self.graphs.replay(graph), sent)

    def _graph_size(self, inputs: StepInputs) -> StepSize | None:
        """The size of the graphs that can run a step; None if no graph can."""
        if self.graphs is None:
            return None
        num_logits = None if inputs.only_decodes else len(inputs.logit_rows)
        return self.graphs.size(inputs.num_tokens, num_logits)

    def _send(self, parts: Sequence[IntArray], step: PlannedStep) -> _Sent:
        """Send `parts` and the sampling arrays, update the block table, and fill in pending tokens.

        The first of `parts` is the step's tokens."""
        inputs, draws = step.inputs, step.draws
        tokens, *others = parts
        known = None
        if step.sources is not None:
            known, rows = step.sources
            tokens = tokens.copy()
            tokens[inputs.pending_at] = -1 - rows
        extra = (draws.settings.reshape(-1), draws.scored.rows)
        arrays = (tokens, *others, inputs.changed_at, inputs.changed_to, *extra)
        *sent, at, to, settings, scored = self._stage.send(arrays, known)
        if len(at):
            self._change_tables(inputs.changed_at, at, to)
        if self._slots is not None:
            self._slots.update(step.slot_changes, has_new_blocks=len(at) > 0)
        if self._vocabulary is not None and len(inputs.pending_at):
            self._vocabulary.ranks.broadcast(sent[0])  # Only rank 0 has the sampled tokens.
        adjusted = draws.adjustments
        adjustments = None if adjusted is None else self._sampler.send(adjusted)
        return _Sent(sent, settings, scored, adjustments)

    def _change_tables(self, places: IntArray, at: torch.Tensor, to: torch.Tensor) -> None:
        """Write `to` to the entries `at` of the block table. `places` is `at` in CPU memory."""
        # The entries of a new context are consecutive. A copy launches faster than an index write.
        flat, first, count = self._tables.view(-1), int(places[0]), len(places)
        if count == 1 or (np.diff(places) == 1).all():
            flat[first : first + count].copy_(to)
        else:
            flat[at] = to

    def change_slots(self, changes: Sequence[tuple[int, int]]) -> None:
        """Apply `StepPlan.slot_changes` of a step without tokens."""
        if self._slots is not None:
            self._slots.update(changes, has_new_blocks=False)

    def forget_slots(self) -> None:
        """Send all window slots again. A step may have failed before they were sent."""
        if self._slots is not None:
            self._slots.forget()

    def compute_in_place(
        self, size: StepSize, work: PlanBuffers, attention: TritonAttention
    ) -> Decoded:
        """Compute from the addresses to which `_run_graph` sends the arrays of a step of `size`."""
        *places, logit_rows = self._stage.places([size.rows] * 3 + [size.logits or 0])
        return self._decode(places, None if size.logits is None else logit_rows, work, attention)

    def close(self) -> None:
        """Delete the graphs. Aborting NCCL waits for that."""
        self.graphs = None

    @torch.inference_mode()
    def warm_up(self, report: Report) -> None:
        """Compile all kernels and capture the usual graphs before the first request.

        The blocks of contexts are not written."""
        plans = self._synthetic.for_kernels()
        for number, work in enumerate(plans, start=1):
            report(f"compiling kernels of step {number} of {len(plans)}")
            token_ids, logits = self._launcher.submit(self._run_padding, work).result()
        report("compiling the sampling kernels")
        self._sampler.warm_up(logits[:1], token_ids)
        copy_numbers(token_ids, token_ids, 1, known=token_ids)
        if self.graphs is not None and self._vocabulary is None:
            report("timing launches")
            self.graphs.limit(self._tokens_in_a_launch())
        # cuDNN's plans belong to the launcher thread.
        for num_tokens in self._synthetic.dense_lengths():
            self._launcher.submit(self._attention.prepare_dense, num_tokens).result()
        for size in () if self.graphs is None else reversed(self.graphs.sizes):
            report(f"capturing graphs of {size.rows} rows")
            self.capture(size)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tokens_in_a_launch(self) -> int:
        """The number of prompt tokens that the GPU computes in the time that a launch takes.

        Larger steps need no graph: padding would cost more than a graph saves."""
        attention, work = self._attention, self._synthetic.prompt(max(_PROMPTS))
        times = []
        for _ in range(_NUM_LAUNCHES):
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            self._launcher.submit(self._run_padding, work).result()
            times.append(time.perf_counter() - start)
        layer_s = max(statistics.median(times) / attention.num_layers, LAUNCH_S[0])
        return int(layer_s / attention.token_s)

    @torch.inference_mode()
    def capture(self, size: StepSize) -> None:
        """Capture the usual graphs of one size, and the graph with the largest capacity."""
        assert self.graphs is not None, "there are no graphs"
        self._stage_padding(size.rows, size.logits or 0)
        for work in self._synthetic.for_graphs(size):
            self.graphs.prepare(size, work)
        self.graphs.prepare(size, work, largest=True)
        self._stage.sent()

    @torch.inference_mode()
    def _run_padding(self, work: WorkList) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a plan on padding. Returns the tokens and the logits of up to `FEW_ROWS` of them."""
        num_tokens = len(work.token_order)
        sent = self._stage_padding(num_tokens, min(num_tokens, FEW_ROWS))
        return sent[0], self._gathered(self._forward_eagerly(sent, work).logits)

    def _stage_padding(self, num_tokens: int, num_logits: int) -> list[torch.Tensor]:
        positions = np.arange(num_tokens, dtype=np.int32) % self._synthetic.max_seq_len
        tokens, none = _pad(_NONE, num_tokens, 0), _pad(_NONE, num_tokens, -1)
        return self._stage.send([tokens, positions, none, _pad(_NONE, num_logits, 0)])


def _device_slots(num_blocks: int, tables: torch.Tensor) -> "DeviceSlots":
    from parrot.engine.runner.windows import DeviceSlots  # Only models with window slots.

    return DeviceSlots(num_blocks, tables)


def _use(device: torch.device) -> None:
    """Make `device` this thread's CUDA device."""
    if device.index is not None:
        torch.cuda.set_device(device)


_NONE: IntArray = np.empty(0, dtype=np.int32)


def _pad(values: IntArray, length: int, fill: int) -> IntArray:
    padded = np.full(length, fill, dtype=np.int32)
    padded[: len(values)] = values
    return padded
