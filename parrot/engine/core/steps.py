"""Steps: the values that pass between the local scheduler and whatever runs a step, and what steps
cost.

The KV of a context is a flat block table: block i holds positions [i*block_size, (i+1)*block_size).
Contexts that share a prefix share its full blocks, so equal leading block ids mean shared KV:

    context 7   [ 3 | 9 | 4 ]          parent
    context 8   [ 3 | 9 | 6 | 1 ]      forked from 7 inside its third block: block 4 was copied to 6

Some are named tuples because hundreds are made in each step, and frozen dataclasses take four times
as long.

The costs are fitted to the times that steps took:

    seconds = steps * step_s + sequences * sequence_s + tokens read * token_s
            + prompt tokens computed * prefill_s

Each cost is a scale times its usual value. Weighted least squares on relative errors, in which old
observations fade, find the scales; until the observations tell the costs apart, the scales differ
little from the one that explains all of the time.
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
"""The sampling fields that an engine built on `StepRunner` carries out; others are refused by name.
Those that constrain outputs besides, if it knows the bytes of its tokens."""


PENDING = -1
"""Stands in a plan for the token that the step before it samples for the same context, and which
is not known yet."""


class SampleSpec(NamedTuple):
    """Ask for one token after the last position of a sequence.

    `seed` and `position` (the token's own, in its context) fix the random numbers, whatever else
    is in the batch. `output_ids` are the generated tokens and `context_ids` all tokens of the
    context, for penalties, as far as they are known: without the one that is `PENDING`. Both only
    grow while the job runs, and are views that the runner must not keep. `resumed_ids` came before
    `output_ids` and count for penalties, too. `constraint`: which tokens it may be, at the place
    behind `output_ids`.

    `drafts` come behind both lists, as if they had been sampled before: see `sample_specs`."""

    job_id: int
    sampling: ResolvedSampling
    seed: int
    position: int
    output_ids: Sequence[int] = ()
    context_ids: Sequence[int] = ()
    constraint: Constraint | None = None
    drafts: tuple[int, ...] = ()
    resumed_ids: Sequence[int] = ()


class PoolSpec(NamedTuple):
    """Ask for the sum of a sequence's final hidden states, those of its tokens [start, end) in this
    step."""

    job_id: int
    start: int
    end: int


class ScoreSpec(NamedTuple):
    """Ask how likely `targets` are behind a sequence's tokens from `start` on, those of this step,
    one behind each; and for the `num_top` most likely tokens in their places."""

    job_id: int
    start: int
    targets: Sequence[int]
    num_top: int


class StateSum(Protocol):
    """A sum of final hidden states, as the model's last norm leaves them. It is a protocol because
    each runner has sums of its own arrays, and the core imports neither torch nor NumPy."""

    def plus(self, other: "StateSum") -> "StateSum": ...

    def unit(self) -> bytes | None:
        """The vector of this direction and length 1: little-endian float32. None if there is
        none, since the sum is not finite, or zero."""
        ...


StateRead = StateSum | Logprobs
"""The result of reading some final hidden states."""


class SequenceStep(NamedTuple):
    """One context's share of a step: compute KV at positions [start, start + len(token_ids)).

    `block_ids` covers [0, end); positions before `start` are already computed. The last tokens may
    be drafts, those of its `sample`: each is right if it is the token that is sampled before it.
    `read`: what is wanted of its final hidden states; then it has no `sample`."""

    context_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sample: SampleSpec | None
    read: PoolSpec | ScoreSpec | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        return 0 if self.sample is None else len(self.sample.drafts)


def sample_specs(sequence: SequenceStep) -> list[SampleSpec]:
    """One for each token that a step is to sample for a sequence: after its last token that is no
    draft, and after each draft. None of its tokens may be pending if it has drafts."""
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
    """Copy-on-write: before the step, copy the first `num_tokens` slots of one block to another."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All copies happen, in order, before any sequence is computed. No context is in it twice."""

    sequences: tuple[SequenceStep, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


class TokenScores(NamedTuple):
    """A row of `Logprobs`: the sampled token and the most likely ones, and log probabilities."""

    ids: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[job_id]` is the sampled token, for each sequence with a `sample`; a job whose logits
    were not finite is in `errors` instead. `broken`, by context id: why sequences could not be run
    at all. One bad sequence never spoils the others. `scores`: of the tokens of those that want
    log probabilities. `read[job_id]`: for each sequence that wants it, the sum of a `PoolSpec` or
    the rows of a `ScoreSpec`. `further[job_id]`: the tokens after that one, as many as there are
    right drafts."""

    tokens: dict[int, int]
    errors: dict[int, ParrotError]
    broken: dict[int, ParrotError] = field(default_factory=dict)
    scores: dict[int, TokenScores] = field(default_factory=dict)
    read: dict[int, StateRead] = field(default_factory=dict)
    further: dict[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The runner's limits and costs, for the control half. Memory in MiB. `costs` None: they are to
    be measured. `draft_sizes`: see `DraftCosts`; if there are none, sequences may have no drafts.
    `kv_dtype`: the type of the pool's numbers; empty: there is no pool. `num_host_blocks`: how many
    blocks of `block_bytes` its host tier holds. `num_ranks`: processes that it is divided among, of
    one of which memory and costs are. `device`: its make; empty: not known."""

    num_blocks: int
    block_size: int
    max_seq_len: int
    vocab_size: int
    model_mem: float
    cache_mem: float
    costs: StepCosts | None = None
    draft_sizes: tuple[int, ...] = ()
    kv_dtype: str = ""
    num_host_blocks: int = 0
    block_bytes: int = 0
    num_ranks: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy whole blocks between the tiers: block `blocks[i]` of the device to slot `slots[i]` of
    the host, or, if not `to_host`, back."""

    transfer_id: int
    to_host: bool
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Landed:
    """A transfer that is over. `seconds` that it took on its way, if it has `succeeded`: else its
    targets may hold anything."""

    transfer_id: int
    succeeded: bool
    seconds: float


class DeviceLost(Exception):
    """Raised by a runner that will never run a step again."""


class LaunchedStep(Protocol):
    """A step on its way."""

    def wait_until_due(self) -> None:
        """Return when it is time to launch the next step: late enough for that to take in what
        arrives meanwhile, and early enough for it to be there when this one ends. Raises
        `DeviceLost`."""
        ...

    def wait(self) -> StepResult:
        """Return when the step has run."""
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
        """Call `tell`, from any thread, if one of them ends: no step can be run any more."""
        ...

    def close(self) -> None:
        """End the others. No step may follow."""
        ...


@runtime_checkable
class OverlappingRunner(StepRunner, Protocol):
    """A runner that can take a step before the tokens of the one before it are known."""

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Take a step without waiting for it; None (and nothing done) when it must be `run`, with
        all tokens known. `previous`: the step before, if it has not been waited for; only then may
        tokens be `PENDING`. Steps still happen one after the other."""
        ...


@runtime_checkable
class TieredRunner(StepRunner, Protocol):
    """A runner with a host tier. Transfers take their time beside steps."""

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Begin these, in the order of all calls: behind every step that was run or launched
        before, ahead of every one after. What a transfer reads may be written by the steps after
        this call, and what it writes be given to them once it has landed; the runner sees to it
        that the transfer has read it by then."""
        ...

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        """The copies that are over and were not reported yet; with `wait`, at least one, if any
        is under way."""
        ...


_DEFAULTS = StepCosts()
_UNITS = (
    _DEFAULTS.step_s,
    _DEFAULTS.sequence_s,
    _DEFAULTS.token_s,
    _DEFAULTS.prefill_s,
)
_SIZE = len(_UNITS)
_FIT_MEMORY = 2000  # observations; older ones fade
_OBSERVATION_VARIANCE = 0.003  # squared relative error of one observation
_PRIOR_VARIANCE = 1.0  # squared relative difference of one scale from that of all, before the first
_MIN_RATIO, _MAX_RATIO = 1 / 64, 64.0  # bounds of a scale, relative to that of all
_MAX_SWEEPS = 100  # of the minimisation, one scale at a time; a few are enough
_OBSERVE_EVERY, _OBSERVE_FIRST = 8, 64  # steps; counting what they read takes time
_SOLVE_EVERY = 32  # observations; errors are weighed by the estimate, so it must not be old


@dataclass(slots=True)
class StepTotals:
    """The number of an engine's steps so far, and the sums of their sequences and prompt tokens."""

    num_steps: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0

    def add(self, num_steps: int, num_sequences: int, num_prompt_tokens: int) -> None:
        """Count steps, each with these."""
        self.num_steps += num_steps
        self.num_sequences += num_steps * num_sequences
        self.num_prompt_tokens += num_steps * num_prompt_tokens


class StepCostMeter:
    """Measures the costs of an engine's steps, all of the first and then some of them, unless the
    runner knows them."""

    def __init__(self, info: RunnerInfo) -> None:
        self._known = info.costs
        self._fit = StepCostFit()
        self._unique_kv = UniqueKv(info.block_size)
        self._num_steps = 0
        self._recent: StepCosts | None = None
        self._recent_until = 0  # steps

    def recent(self) -> StepCosts | None:
        """The costs as they were some steps ago, which takes no time; None before the first."""
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
        """Take in steps like this one that have run."""
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
    """Observes steps and estimates their costs. `costs` may be called from another thread."""

    def __init__(self) -> None:
        self._scales = [1.0] * _SIZE
        # Sums of the observations, in one list so that another thread never sees half of one:
        # products of features (row by row), of features and time, all features, all time.
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
        """Take in how long steps took. The counts are sums over these steps; tokens that several
        sequences of a step share are read once."""
        counts = (num_steps, num_sequences, num_tokens, num_prompt_tokens)
        parts = [count * unit for count, unit in zip(counts, _UNITS, strict=True)]
        predicted = sum([s * part for s, part in zip(self._scales, parts, strict=True)])
        if seconds <= 0 or predicted <= 0:
            return
        # Relative to the larger one, so that a wild observation in either direction moves little.
        weight = 1 / max(seconds, predicted if self.num_observed else seconds)
        features, target = [part * weight for part in parts], seconds * weight
        new = [a * b for a in features for b in features]
        new += [a * target for a in features]
        new += [sum(features), target]
        fade = 1 - 1 / _FIT_MEMORY
        self._sums = [fade * old + value for old, value in zip(self._sums, new, strict=True)]
        self.num_observed += 1
        # The first ones change much: after 1, 2, 4...
        is_power = self.num_observed & (self.num_observed - 1) == 0
        if self.num_observed % _SOLVE_EVERY == 0 or is_power:
            self._scales = self._solve()

    def costs(self) -> StepCosts | None:
        """The costs, all positive; None before the first observation."""
        if not self.num_observed:
            return None
        step_s, sequence_s, token_s, prefill_s = [
            scale * unit for scale, unit in zip(self._solve(), _UNITS, strict=True)
        ]
        return StepCosts(step_s=step_s, sequence_s=sequence_s, token_s=token_s, prefill_s=prefill_s)

    def _solve(self) -> list[float]:
        """Minimise, one scale at a time, within bounds."""
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
    """Counts tokens of KV, those in shared blocks once. From step to step only what changed is
    counted again: while the same sequences decode, that is next to nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._refs: Counter[int] = Counter()
        self._tables: dict[int, Sequence[int]] = {}  # by context id

    def count(self, sequences: Sequence[SequenceStep]) -> int:
        """Tokens that the attention of this step reads. Only the last block of a sequence may be
        partly filled, and nobody shares a block that is being written."""
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
        if table[:same] != known:  # it gave blocks away, or copied one to write to it
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
