"""What is sent to the device is, step after step, what the block tables say."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.plan import PENDING, SampleSpec, SequenceStep, StepPlan
from parrot.engine.kernels.adjustments import COUNT, END, FIRST, PENDING_AT, ROW, TOKEN
from parrot.engine.kernels.draw_settings import INVERSE_TEMPERATURE, TOP_K
from parrot.engine.kernels.noise_keys import noise_keys
from parrot.engine.runner.inputs import (
    ADJUSTED,
    DRAWN,
    LIMITED,
    InputBuilder,
    IntArray,
    StepInputs,
)
from parrot.protocol.sampling import SamplingConfig

GREEDY = SamplingConfig(temperature=0)
SIZE = 4


def sequence(
    context_id: int, start: int, tokens: list[int], blocks: list[int], job: int | None = None
) -> SequenceStep:
    spec = None if job is None else SampleSpec(job, GREEDY, 0, 0)
    return SequenceStep(context_id, tokens, start, blocks, spec)


class Device:
    """Applies the changes as the device would."""

    def __init__(self, builder: InputBuilder, rows: int) -> None:
        self.builder = builder
        self.table = np.zeros(rows * builder.width, dtype=np.int32)

    def step(self, *sequences: SequenceStep) -> StepInputs:
        inputs = self.builder.build(StepPlan(sequences))
        self.table[inputs.changed_at] = inputs.changed_to
        table = self.table.reshape(-1, self.builder.width)
        for s, row in zip([s for s in sequences if len(s.token_ids)], inputs.rows, strict=True):
            assert table[row, : len(s.block_ids)].tolist() == list(s.block_ids)
        return inputs


def test_arrays_of_a_mixed_step():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    inputs = device.step(
        sequence(7, 5, [10], [3, 1], job=70),
        sequence(8, 2, [20, 21, 22], [4, 2]),
        sequence(9, 0, [30, 31], [5], job=90),
        sequence(10, 0, [], []),
    )
    assert inputs.token_ids.tolist() == [10, 20, 21, 22, 30, 31]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert inputs.logit_rows.tolist() == [0, 5]
    assert [s.job_id for s in inputs.samples] == [70, 90]
    assert inputs.table_rows.tolist() == np.repeat(inputs.rows, [1, 3, 2]).tolist()
    assert inputs.step.tables.shape == (3, 3)
    assert inputs.choice == 0
    assert len(inputs.settings) == 0
    assert not inputs.only_decodes


def test_pending_tokens_and_whose_they_are():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    before = device.step(
        sequence(7, 5, [10], [3, 1], job=70),
        sequence(8, 2, [20, 21], [4], job=80),
        sequence(9, 0, [30, 31], [5]),
    )
    assert before.sampled == (7, 8)
    assert before.pending == ()
    inputs = device.step(
        sequence(9, 2, [32, 33, 34], [5, 6], job=90),
        sequence(8, 4, [PENDING], [4, 7], job=80),
        sequence(10, 0, [40], [8]),
        sequence(7, 6, [PENDING], [3, 1], job=70),
    )
    assert inputs.pending == (8, 7)
    assert inputs.pending_at.tolist() == [3, 5]
    assert inputs.sampled == (9, 8, 7)


def test_a_decode_that_stays_in_its_block_sends_no_entries():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    first = device.step(sequence(7, 5, [10], [3, 1], job=1))
    second = device.step(sequence(7, 6, [11], [3, 1], job=1))
    third = device.step(sequence(7, 8, [12], [3, 1, 6], job=1))
    assert first.only_decodes
    assert second.changed_at.tolist() == []
    assert third.changed_to.tolist() == [1, 6]
    assert first.versions == second.versions == third.versions


def test_a_copied_last_block_keeps_the_version_and_other_changes_do_not():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    first = device.step(sequence(7, 9, [10], [3, 1, 5], job=1))
    copied = device.step(sequence(7, 10, [11], [3, 1, 9], job=1))
    moved = device.step(sequence(7, 11, [12], [3, 2, 9], job=1))
    assert first.versions == copied.versions != moved.versions


def test_a_list_that_its_owner_changes_later_is_not_trusted():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    blocks = [3]
    device.step(sequence(7, 0, [1, 2], blocks))
    blocks.append(5)
    assert device.step(sequence(7, 2, [1, 2, 3], blocks)).changed_to.tolist() == [3, 5]


def test_rows_of_absent_contexts_are_taken():
    device = Device(InputBuilder(2, 4, SIZE), 2)
    device.step(sequence(1, 0, [1], [1]), sequence(2, 0, [1], [2]))
    device.step(sequence(3, 0, [1], [3]), sequence(2, 1, [1], [2]))
    device.step(sequence(1, 1, [1], [1]), sequence(3, 1, [1], [3]))


def test_everything_is_sent_again_after_a_failure():
    device = Device(InputBuilder(2, 4, SIZE), 2)
    device.step(sequence(1, 0, [1], [1]))
    device.builder.forget()
    device.table[:] = -9
    assert device.step(sequence(1, 1, [1], [1])).changed_to.tolist() == [1]


def test_what_it_takes_to_choose_a_token():
    def choice(**changes: object) -> int:
        sampling = SamplingConfig.model_validate({"temperature": 0, **changes})
        builder = InputBuilder(2, 4, SIZE)
        plan = StepPlan((SequenceStep(1, [1], 0, [0], SampleSpec(1, sampling, 0, 1)),))
        inputs = builder.build(plan)
        assert (inputs.adjustments is not None) == bool(inputs.choice & ADJUSTED)
        assert len(inputs.settings) == bool(inputs.choice & DRAWN)
        return inputs.choice

    assert choice() == choice(temperature=1.0, top_k=1) == 0
    assert choice(temperature=1.0) == choice(temperature=1.0, min_p=0.1) == DRAWN
    assert choice(temperature=1.0, top_p=0.9) == choice(temperature=1.0, top_k=2) == DRAWN | LIMITED
    assert choice(presence_penalty=0.5) == choice(repetition_penalty=1.2) == ADJUSTED
    assert choice(temperature=1.0, logit_bias={3: 1.0}) == ADJUSTED | DRAWN


def test_settings_follow_the_samples():
    drawn, greedy = SamplingConfig(temperature=0.5, top_k=9), SamplingConfig(temperature=0)
    builder = InputBuilder(4, 8, SIZE)

    def settings(*samplings: SamplingConfig | None, start: int = 0, count: int = 1) -> IntArray:
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
    """A step of contexts with one token each, and what becomes of their logits."""

    def __init__(self) -> None:
        self.builder = InputBuilder(4, 8, SIZE)

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


def test_adjustments_are_of_the_rows_that_want_them() -> None:
    frequency, both = (
        SamplingConfig(frequency_penalty=0.5),
        SamplingConfig(repetition_penalty=1.2, presence_penalty=0.1),
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
    """Of the same context, with the same configuration or another one."""
    config, other = SamplingConfig(frequency_penalty=0.5), SamplingConfig(frequency_penalty=0.6)
    step = Adjusted()
    step.step(SampleSpec(1, config, 0, 3, [5, 5], [5, 5]))
    step.step(SampleSpec(2, config, 0, 4, [6, 6, 6], [5, 5, 6, 6, 6]))
    assert step.counts == [{6: 3}]
    step.step(SampleSpec(2, other, 0, 4, [6], [6]))
    assert step.counts == [{6: 1}]
    step.builder.forget()
    step.step(SampleSpec(2, other, 0, 4, [6, 7], [6, 7]))
    assert step.counts == [{6: 1, 7: 1}]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_random_steps(seed: int) -> None:
    """Contexts grow, are forked, lose blocks, and go; ids are used again for other contexts."""
    rng = random.Random(seed)
    device = Device(InputBuilder(6, 16, SIZE), 6)
    contexts: dict[int, tuple[int, list[int]]] = {}
    for _ in range(30):
        steps = []
        for context_id in rng.sample(range(9), rng.randint(1, 5)):
            done, blocks = contexts.get(context_id, (0, []))
            if rng.random() < 0.2:
                done, blocks = 0, []
            elif rng.random() < 0.2 and blocks:
                blocks = [*blocks[:-1], rng.randrange(100)]
            count = min(rng.choice((1, 1, 1, 5)), 16 * SIZE - done)
            end = done + count
            blocks = blocks + [rng.randrange(100) for _ in range(-(-end // SIZE) - len(blocks))]
            steps.append(sequence(context_id, done, [0] * count, blocks))
            contexts[context_id] = (end, blocks)
        device.step(*steps)
