"""The values that pass between the local scheduler and whatever runs a step.

The KV of a context is a flat block table: block i holds positions [i*block_size, (i+1)*block_size).
Contexts that share a prefix share its full blocks, so equal leading block ids mean shared KV:

    context 7   [ 3 | 9 | 4 ]          parent
    context 8   [ 3 | 9 | 6 | 1 ]      forked from 7 inside its third block: block 4 was copied to 6

Some are named tuples because hundreds are made in each step, and frozen dataclasses take four times
as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import StepCosts
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs, SamplingConfig

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
"""The sampling fields that an engine built on `Runner` carries out; others are refused by name.
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
    sampling: SamplingConfig
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
    """A sum of final hidden states, as the model's last norm leaves them."""

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


class Runner(Protocol):
    """Runs steps, one after the other, always from the same thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class DividedRunner(Runner, Protocol):
    """A runner that may be divided among processes."""

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, if one of them ends: no step can be run any more."""
        ...

    def close(self) -> None:
        """End the others. No step may follow."""
        ...


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that can take a step before the tokens of the one before it are known."""

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Take a step without waiting for it; None (and nothing done) when it must be `run`, with
        all tokens known. `previous`: the step before, if it has not been waited for; only then may
        tokens be `PENDING`. Steps still happen one after the other."""
        ...


@runtime_checkable
class TieredRunner(Runner, Protocol):
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
