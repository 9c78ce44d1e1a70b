"""A runner without a model that proves what the scheduler promises about KV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parrot.engine.plan import LaunchedStep, RunnerInfo, SequenceStep, StepPlan, StepResult
from parrot.protocol.errors import ModelNumerics, ParrotError

EMPTY = 0


def chain(token_ids: Sequence[int]) -> list[int]:
    """What the KV of each position depends on: its token and all before it."""
    values, value = [], 1
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values


class CheckingRunner:
    """Its KV cache holds, for each slot, the `chain` value that was written there. Every step
    asserts that what a sequence reads is its own context, before and after the step's writes, and
    that no block has two writers; what fails is also kept in `violations`.

    `next_token(context_ids)` is the model; `nan_token` and `crash_token` are faults: logits that
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
        self._tokens_of = tokens_of
        self._next_token = next_token
        self._nan_token = nan_token
        self._crash_token = crash_token
        self.plans: list[StepPlan] = []
        self.violations: list[AssertionError] = []

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        try:
            return self._run(plan)
        except AssertionError as violation:  # the core would take it for a crash and go on
            self.violations.append(violation)
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            assert copy.source != copy.target, copy
            kept = self._slots[copy.source][: copy.num_tokens]
            self._slots[copy.target] = kept + [EMPTY] * (self._info.block_size - copy.num_tokens)
        ids = [sequence.context_id for sequence in plan.sequences]
        assert len(set(ids)) == len(ids), f"a context is twice in a step: {ids}"
        self._check_reads(plan)
        self._write_all(plan)
        self._check_reads(plan)
        return self._sample(plan)

    def _check_reads(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            expected = chain(self._tokens_of(sequence.context_id)[: sequence.start])
            found = [self._slot(sequence, position) for position in range(sequence.start)]
            assert found == expected, f"context {sequence.context_id} reads foreign KV"

    def _slot(self, sequence: SequenceStep, position: int) -> int:
        size = self._info.block_size
        return self._slots[sequence.block_ids[position // size]][position % size]

    def _write_all(self, plan: StepPlan) -> None:
        size = self._info.block_size
        writers: dict[int, int] = {}
        for sequence in plan.sequences:
            tokens = self._tokens_of(sequence.context_id)
            assert sequence.token_ids, f"context {sequence.context_id} computes nothing"
            assert list(tokens[sequence.start : sequence.end]) == list(sequence.token_ids)
            assert len(sequence.block_ids) == -(-sequence.end // size), sequence
            if self._crash_token in sequence.token_ids:
                raise RuntimeError("crash token")
            values = chain(tokens[: sequence.end])
            for position in range(sequence.start, sequence.end):
                block = sequence.block_ids[position // size]
                writer = writers.setdefault(block, sequence.context_id)
                assert writer == sequence.context_id, f"block {block} has two writers"
                self._slots[block][position % size] = values[position]

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens: dict[int, int] = {}
        errors: dict[int, ParrotError] = {}
        for sequence in plan.sequences:
            if (sample := sequence.sample) is None:
                continue
            assert sequence.end == len(sample.context_ids), sequence
            if self._nan_token in sample.context_ids:
                errors[sample.job_id] = ModelNumerics("logits are not finite")
            else:
                tokens[sample.job_id] = self._next_token(sample.context_ids)
        return StepResult(tokens, errors)


class LaunchingRunner(CheckingRunner):
    """Also launches steps: it does them when they are waited for, with the tokens that the core
    knows by then. `num_ahead` counts those launched while another was on its way."""

    num_ahead = 0

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if any(len(s.token_ids) != 1 or s.sample is None for s in plan.sequences):
            return None
        self.num_ahead += previous is not None
        return _Launched(self, plan)

    def with_known_tokens(self, plan: StepPlan) -> StepPlan:
        """Without the sequences whose job has failed in the step before: they have no token. Those
        whose job has ended there may have got other tokens behind it since."""
        known = [self._with_known_tokens(s) for s in plan.sequences]
        return StepPlan(tuple(s for s in known if s.token_ids), plan.copies)

    def _with_known_tokens(self, sequence: SequenceStep) -> SequenceStep:
        sample = sequence.sample
        assert sample is not None
        return sequence._replace(
            token_ids=self._tokens_of(sequence.context_id)[sequence.start : sequence.end],
            sample=sample._replace(context_ids=sample.context_ids[: sequence.end]),
        )


@dataclass(frozen=True, slots=True)
class _Launched:
    runner: LaunchingRunner
    plan: StepPlan

    def wait(self) -> StepResult:
        return self.runner.run(self.runner.with_known_tokens(self.plan))
