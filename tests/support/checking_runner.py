"""A runner without a model that proves what the scheduler promises about KV."""

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
    """A value for each position that depends on its token and all before it, as KV does."""
    values, value = [], 1
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values


@dataclass(frozen=True, slots=True)
class States:
    """A `StateSum` that remembers what was added: positions, and their `chain` values."""

    added: tuple[tuple[int, int], ...]
    is_finite: bool = True

    def plus(self, other: StateSum) -> "States":
        assert isinstance(other, States), other
        return States(self.added + other.added, self.is_finite and other.is_finite)

    def unit(self) -> bytes | None:
        return repr(self.added).encode() if self.is_finite else None


class CheckingRunner:
    """Its KV cache holds, for each slot, the `chain` value that was written there. Every step
    asserts that what a sequence reads is its own context, before and after the step's writes, and
    that no block has two writers; what fails is also kept in `violations`. With `info.window`, a
    second cache has the slots of windows, and the same holds for the windows of all tokens.

    `next_token(context_ids)` is the model; with penalties, its letter is moved on by the
    number of different tokens in the output. `nan_token` and `crash_token` are faults: logits that
    are not finite, or an exception, whenever a step computes such a token."""

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
        self._slot_of: dict[int, int] = {}  # Of blocks.
        self._tokens_of = tokens_of
        self._next_token = next_token
        self._nan_token = nan_token
        self._crash_token = crash_token
        self.plans: list[StepPlan] = []
        self.num_drafts = 0
        self.violations: list[AssertionError] = []

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        return self.run_texts(plan, [self.text_of(s) for s in plan.sequences])

    def text_of(self, sequence: SequenceStep) -> list[int]:
        """The tokens of its context, up to what the step computes, which only the plan knows."""
        known = list(self._tokens_of(sequence.context_id)[: sequence.end])
        text = known[: sequence.start] + list(sequence.token_ids)
        drafts = [] if sequence.sample is None else list(sequence.sample.drafts)
        assert len(text) == sequence.end, f"{sequence} begins beyond its context"
        assert text in (known + drafts, [*known, PENDING]), f"{sequence} computes foreign tokens"
        return text

    def run_texts(self, plan: StepPlan, texts: Sequence[Sequence[int]]) -> StepResult:
        """`texts`: for each sequence, the tokens [0, end) of its context."""
        self.plans.append(plan)
        try:
            return self._run(plan, texts)
        except AssertionError as violation:  # the core would take it for a crash and go on
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
        assert len(set(ids)) == len(ids), f"a context is twice in a step: {ids}"
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
        """Numbers that tell the `chain` value behind which a target comes, and its place among the
        likely ones."""
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
            assert context == list(text), f"job {sample.job_id} is told of foreign tokens"
            assert output == context[len(context) - len(output) :], "its output is another's"
            token = _LETTERS + (token - _LETTERS + len(set(output))) % _NUM_LETTERS
        return token


class LaunchingRunner(CheckingRunner):
    """Also launches steps. Like a device, it knows of a launched step what it was told then, and
    does it later: when it is waited for. `num_ahead` counts those launched while another was on its
    way, `num_fills_ahead` those of them with more than one token of a sequence, and
    `num_penalized_ahead` the penalized samples in them whose newest token is pending. What it
    `refuses` is not launched."""

    num_ahead = 0
    num_fills_ahead = 0
    num_penalized_ahead = 0
    refuses: Callable[[StepPlan], bool] | None = None

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
    """With its output and context as they are now, and a token more if one is given."""
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
        """A device that is due as soon as it begins."""

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
        """The token that the last step sampled for the context; any token if that failed."""
        before = self.previous
        assert before is not None, f"context {context_id} waits for no step"
        assert before.result is not None, "steps are not waited for in order"
        specs = {s.context_id: s.sample for s in before.plan.sequences}
        spec = specs[context_id]
        assert spec is not None, f"no token was sampled for context {context_id}"
        return before.result.tokens.get(spec.job_id, 0)
