"""A runner without a model that checks the scheduler's handling of KV."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parrot.engine.core.steps import (
    PENDING,
    LaunchedStep,
    PoolSpec,
    RunnerInfo,
    SampleSpec,
    ScoreSpec,
    SequenceStep,
    StateRead,
    StateSum,
    StepPlan,
    StepResult,
    TokenScores,
    sample_specs,
)
from parrot.engine.runner.sampling import results
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs

EMPTY = 0
_LETTERS, _NUM_LETTERS = 97, 26
Pair = tuple[SequenceStep, Sequence[int]]


def chain(token_ids: Sequence[int]) -> list[int]:
    """A value for each position that depends on its token and all earlier tokens, like KV."""
    values, value = [], 1
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values


@dataclass(frozen=True, slots=True)
class States:
    """A `StateSum` that keeps all added pairs of a position and its `chain` value."""

    added: tuple[tuple[int, int], ...]
    is_finite: bool = True

    def plus(self, other: StateSum) -> "States":
        assert isinstance(other, States), other
        return States(self.added + other.added, self.is_finite and other.is_finite)

    def unit(self) -> bytes | None:
        return repr(self.added).encode() if self.is_finite else None


class CheckingRunner:
    """A runner whose KV cache has a `chain` value in each slot, so that a read of foreign KV fails.

    Before and after the writes of a step, each sequence must read the KV of its own context. No
    block may have two writers. With `info.window`, the same holds for a cache of windows."""

    def __init__(
        self,
        info: RunnerInfo,
        tokens_of: Callable[[int], Sequence[int]],
        next_token: Callable[[Sequence[int]], int],
        *,
        nan_token: int | None = None,
        crash_token: int | None = None,
    ) -> None:
        self._info = info
        self._slots = [[EMPTY] * info.block_size for _ in range(info.num_blocks)]
        num_slots = 0 if info.window is None else info.window.num_slots
        self._windows = [[EMPTY] * info.block_size for _ in range(num_slots)]
        self._slot_of: dict[int, int] = {}  # The window slot of each block.
        self._tokens_of = tokens_of
        # The model: from the context to its next token. With penalties, this letter is shifted by
        # the number of different tokens in the output.
        self._next_token = next_token
        # Steps that compute `nan_token` have logits that are not finite. Steps that compute
        # `crash_token` raise.
        self._nan_token = nan_token
        self._crash_token = crash_token
        self.plans: list[StepPlan] = []
        self.num_drafts = 0
        self.violations: list[AssertionError] = []  # All failed checks.

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        return self.run_texts(plan, [self.text_of(s) for s in plan.sequences])

    def text_of(self, sequence: SequenceStep) -> list[int]:
        """The tokens of the sequence's context up to the end of the step. The step's own tokens are
        only in the plan."""
        known = list(self._tokens_of(sequence.context_id)[: sequence.end])
        text = known[: sequence.start] + list(sequence.token_ids)
        drafts = [] if sequence.sample is None else list(sequence.sample.drafts)
        assert len(text) == sequence.end, f"{sequence} starts after the end of its context"
        assert text in (known + drafts, [*known, PENDING]), (
            f"{sequence} computes tokens of another context"
        )
        return text

    def run_texts(self, plan: StepPlan, texts: Sequence[Sequence[int]]) -> StepResult:
        """Run the step. `texts` has the tokens [0, end) of each sequence's context."""
        self.plans.append(plan)
        try:
            return self._run(plan, texts)
        except AssertionError as violation:  # The core would handle it like a crash of the step.
            self.violations.append(violation)
            raise

    def _run(self, plan: StepPlan, texts: Sequence[Sequence[int]]) -> StepResult:
        self._slot_of.update(plan.slot_changes)
        for copy in plan.copies:
            assert copy.source != copy.target, copy
            kept = self._slots[copy.source][: copy.num_tokens]
            empty = [EMPTY] * (self._info.block_size - copy.num_tokens)
            self._slots[copy.target] = kept + empty
            if self._info.window is not None:
                kept = self._windows[copy.source_slot][: copy.num_tokens]
                self._windows[copy.target_slot] = kept + empty
        ids = [sequence.context_id for sequence in plan.sequences]
        assert len(set(ids)) == len(ids), f"a context occurs twice in a step: {ids}"
        pairs = list(zip(plan.sequences, texts, strict=True))
        self._check_reads(pairs)
        self._write_all(pairs)
        self._check_reads(pairs)
        return self._sample(pairs)

    def _check_reads(self, pairs: Sequence[Pair]) -> None:
        for sequence, text in pairs:
            found = [self._slot(sequence, position) for position in range(sequence.start)]
            expected = chain(text[: sequence.start])
            assert found == expected, f"context {sequence.context_id} reads foreign KV"
            if self._info.window is not None:
                self._check_window(sequence, text, self._info.window.num_tokens)

    def _check_window(self, sequence: SequenceStep, text: Sequence[int], size: int) -> None:
        values = chain(text[: sequence.start])
        for position in range(max(0, sequence.start + 1 - size), sequence.start):
            found = self._window_slot(sequence, position)
            assert found == values[position], f"context {sequence.context_id}: a wrong window"

    def _window_slot(self, sequence: SequenceStep, position: int) -> int:
        block = sequence.block_ids[position // self._info.block_size]
        return self._windows[self._slot_of[block]][position % self._info.block_size]

    def _slot(self, sequence: SequenceStep, position: int) -> int:
        size = self._info.block_size
        return self._slots[sequence.block_ids[position // size]][position % size]

    def _write_all(self, pairs: Sequence[Pair]) -> None:
        size = self._info.block_size
        writers: dict[int, int] = {}
        slot_writers: dict[int, int] = {}
        for sequence, text in pairs:
            assert sequence.token_ids, f"context {sequence.context_id} computes nothing"
            assert len(sequence.block_ids) == -(-sequence.end // size), sequence
            if self._crash_token in text[sequence.start :]:
                raise RuntimeError("crash token")
            values = chain(text)
            for position in range(sequence.start, sequence.end):
                block = sequence.block_ids[position // size]
                writer = writers.setdefault(block, sequence.context_id)
                assert writer == sequence.context_id, f"block {block} has two writers"
                self._slots[block][position % size] = values[position]
                if self._windows:
                    slot = self._slot_of[block]
                    writer = slot_writers.setdefault(slot, block)
                    assert writer == block, f"slot {slot} has two blocks"
                    self._windows[slot][position % size] = values[position]

    def _sample(self, pairs: Sequence[Pair]) -> StepResult:
        tokens: dict[int, int] = {}
        errors: dict[int, ParrotError] = {}
        scores: dict[int, TokenScores] = {}
        read: dict[int, StateRead] = {}
        further: dict[int, Sequence[int]] = {}
        for sequence, text in pairs:
            if (spec := sequence.read) is not None:
                read[spec.job_id] = self._read(sequence, spec, text)
            if (sample := sequence.sample) is None:
                continue
            assert sequence.end == sample.position + len(sample.drafts), sequence
            self.num_drafts += len(sample.drafts)
            specs = sample_specs(sequence)
            chosen = [self._sampled(spec, text[: spec.position]) for spec in specs]
            result = results(specs, chosen)
            tokens |= result.tokens
            errors |= result.errors
            further |= result.further
            if (num_top := sample.sampling.logprobs) is not None and chosen[0] >= 0:
                ids = [chosen[0], *range(num_top)]
                scores[sample.job_id] = TokenScores(ids, [-float(len(text))] * len(ids))
        return StepResult(tokens, errors, scores=scores, read=read, further=further)

    def _sampled(self, sample: SampleSpec, text: Sequence[int]) -> int:
        return -1 if self._nan_token in text else self._choose(sample, text)

    def _read(
        self, sequence: SequenceStep, spec: PoolSpec | ScoreSpec, text: Sequence[int]
    ) -> StateRead:
        if isinstance(spec, ScoreSpec):
            return self._scored(sequence.start + spec.start, spec, text)
        first, stop = (sequence.start + at for at in spec[1:])
        assert sequence.start <= first < stop == sequence.end, sequence
        values = tuple(enumerate(chain(text)))[first:stop]
        return States(values, self._nan_token not in text[first:stop])

    def _scored(self, first: int, spec: ScoreSpec, text: Sequence[int]) -> Logprobs:
        """Rows whose numbers depend on the `chain` value before each target and on the rank of each
        likely token."""
        found, values = Logprobs(1 + spec.num_top), chain(text)
        assert first + len(spec.targets) <= len(text), spec
        for at, target in enumerate(spec.targets, first):
            assert at + 1 == len(text) or text[at + 1] == target, spec
            number = math.nan if self._nan_token in text[: at + 1] else -(values[at] % 997)
            found.add([target, *range(spec.num_top)], [number - i for i in range(1 + spec.num_top)])
        return found

    def _choose(self, sample: SampleSpec, text: Sequence[int]) -> int:
        token = self._next_token(text)
        if sample.sampling.adjusts_logits:
            context = [*sample.context_ids, *sample.drafts]
            output = [*sample.output_ids, *sample.drafts]
            assert context == list(text), (
                f"job {sample.job_id} has penalties for tokens of another context"
            )
            assert output == context[len(context) - len(output) :], (
                "the output is not the end of its context"
            )
            token = _LETTERS + (token - _LETTERS + len(set(output))) % _NUM_LETTERS
        return token


class LaunchingRunner(CheckingRunner):
    """A runner that also launches steps. Like a device, it computes a launched step later, from the
    tokens that were known at the launch. A step counts as ahead if the previous step is running."""

    num_ahead = 0
    num_fills_ahead = 0  # Steps ahead with more than one token of a sequence.
    num_penalized_ahead = 0  # Penalized samples in steps ahead whose newest token is pending.
    refuses: Callable[[StepPlan], bool] | None = None  # True: the step is not launched.

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if self.refuses is not None and self.refuses(plan):
            return None
        if previous is not None:
            self.num_ahead += 1
            self.num_fills_ahead += any(len(s.token_ids) > 1 for s in plan.sequences)
            self.num_penalized_ahead += sum(
                s.sample is not None
                and s.sample.sampling.adjusts_logits
                and s.token_ids[-1] == PENDING
                for s in plan.sequences
            )
        assert previous is None or isinstance(previous, Launched)
        texts = [self.text_of(s) for s in plan.sequences]
        known = tuple(_with_token(s) for s in plan.sequences)
        return Launched(self, replace(plan, sequences=known), texts, previous)


def _with_token(sequence: SequenceStep, *token: int) -> SequenceStep:
    """A copy with the current output and context of the sequence, plus `token` if it is given."""
    spec = sequence.sample
    if spec is None:
        return sequence
    output, context = [*spec.output_ids, *token], [*spec.context_ids, *token]
    return sequence._replace(sample=spec._replace(output_ids=output, context_ids=context))


@dataclass(slots=True, eq=False)
class Launched:
    runner: LaunchingRunner
    plan: StepPlan
    texts: list[list[int]]
    previous: "Launched | None"
    result: StepResult | None = None

    def wait_until_due(self) -> None:
        """This device is due as soon as it starts."""

    def wait(self) -> StepResult:
        sequences = list(self.plan.sequences)
        for index, text in enumerate(self.texts):
            if text[-1] == PENDING:
                text[-1] = self._token_of(sequences[index].context_id)
                sequences[index] = _with_token(sequences[index], text[-1])
        self.previous = None
        plan = replace(self.plan, sequences=tuple(sequences))
        self.result = self.runner.run_texts(plan, self.texts)
        return self.result

    def _token_of(self, context_id: int) -> int:
        """The token that the previous step sampled for the context. If that sample failed, any
        token is fine."""
        before = self.previous
        assert before is not None, (
            f"context {context_id} has a pending token without a previous step"
        )
        assert before.result is not None, "steps must be awaited in order"
        specs = {s.context_id: s.sample for s in before.plan.sequences}
        spec = specs[context_id]
        assert spec is not None, f"no token was sampled for context {context_id}"
        return before.result.tokens.get(spec.job_id, 0)
