"""After every step, the device's block table equals the blocks of the plan."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.steps import PENDING, SampleSpec, SequenceStep, StepPlan
from parrot.engine.runner.inputs import InputBuilder, StepInputs
from parrot.protocol.sampling import ResolvedSampling

GREEDY = ResolvedSampling(temperature=0)
SIZE = 4


def sequence(
    context_id: int, start: int, tokens: list[int], blocks: list[int], job: int | None = None
) -> SequenceStep:
    spec = None if job is None else SampleSpec(job, GREEDY, 0, 0)
    return SequenceStep(context_id, tokens, start, blocks, spec)


class Device:
    """Applies the changes as the device does."""

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
    assert not inputs.only_decodes


def test_pending_tokens_and_their_contexts():
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


def test_a_list_of_blocks_may_change_after_the_step():
    device = Device(InputBuilder(4, 8, SIZE), 4)
    blocks = [3]
    device.step(sequence(7, 0, [1, 2], blocks))
    blocks.append(5)
    assert device.step(sequence(7, 2, [1, 2, 3], blocks)).changed_to.tolist() == [3, 5]


def test_rows_of_contexts_that_are_not_in_the_step_are_reused():
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


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_random_steps(seed: int) -> None:
    """Contexts grow, change their last block, or start again with no blocks. There are more
    contexts than rows."""
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
