"""Runs the steps of the builtin engine in plain torch, and adapts the number of threads."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.grouped import GroupedAttention
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import WHOLE_SPANS, TorchAttention
from parrot.engine.attention.work_list import StepRows, WorkList, WorkPlanner
from parrot.engine.core.steps import (
    Landed,
    RunnerInfo,
    StepPlan,
    StepResult,
    Transfer,
)
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.runner.device import StepReads, detect_device_loss
from parrot.engine.runner.inputs import InputBuilder, StepInputs
from parrot.engine.runner.kv_cache import KVCache, KVLayout, runner_info
from parrot.engine.runner.ranks import RankCopies, RankStep, Unit, together
from parrot.engine.runner.sampling import needs_logits, results, sample

if TYPE_CHECKING:
    from parrot.engine.runner.windows import SlotTable

# A step belongs to the first kind whose number of rows is not smaller. Only steps of one kind are
# compared with each other.
_KINDS = (8, 64)
_BASE_ROWS = 24.0  # The time of a step is proportional to its rows plus this number.

_SMOOTHING = 0.25  # Weight of the newest step in the moving average of costs.
# A probed number of threads is adopted if its cost is at most this fraction of the usual cost. The
# fractions favour fewer threads, which leave cores to other processes.
_ADOPT_MORE, _ADOPT_FEWER = 0.92, 1.0
# An adopted number is dropped if its cost exceeds this fraction of the earlier number's cost.
_KEEP_MORE, _KEEP_FEWER = 1.0, 1.15
_PROBE_ABORT_RATIO = (
    1.5  # A probe ends after a step whose cost exceeds this multiple of the usual cost.
)
# Fewer threads are probed at once if the usual cost exceeds this multiple of the cost at the last
# failed probe: another program probably uses the cores.
_SLOWDOWN_RATIO = 1.5
_PROBE_STEPS = 3  # Steps in a probe.
_MIN_STEP_S = 1e-6  # Shortest time of a step, in seconds: a coarse clock can report 0.
# Steps before the next probe: after a start or an adopted number, and the limits after a failure.
_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 2, 16, 2000
_PAUSE_PER_LOSS = 80  # Steps before the next probe, per step's time that the failed probe lost.
# Steps after which an adopted number is final, and the first step at which it can be dropped.
_TRIAL_STEPS, _FIRST_VERDICT = 16, 4


@dataclass(slots=True)
class _Kind:
    """The measurements of one kind of steps. Costs are seconds per row."""

    threads: int
    usual: float | None = field(default=None, init=False)  # Average cost with `threads`.
    settled: float | None = field(default=None, init=False)  # `usual` at the last failed probe.
    until_probe: int = field(default=_FIRST_PAUSE, init=False)  # Steps until the next probe.
    tried: set[int] = field(default_factory=set, init=False)
    turn: int = field(default=0, init=False)  # Selects the next number of threads to probe.
    probed: int | None = field(default=None, init=False)  # The number that a probe runs with.
    probe: list[float] = field(default_factory=list, init=False)  # Costs of the probe's steps.
    # The earlier number of threads and its cost, while the adopted number is on trial.
    fallback: tuple[int, float] | None = field(default=None, init=False)
    trial: int = field(default=0, init=False)  # Steps since the number was adopted.


class ThreadPolicy:
    """Chooses the number of threads for each step from the times of earlier steps.

    A few steps probe another number of threads: one less, half, one more, or twice as many. A
    faster number is adopted. The more time a failed probe lost, the later is the next probe.

        steps  2 2 2 2 2 2 [1 1 1] 1 1 1 1 1 ...     the probe was faster: adopted
               1 1 1 1 1 1 [2] 1 1 1 1 1 1 1 ...     far slower: the probe ends after one step
    """

    # The threads of a step synchronize hundreds of times, so all threads wait for a thread whose
    # core runs another program. Next to a busy program, two threads decode at 1/4 of the speed of
    # one thread. Step times are the only way to notice such programs.

    def __init__(self, most: int) -> None:
        """`most` is the largest number of threads, at least 1. The first steps use it."""
        self._most = most
        self._kinds = [_Kind(most) for _ in range(len(_KINDS) + 1)]

    def choose(self, num_rows: int) -> int:
        """The number of threads for the next step, which computes `num_rows` rows."""
        kind = self._kind(num_rows)
        return kind.threads if kind.probed is None else kind.probed

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step that ran with the number of threads from `choose`."""
        kind, threads = self._kind(num_rows), self.choose(num_rows)
        if threads not in kind.tried:
            kind.tried.add(threads)  # Ignore the first step: it includes torch's one-time setup.
            return
        cost = max(seconds, _MIN_STEP_S) / (num_rows + _BASE_ROWS)
        if kind.probed is None:
            self._record(kind, cost)
        else:
            self._record_probe(kind, kind.probed, cost)

    def _kind(self, num_rows: int) -> _Kind:
        return self._kinds[bisect_left(_KINDS, num_rows)]

    def _record(self, kind: _Kind, cost: float) -> None:
        """Record a step outside of probes, and start a probe if one is due."""
        usual = cost if kind.usual is None else kind.usual
        kind.usual = usual + _SMOOTHING * (cost - usual)
        if kind.fallback is not None:
            kind.trial += 1
            threads, before = kind.fallback
            limit = before * (_KEEP_FEWER if kind.threads < threads else _KEEP_MORE)
            if kind.trial >= _FIRST_VERDICT and kind.usual > limit:
                lost = kind.trial * (kind.usual / before - 1)
                kind.threads, kind.usual, kind.fallback = threads, before, None
                self._schedule_probe(kind, lost)
                return
            if kind.trial == _TRIAL_STEPS:
                kind.fallback = None
        kind.until_probe -= 1
        has_slowed = kind.settled is not None and kind.usual > _SLOWDOWN_RATIO * kind.settled
        if has_slowed and kind.threads > 1:
            kind.turn = kind.until_probe = 0  # Turn 0 probes one thread less.
        if kind.until_probe <= 0 and self._most > 1:
            kind.probed = self._next(kind)

    def _next(self, kind: _Kind) -> int:
        now = kind.threads
        others = [n for n in (now - 1, now // 2, now + 1, 2 * now) if 1 <= n <= self._most]
        return others[kind.turn % len(others)]

    def _record_probe(self, kind: _Kind, threads: int, cost: float) -> None:
        """Record a step of a probe, and decide at the end of the probe."""
        assert kind.usual is not None, kind
        kind.probe.append(cost)
        if cost <= _PROBE_ABORT_RATIO * kind.usual and len(kind.probe) < _PROBE_STEPS:
            return
        costs, mean = kind.probe, fmean(kind.probe)
        kind.probed, kind.probe = None, []
        if mean <= (_ADOPT_FEWER if threads < kind.threads else _ADOPT_MORE) * kind.usual:
            kind.fallback, kind.trial = (kind.threads, kind.usual), 0
            kind.threads, kind.usual = threads, mean
            kind.settled, kind.until_probe = None, _FIRST_PAUSE
        else:
            self._schedule_probe(kind, (sum(costs) / kind.usual) - len(costs))

    def _schedule_probe(self, kind: _Kind, lost: float) -> None:
        """Schedule the next probe after a failure that lost the time of `lost` usual steps."""
        kind.turn += 1
        kind.settled = kind.usual
        pause = min(_PAUSE_PER_LOSS * lost, _LONGEST_PAUSE)
        kind.until_probe = max(_SHORTEST_PAUSE, int(pause))


class StepThreads:
    """Sets torch's number of threads for each step by a `ThreadPolicy`, and times the step."""

    def __init__(self, most: int) -> None:
        self._policy = ThreadPolicy(most)

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Context in which a step with `num_rows` rows runs."""
        threads = self._policy.choose(num_rows)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        began = time.perf_counter()
        yield
        self._policy.observe(num_rows, time.perf_counter() - began)


# The costs of steps with drafts are measured for these numbers of rows. The last is their limit.
_DRAFT_SIZES = (2, 4, 8, 16, 32, 64, 128)


class Layers(Protocol):
    """Computes a decoder's layers for a step without torch's operators."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: IntArray,
        step: StepRows,
        work: WorkList,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The last layer's output for `rows`, or for all rows if None."""


MakeLayers = Callable[[Decoder, PooledKV, TorchAttention], Layers]


@dataclass(frozen=True, slots=True)
class CpuOptions:
    max_rows: int = 256  # Sequences in a step.
    max_seq_len: int | None = None
    gate: GateConfig | None = None  # None: never read a shared prefix once for several sequences.
    quantised: bool = False  # Store KV in e4m3.
    num_host_blocks: int = 0  # Blocks in the host tier.
    num_slots: int = 0  # Window slots; 0: blocks have the KV of all layers.
    num_host_slots: int = 0  # Window slots in the host tier.
    max_threads: int | None = None  # Limit for a `ThreadPolicy`; None: a fixed number of threads.


class ModelRunner:
    """`TieredRunner` over a decoder and its KV pool."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        options: CpuOptions | None = None,
        *,
        unit: Unit | None = None,
        make_layers: MakeLayers | None = None,
    ) -> None:
        """`unit`: the other ranks, on rank 0 of several. `make_layers`: replaces the computation of
        the layers with torch's operators."""
        options = options or CpuOptions()
        spec = model.spec
        num_slots = options.num_slots
        layout = KVLayout.of(
            spec,
            block_size,
            model.dtype,
            quantised=options.quantised,
            with_slots=num_slots > 0,
        )
        self._model = model
        self._cache = KVCache(layout, num_blocks, model.device, num_slots=num_slots)
        self._slots = _slot_table(num_blocks) if num_slots else None
        copies = self._cache.host_copies(options.num_host_blocks, options.num_host_slots)
        self._copies = copies if copies is None or unit is None else RankCopies(copies, unit)
        self._info = runner_info(
            model,
            self._cache,
            num_blocks,
            options.max_seq_len,
            options.num_host_blocks,
            draft_sizes=_DRAFT_SIZES,
            num_slots=num_slots,
            num_host_slots=options.num_host_slots,
        )
        self._attention = _attention(self._cache, spec)
        max_blocks = -(-self._info.max_seq_len // block_size)
        self._inputs = InputBuilder(2 * options.max_rows, max_blocks, block_size)
        most = options.max_threads
        self._threads = None if most is None else StepThreads(most)
        self._layers: Layers | None = None
        if make_layers is not None and isinstance(self._attention, TorchAttention):
            self._layers = make_layers(model, self._cache.pooled, self._attention)
        self.planner = WorkPlanner(self._attention.shape, options.gate, WHOLE_SPANS)
        self._unit = unit

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def on_lost(self, tell: Callable[[], None]) -> None:
        if self._unit is not None:
            self._unit.on_lost(tell)

    def close(self) -> None:
        if self._unit is not None:
            self._unit.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        with detect_device_loss(self._model.device):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        inputs = self._inputs.build(plan)
        work = self.planner.plan(inputs.versions, inputs.step) if inputs.num_tokens else None
        needs_all = self._unit is None or needs_logits(inputs.samples)
        reads, changes = StepReads.of(plan.sequences), plan.slot_changes
        step = RankStep(plan.copies, inputs, work, reads, needs_all, slot_changes=changes)
        if self._threads is None or work is None:
            return self._sampled(step)
        with self._threads.step(inputs.num_tokens):
            return self._sampled(step)

    def _sampled(self, step: RankStep) -> StepResult:
        with together(self._unit):
            if self._unit is not None:
                self._unit.send(step)
            found = self._compute(step)
        read = {} if step.reads is None else step.reads.landed()
        if found is None:
            return StepResult({}, {}, read=read)
        specs = [spec for spec in step.inputs.samples if spec is not None]
        chosen = sample(found, specs) if step.needs_logits else results(specs, found.tolist())
        return replace(chosen, read=read)

    @torch.inference_mode()
    def compute(self, step: RankStep) -> None:
        """Run a step of rank 0 on another rank."""
        if self._copies is not None:
            self._copies.follow(step.transfers)
        self._compute(step)

    def _compute(self, step: RankStep) -> torch.Tensor | None:
        """Compute a step on this rank and fill `step.reads`.

        Returns float32 logits [sampled rows, vocab] if the step needs logits, else the tokens of
        the largest logits [sampled rows]. None without sampled rows."""
        inputs, reads, size = step.inputs, step.reads, self._info.block_size
        slots = None
        if self._slots is not None:
            self._slots.update(step.slot_changes)
            slots = self._slots.of(inputs.step)
        fresh_slots = None if slots is None else slots.fresh_pages(size)
        self._cache.prepare(step.copies, inputs.step.fresh_pages(size), fresh_slots)
        if step.work is None:
            return None
        asked = [row for row, spec in enumerate(inputs.samples) if spec is not None]
        logit_rows = self._tensor(inputs.logit_rows[asked])
        needs_all = reads is not None or len(asked) == inputs.num_tokens
        hidden = self._forward(inputs, slots, step.work, None if needs_all else logit_rows)
        if reads is not None:
            reads.take(self._model.final(hidden), self._model.head)
            hidden = hidden.index_select(0, logit_rows)
        if not asked:
            return None
        return self._model.logits(hidden) if step.needs_logits else self._model.best(hidden)

    def _forward(
        self,
        inputs: StepInputs,
        slots: StepRows | None,
        work: WorkList,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The last layer's output for `rows`, or for all rows if None.

        `slots`: the step with tables of window slots, if layers have them."""
        token_ids = self._tensor(inputs.token_ids)
        if self._layers is not None:
            return self._layers.forward(token_ids, inputs.positions, inputs.step, work, rows)
        attention = self._attention
        if isinstance(attention, GroupedAttention):
            attend = partial(attention.run, plan=attention.plan(work, inputs.step, slots))
        else:
            attend = partial(attention.run, plan=attention.plan(work, inputs.step))
        return self._model.forward(token_ids, self._tensor(inputs.positions), attend, rows)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        assert self._copies is not None, "there is no host tier"
        self._copies.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        assert self._copies is not None, "there is no host tier"
        return self._copies.landed(wait=wait)

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).long().to(self._model.device)


def _slot_table(num_blocks: int) -> "SlotTable":
    from parrot.engine.runner.windows import SlotTable  # Only models with window slots.

    return SlotTable(num_blocks)


def _attention(cache: KVCache, spec: DecoderSpec) -> TorchAttention | GroupedAttention:
    groups = cache.pooled_layers()
    parts = [
        TorchAttention(
            pool,
            spec.layers[layers[0]].attention.num_heads,
            [spec.rules[layer] for layer in layers],
        )
        for layers, pool, _ in groups
    ]
    if len(parts) == 1 and not groups[0].in_slots:
        return parts[0]
    return GroupedAttention(parts, groups)
