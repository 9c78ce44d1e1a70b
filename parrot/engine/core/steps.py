"""Steps: the values that pass between the local scheduler and a runner, and the costs of steps.

The KV of a context is a flat block table: block i holds positions [i*block_size, (i+1)*block_size).
Contexts with a common prefix share its full blocks, so equal leading block ids mean shared KV:

    context 7   [ 3 | 9 | 4 ]          parent
    context 8   [ 3 | 9 | 6 | 1 ]      forked from 7 inside its third block: block 4 was copied to 6

Values of which a step has hundreds are named tuples. Frozen dataclasses take four times as long to
create.

The costs are fitted to measured step times:

    seconds = steps * step_s + sequences * sequence_s + tokens read * token_s
            + prompt tokens computed * prefill_s

Each cost is a default value times a scale. Weighted least squares on relative errors find the
scales, and old observations fade. While the observations cannot tell the costs apart, all scales
stay close to the one that explains the total time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import StepCosts
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs, ResolvedSampling

SUPPORTED_SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_gen_length",
        "ignore_tokenizer_eos",
        "stop_token_ids",
        "stop_str",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "logprobs",
    }
)
"""The sampling fields that engines with a `StepRunner` support. Other fields are rejected by name.

Fields that constrain outputs are also supported if the bytes of all tokens are known."""


PENDING = -1
"""In a plan, the token that the previous step samples for the same context."""


class SampleSpec(NamedTuple):
    """Request for one sampled token after the last position of a sequence.

    `seed` and `position` determine the random numbers, independently of the batch. `output_ids` and
    `context_ids` are growing views without the `PENDING` token. The runner must not keep them."""

    job_id: int
    sampling: ResolvedSampling
    seed: int
    position: int  # Of the sampled token in its context.
    output_ids: Sequence[int] = ()  # The generated tokens, for penalties.
    context_ids: Sequence[int] = ()  # All tokens of the context, for penalties.
    constraint: Constraint | None = None  # The tokens that are allowed after `output_ids`.
    drafts: tuple[int, ...] = ()  # Follow both lists; see `sample_specs`.
    resumed_ids: Sequence[int] = ()  # Precede `output_ids`, and count for penalties.


class PoolSpec(NamedTuple):
    """Request for the sum of the final hidden states of a sequence's tokens [start, end).

    Both indexes count the sequence's tokens of this step."""

    job_id: int
    start: int
    end: int


class ScoreSpec(NamedTuple):
    """Request for log probabilities of `targets`, and of the `num_top` most likely tokens.

    Target i follows token `start + i` of the sequence's tokens in this step."""

    job_id: int
    start: int
    targets: Sequence[int]
    num_top: int


class StateSum(Protocol):
    """A sum of final hidden states after the model's last norm.

    It is a protocol because each runner has its own arrays. The core imports no array library."""

    def plus(self, other: "StateSum") -> "StateSum": ...

    def unit(self) -> bytes | None:
        """The sum with length 1, as little-endian float32; None if it is zero or not finite."""
        ...


StateRead = StateSum | Logprobs
"""The result of a `PoolSpec` or a `ScoreSpec`."""


class SequenceStep(NamedTuple):
    """One context's part of a step: compute KV at positions [start, start + len(token_ids)).

    KV before `start` is already computed. The last tokens may be the drafts of `sample`. A draft
    token is accepted if it equals the token sampled at its position."""

    context_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]  # Blocks of positions [0, end).
    sample: SampleSpec | None
    read: PoolSpec | ScoreSpec | None = None  # A sequence with `read` has no `sample`.

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        return 0 if self.sample is None else len(self.sample.drafts)


def sample_specs(sequence: SequenceStep) -> list[SampleSpec]:
    """The specs of all tokens that a step samples for a sequence.

    One token is sampled after the last token before the drafts, and one after each draft token. A
    sequence with drafts must have no `PENDING` token."""
    spec = sequence.sample
    if spec is None:
        return []
    if not spec.drafts:
        return [spec]
    count = len(spec.drafts) + 1
    constraints: Sequence[Constraint | None] = [None] * count
    if spec.constraint is not None:
        constraints = spec.constraint.ahead(len(spec.output_ids), spec.drafts)
    job_id, sampling, seed, position, output_ids, context_ids, _, drafts, resumed_ids = spec
    return [
        SampleSpec(
            job_id,
            sampling,
            seed,
            position + i,
            output_ids,
            context_ids,
            constraints[i],
            drafts[:i],
            resumed_ids,
        )
        for i in range(count)
    ]


def without_drafts(sequence: SequenceStep, block_size: int) -> SequenceStep:
    count, spec = sequence.num_drafts, sequence.sample
    if spec is None or not count:
        return sequence
    return sequence._replace(
        token_ids=sequence.token_ids[:-count],
        block_ids=sequence.block_ids[: -(-(sequence.end - count) // block_size)],
        sample=spec._replace(drafts=()),
    )


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy-on-write: copy the KV of the first `num_tokens` tokens of a block before the step."""

    source: int
    target: int
    num_tokens: int
    # The window slots of both blocks; -1 in models without windows.
    source_slot: int = -1
    target_slot: int = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The sequences of a step. All `copies` happen first, in order. Contexts are distinct."""

    sequences: tuple[SequenceStep, ...]
    copies: tuple[BlockCopy, ...] = ()
    # Blocks and the window slots that were attached to them since the last plan.
    slot_changes: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)

    def written_blocks(self, block_size: int) -> set[int]:
        """The blocks to which the sequences write KV. Targets of copies are not included."""
        return {block for s in self.sequences for block in s.block_ids[s.start // block_size :]}


class TokenScores(NamedTuple):
    """A row of `Logprobs`: the sampled token, the most likely tokens, and their values."""

    ids: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step. All keys are job ids, except those of `broken`."""

    tokens: dict[int, int]  # The sampled token of each sequence with a `sample`.
    errors: dict[int, ParrotError]  # Of jobs whose logits are not finite.
    # Errors of sequences that could not be computed, by context id.
    broken: dict[int, ParrotError] = field(default_factory=dict)
    # Of jobs with log probabilities.
    scores: dict[int, TokenScores] = field(default_factory=dict)
    # The sum of a `PoolSpec` or the rows of a `ScoreSpec`.
    read: dict[int, StateRead] = field(default_factory=dict)
    # The tokens after `tokens`, one for each accepted draft token.
    further: dict[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """A runner's memory for the KV of layers with sliding windows. Without it, blocks have all KV.

    All blocks that a step reads or writes in these layers need a slot."""

    num_slots: int
    num_tokens: int  # Size of the largest window, in tokens.
    slot_bytes: int = 0
    num_host_slots: int = 0  # Slots in CPU memory.


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """A runner's limits and costs. Memory is in MiB. With ranks, memory and costs are per rank."""

    num_blocks: int
    block_size: int
    max_seq_len: int
    vocab_size: int
    model_mem: float
    cache_mem: float
    costs: StepCosts | None = None  # None: the costs must be measured.
    draft_sizes: tuple[int, ...] = ()  # See `DraftCosts`. Empty: no drafts.
    kv_dtype: str = ""  # Empty: there is no KV pool.
    num_host_blocks: int = 0  # Blocks in CPU memory, of `block_bytes` each.
    block_bytes: int = 0
    num_ranks: int = 1  # Processes among which the runner is divided.
    device: str = ""  # Name of the device; empty if not known.
    architecture: str = ""  # The model's, as config.json names it; empty if not known.
    window: WindowInfo | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of whole blocks between GPU memory and CPU memory."""

    transfer_id: int
    to_host: bool  # True: from blocks to slots. False: from slots to blocks.
    blocks: tuple[int, ...]
    slots: tuple[int, ...]  # `slots[i]` belongs to `blocks[i]`.
    of_windows: bool = False  # Both are window slots, on the GPU and in CPU memory.


@dataclass(frozen=True, slots=True)
class Landed:
    """A finished transfer."""

    transfer_id: int
    succeeded: bool  # False: the content of the targets is undefined.
    seconds: float  # Duration of a successful transfer.


class DeviceLost(Exception):
    """Raised by a runner that cannot run another step."""


class LaunchedStep(Protocol):
    """A step in flight."""

    def wait_until_due(self) -> None:
        """Return when the next step should be planned and launched.

        A later launch includes more requests, but must be done before this step ends. Raises
        `DeviceLost`."""
        ...

    def wait(self) -> StepResult:
        """Return when the step has finished."""
        ...


class StepRunner(Protocol):
    """Runs steps, one after the other, always from the same thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class DividedRunner(StepRunner, Protocol):
    """A runner that may be divided among processes."""

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, if a process ends. Then no step can run."""
        ...

    def close(self) -> None:
        """End the other processes. No step may follow."""
        ...


@runtime_checkable
class OverlappingRunner(StepRunner, Protocol):
    """A runner that accepts a step before the tokens of the previous step are known."""

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Start a step without a wait. Steps run one after the other.

        Returns None, and starts nothing, if the step must be `run` with all tokens known.
        `previous`: the previous step if it is in flight. Only then may tokens be `PENDING`."""
        ...


@runtime_checkable
class TieredRunner(StepRunner, Protocol):
    """A runner with a host tier. Transfers run in parallel with steps."""

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers, in the order of all calls and after all earlier steps.

        Later steps may write to the source of a transfer. The runner makes such a step wait until
        the transfer has read its source. Later steps use the target only once it has landed."""
        ...

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        """The finished transfers that were not returned before.

        `wait`: return at least one if any is in flight."""
        ...


_DEFAULTS = StepCosts()
_UNITS = (
    _DEFAULTS.step_s,
    _DEFAULTS.sequence_s,
    _DEFAULTS.token_s,
    _DEFAULTS.prefill_s,
)
_SIZE = len(_UNITS)
_FIT_MEMORY = 2000  # Observations that count. Estimates with a larger value change more slowly.
_OBSERVATION_VARIANCE = 0.003  # Squared relative error of one observation.
# Expected squared relative difference between a scale and the common scale.
_PRIOR_VARIANCE = 1.0
_MIN_RATIO, _MAX_RATIO = 1 / 64, 64.0  # Bounds of a scale relative to the common scale.
_MAX_SWEEPS = 100  # Most passes over the scales in one solution. Usually 2 to 10 are enough.
_OBSERVE_EVERY = 8  # Every 8th step is observed, because it takes time to count the tokens read.
_OBSERVE_FIRST = 64  # The first 64 steps are all observed.
_SOLVE_EVERY = 32  # Observations between two solutions. Errors are weighted by the last solution.


@dataclass(slots=True)
class StepTotals:
    """Totals over all steps of an engine so far."""

    num_steps: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0

    def add(self, num_steps: int, num_sequences: int, num_prompt_tokens: int) -> None:
        """Add `num_steps` steps, each with the given numbers."""
        self.num_steps += num_steps
        self.num_sequences += num_steps * num_sequences
        self.num_prompt_tokens += num_steps * num_prompt_tokens


class StepCostMeter:
    """Measures the costs of an engine's steps, unless the runner knows them."""

    def __init__(self, info: RunnerInfo) -> None:
        self._known = info.costs
        self._fit = StepCostFit()
        self._unique_kv = UniqueKv(info.block_size)
        self._num_steps = 0
        self._recent: StepCosts | None = None
        self._recent_until = 0  # Step number at which `recent` solves again.

    def recent(self) -> StepCosts | None:
        """The costs of at most `_SOLVE_EVERY` steps ago; None before the first step."""
        if self._recent is None or self._num_steps >= self._recent_until:
            self._recent = self.costs()
            self._recent_until = self._num_steps + _SOLVE_EVERY
        return self._recent

    def count(
        self,
        sequences: Sequence[SequenceStep],
        num_prompt_tokens: int,
        step_seconds: Sequence[float],
    ) -> None:
        """Record finished steps that all have these sequences."""
        if self._known is not None:
            self._num_steps += len(step_seconds)
            return
        for seconds in step_seconds:
            self._num_steps += 1
            if self._num_steps <= _OBSERVE_FIRST or self._num_steps % _OBSERVE_EVERY == 0:
                self._fit.observe(
                    seconds,
                    num_sequences=len(sequences),
                    num_tokens=self._unique_kv.count(sequences),
                    num_prompt_tokens=num_prompt_tokens,
                )

    def costs(self) -> StepCosts | None:
        """The costs; None before the first step. May be called from another thread."""
        return self._known or self._fit.costs()

    def prefill_s(self) -> float | None:
        """The `recent` cost of a prompt token; None before the first step."""
        costs = self.recent()
        return None if costs is None else costs.prefill_s


class StepCostFit:
    """Estimates costs from observed steps. `costs` may be called from another thread."""

    def __init__(self) -> None:
        self._scales = [1.0] * _SIZE
        # Sums over the observations: products of features (row by row), products of features and
        # time, features, time. One list, so that another thread never sees half an update.
        self._sums = [0.0] * (_SIZE * _SIZE + _SIZE + 2)
        self.num_observed = 0

    def observe(
        self,
        seconds: float,
        *,
        num_sequences: float,
        num_tokens: float,
        num_prompt_tokens: float,
        num_steps: float = 1.0,
    ) -> None:
        """Record the total time of `num_steps` steps. All counts are sums over these steps.

        A token that several sequences of a step share counts once."""
        counts = (num_steps, num_sequences, num_tokens, num_prompt_tokens)
        parts = [count * unit for count, unit in zip(counts, _UNITS, strict=True)]
        predicted = sum([s * part for s, part in zip(self._scales, parts, strict=True)])
        if seconds <= 0 or predicted <= 0:
            return
        # Errors are relative to the larger value, so that an outlier has little effect.
        weight = 1 / max(seconds, predicted if self.num_observed else seconds)
        features, target = [part * weight for part in parts], seconds * weight
        new = [a * b for a in features for b in features]
        new += [a * target for a in features]
        new += [sum(features), target]
        fade = 1 - 1 / _FIT_MEMORY
        self._sums = [fade * old + value for old, value in zip(self._sums, new, strict=True)]
        self.num_observed += 1
        # The first observations change the scales most, so solve after 1, 2, 4, 8, ...
        is_power = self.num_observed & (self.num_observed - 1) == 0
        if self.num_observed % _SOLVE_EVERY == 0 or is_power:
            self._scales = self._solve()

    def costs(self) -> StepCosts | None:
        """The estimated costs, all positive; None before the first observation."""
        if not self.num_observed:
            return None
        step_s, sequence_s, token_s, prefill_s = [
            scale * unit for scale, unit in zip(self._solve(), _UNITS, strict=True)
        ]
        return StepCosts(step_s=step_s, sequence_s=sequence_s, token_s=token_s, prefill_s=prefill_s)

    def _solve(self) -> list[float]:
        """Minimise the squared errors by coordinate descent, within the bounds."""
        sums = self._sums
        products = [sums[i * _SIZE : (i + 1) * _SIZE] for i in range(_SIZE)]
        targets = sums[_SIZE * _SIZE : -2]
        common = sums[-1] / sums[-2]
        prior = _OBSERVATION_VARIANCE / (_PRIOR_VARIANCE * common * common)
        scales = [common] * _SIZE
        for _ in range(_MAX_SWEEPS):
            before = list(scales)
            for i in range(_SIZE):
                others = _dot(products[i], scales) - products[i][i] * scales[i]
                best = (targets[i] - others + prior * common) / (products[i][i] + prior)
                scales[i] = min(max(best, _MIN_RATIO * common), _MAX_RATIO * common)
            if max(abs(a - b) for a, b in zip(before, scales, strict=True)) < 1e-6 * common:
                break
        return scales


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])


class UniqueKv:
    """Counts the KV tokens that a step reads. Tokens in shared blocks count once.

    Each step only updates the block tables that have changed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._refs: Counter[int] = Counter()
        self._tables: dict[int, Sequence[int]] = {}  # Block tables by context id.

    def count(self, sequences: Sequence[SequenceStep]) -> int:
        """The number of tokens that the attention of a step reads.

        Only the last block of a sequence may be partly filled, and then it is not shared."""
        tables: dict[int, Sequence[int]] = {}
        unfilled, size = 0, self._block_size
        for sequence in sequences:
            tables[sequence.context_id] = sequence.block_ids
            unfilled += len(sequence.block_ids) * size - sequence.end
        for context_id in self._tables.keys() - tables.keys():
            self._drop(self._tables.pop(context_id), 0)
        for context_id, table in tables.items():
            self._update(context_id, table)
        return len(self._refs) * size - unfilled

    def _update(self, context_id: int, table: Sequence[int]) -> None:
        known = self._tables.get(context_id, table[:0])
        if table == known:
            return
        self._tables[context_id] = table
        same = len(known)
        if table[:same] != known:  # The context lost blocks, or copied one before a write.
            pairs = enumerate(zip(known, table, strict=False))
            same = next((n for n, (old, new) in pairs if old != new), len(table))
            self._drop(known, same)
        for block in table[same:]:
            self._refs[block] += 1

    def _drop(self, table: Sequence[int], first: int) -> None:
        for block in table[first:]:
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
