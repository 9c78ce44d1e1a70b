"""The settings and adjustments of draws match the samples of their step."""

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.steps import PENDING, SampleSpec, SequenceStep, StepPlan
from parrot.engine.kernels.noise import noise_keys
from parrot.engine.kernels.sampling_layout import (
    COUNT,
    END,
    FIRST,
    INVERSE_TEMPERATURE,
    PENDING_AT,
    ROW,
    TOKEN,
    TOP_K,
)
from parrot.engine.runner.inputs import ADJUSTED, DRAWN, LIMITED, DrawBuilder, Draws, InputBuilder
from parrot.protocol.sampling import ResolvedSampling

GREEDY = ResolvedSampling(temperature=0)


class Builder:
    """Builds draws from plans, for up to four contexts."""

    def __init__(self) -> None:
        self.inputs = InputBuilder(4, 8, 4)
        self.draws = DrawBuilder(4)

    def build(self, plan: StepPlan) -> Draws:
        return self.draws.build(self.inputs.build(plan))


def test_the_operations_that_choosing_a_token_needs():
    def choice(**changes: object) -> int:
        sampling = ResolvedSampling.model_validate({"temperature": 0, **changes})
        plan = StepPlan((SequenceStep(1, [1], 0, [0], SampleSpec(1, sampling, 0, 1)),))
        draws = Builder().build(plan)
        assert (draws.adjustments is not None) == bool(draws.choice & ADJUSTED)
        assert len(draws.settings) == bool(draws.choice & DRAWN)
        return draws.choice

    assert choice() == choice(temperature=1.0, top_k=1) == 0
    assert choice(temperature=1.0) == choice(temperature=1.0, min_p=0.1) == DRAWN
    assert choice(temperature=1.0, top_p=0.9) == choice(temperature=1.0, top_k=2) == DRAWN | LIMITED
    assert choice(presence_penalty=0.5) == choice(repetition_penalty=1.2) == ADJUSTED
    assert choice(temperature=1.0, logit_bias={3: 1.0}) == ADJUSTED | DRAWN


def test_settings_match_the_samples():
    drawn, greedy = ResolvedSampling(temperature=0.5, top_k=9), ResolvedSampling(temperature=0)
    builder = Builder()

    def settings(*samplings: ResolvedSampling | None, start: int = 0, count: int = 1) -> IntArray:
        steps = []
        for i, sampling in enumerate(samplings):
            spec = None if sampling is None else SampleSpec(i, sampling, 40 + i, start + count)
            steps.append(SequenceStep(i, [1] * count, start, [i], spec))
        return builder.build(StepPlan(tuple(steps))).settings

    rows = settings(drawn, greedy, None, drawn)
    assert rows[:, TOP_K].tolist() == [9, 0, 0, 9]
    assert rows.view(np.float32)[:, INVERSE_TEMPERATURE].tolist() == [2.0, 0.0, 0.0, 2.0]
    assert rows[[0, 3], :2].tolist() == noise_keys([40, 43], [1, 1]).tolist()
    assert settings(None, drawn, start=1, count=2)[:, :2].tolist() == noise_keys([41], [3]).tolist()
    assert settings(greedy, greedy, start=3).tolist() == []


class Adjusted:
    """Builds steps of contexts with one token each, and keeps the adjustments of their logits."""

    def __init__(self) -> None:
        self.builder = Builder()

    def step(self, *samples: SampleSpec | None, count: int = 1, pending: bool = False) -> None:
        steps = []
        for i, spec in enumerate(samples):
            tokens = [*[1] * (count - 1), PENDING if pending else 1]
            steps.append(SequenceStep(i, tokens, 0, [i], spec))
        found = self.builder.build(StepPlan(tuple(steps))).adjustments
        assert found is not None
        self.rows = found.rows[:, [ROW, PENDING_AT]].tolist()
        spans = found.rows[:, [FIRST, END]].tolist()
        self.counts = [
            dict(found.entries[first:end, [TOKEN, COUNT]].tolist()) for first, end in spans
        ]


def test_only_rows_with_penalties_are_adjusted() -> None:
    frequency, both = (
        ResolvedSampling(frequency_penalty=0.5),
        ResolvedSampling(repetition_penalty=1.2, presence_penalty=0.1),
    )
    plain = SampleSpec(0, GREEDY, 0, 1)
    output = [5, 6, 5]
    penalized = [
        SampleSpec(1, frequency, 0, 4, output, [9, *output]),
        SampleSpec(2, both, 0, 4, output, [9, *output]),
    ]
    step = Adjusted()
    step.step(plain, penalized[0], None, penalized[1])
    assert step.rows == [[1, -1], [3, -1]]
    assert step.counts == [{5: 2, 6: 1}, {9: 0, 5: 2, 6: 1}]
    step.step(plain, penalized[0], None, penalized[1], pending=True)
    assert step.rows == [[1, 1], [3, 3]]
    output.append(6)
    penalized[1].context_ids.append(6)
    step.step(plain, penalized[0], None, penalized[1], count=2, pending=True)
    assert step.rows == [[1, 3], [2, 7]]
    assert step.counts == [{5: 2, 6: 2}, {9: 0, 5: 2, 6: 2}]


def test_a_job_does_not_inherit_the_counts_of_another() -> None:
    """Both jobs use the same context, with equal and with different configurations."""
    config, other = ResolvedSampling(frequency_penalty=0.5), ResolvedSampling(frequency_penalty=0.6)
    step = Adjusted()
    step.step(SampleSpec(1, config, 0, 3, [5, 5], [5, 5]))
    step.step(SampleSpec(2, config, 0, 4, [6, 6, 6], [5, 5, 6, 6, 6]))
    assert step.counts == [{6: 3}]
    step.step(SampleSpec(2, other, 0, 4, [6], [6]))
    assert step.counts == [{6: 1}]
    step.builder.inputs.forget()
    step.step(SampleSpec(2, other, 0, 4, [6, 7], [6, 7]))
    assert step.counts == [{6: 1, 7: 1}]
