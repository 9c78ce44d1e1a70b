"""The planner: every row attends to every earlier token of its context exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.attention.batch import Batch, build_batch
from parrot.engine.core.plan import SampleSpec, SequenceStep, StepPlan
from parrot.protocol.sampling import SamplingConfig

SPEC = SampleSpec(7, SamplingConfig(temperature=0), seed=0, position=0)


def sequence(blocks: list[int], start: int, count: int, *, sample: bool = False) -> SequenceStep:
    return SequenceStep(0, list(range(count)), start, blocks, SPEC if sample else None)


def attended(batch: Batch, plan: StepPlan, block_size: int) -> list[list[int]]:
    """For each row the pool slots it attends to, in the order of its positions, found through the
    work list alone. A square's rows attend to the slots that they write themselves."""
    slot_lists: list[list[int]] = []
    for span in batch.work.spans:
        offsets = np.arange(span.kv_len)
        slots = span.blocks[offsets // block_size] * block_size + offsets % block_size
        slot_lists += [slots.tolist() for _ in span.rows]
    for square in batch.work.squares:
        for row in range(square.first_row, square.first_row + square.num_rows):
            slot_lists.append(batch.slots[square.first_row : row + 1].tolist())
    indptr, parts = batch.work.merge_indptr, batch.work.merge_slots
    return [
        [slot for part in parts[indptr[r] : indptr[r + 1]] for slot in slot_lists[part]]
        for r in range(batch.num_rows)
    ]


def expected(plan: StepPlan, block_size: int) -> list[list[int]]:
    return [
        [s.block_ids[p // block_size] * block_size + p % block_size for p in range(position + 1)]
        for s in plan.sequences
        for position in range(s.start, s.end)
    ]


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int, int]:
    """Trees of contexts: each shares a random number of full blocks with an earlier one."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    tables: list[list[int]] = []
    starts: list[int] = []
    sequences = []
    free = iter(draw(st.permutations(range(200))))
    for _ in range(draw(st.integers(1, 7))):
        shared: list[int] = []
        if tables and draw(st.booleans()):
            parent = draw(st.integers(0, len(tables) - 1))
            full = starts[parent] // block_size
            shared = tables[parent][: draw(st.integers(0, full))]
        start = len(shared) * block_size + draw(st.integers(0, 9))
        count = draw(st.integers(1, 6))
        num_blocks = -(-(start + count) // block_size)
        table = shared + [next(free) for _ in range(num_blocks - len(shared))]
        tables.append(table)
        starts.append(start)
        sequences.append(sequence(table, start, count))
    return StepPlan(tuple(sequences)), block_size, draw(st.sampled_from([0, 1, 5, 30, 10_000]))


@settings(max_examples=300, deadline=None)
@given(plans())
def test_every_row_attends_to_each_token_before_it_once(case: tuple[StepPlan, int, int]) -> None:
    plan, block_size, gate = case
    batch = build_batch(plan, block_size, gate)
    got = attended(batch, plan, block_size)
    want = expected(plan, block_size)
    assert [sorted(slots) for slots in got] == [sorted(slots) for slots in want]
    assert sorted(batch.work.merge_slots.tolist()) == list(range(len(batch.work.merge_slots)))


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_higher_gate_never_shares_more(case: tuple[StepPlan, int, int]) -> None:
    plan, block_size, _ = case
    saved = [
        build_batch(plan, block_size, gate).work.shared_tokens_saved for gate in (0, 4, 16, None)
    ]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0


@settings(max_examples=100, deadline=None)
@given(plans())
def test_without_a_gate_each_shared_block_is_read_once(case: tuple[StepPlan, int, int]) -> None:
    """Blocks that are full and computed appear in exactly one span."""
    plan, block_size, _ = case
    work = build_batch(plan, block_size, 0).work
    read = [int(b) for span in work.spans for b in span.blocks]
    full = {b for s in plan.sequences for b in s.block_ids[: s.start // block_size]}
    assert all(read.count(block) == 1 for block in full)


def test_two_levels_of_sharing_become_two_spans() -> None:
    plan = StepPlan(
        (
            sequence([1, 2, 3, 10], 12, 1),
            sequence([1, 2, 4, 11], 12, 1),
            sequence([1, 2, 4, 12], 13, 1),
            sequence([9, 13], 5, 1),
        )
    )
    work = build_batch(plan, 4, 1).work
    shared = {tuple(s.blocks.tolist()): s.rows.tolist() for s in work.spans if len(s.rows) > 1}
    assert shared.keys() == {(1, 2), (4,)}
    assert sorted(shared[(1, 2)]) == [0, 1, 2]
    assert sorted(shared[(4,)]) == [1, 2]
    assert work.shared_tokens_saved == 2 * 8 + 1 * 4


def test_a_span_below_the_gate_is_folded_into_its_children() -> None:
    """One block for three is worth little, the longer one below it for two is worth more."""
    long = list(range(20, 30))
    plan = StepPlan(
        (
            sequence([1, 2], 4, 1),
            sequence([1, *long, 40], 44, 1),
            sequence([1, *long, 41], 44, 1),
        )
    )
    work = build_batch(plan, 4, 20).work
    shared = [s for s in work.spans if len(s.rows) > 1]
    assert [s.blocks.tolist() for s in shared] == [[1, *long]]


def test_a_block_that_is_still_being_filled_is_not_shared() -> None:
    """Equal ids of a partly filled block would be a defect elsewhere; they are read twice."""
    plan = StepPlan((sequence([1, 5], 4, 1), sequence([1, 5], 5, 1)))
    shared = [s for s in build_batch(plan, 4, 0).work.spans if len(s.rows) > 1]
    assert [s.blocks.tolist() for s in shared] == [[1]]


def test_rows_positions_and_slots() -> None:
    plan = StepPlan((sequence([3, 5], 3, 2, sample=True), sequence([2], 0, 1), sequence([7], 1, 3)))
    batch = build_batch(plan, 4, 0)
    assert batch.token_ids.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2, 3]
    assert batch.slots.tolist() == [15, 20, 8, 29, 30, 31]
    assert batch.sample_rows.tolist() == [1]
    assert batch.samples == (SPEC,)


@pytest.mark.parametrize(
    ("start", "count", "fresh"),
    [
        (0, 1, [3]),
        (0, 4, []),
        (0, 6, [4]),
        (3, 1, []),
        (3, 2, [4]),
        (4, 4, []),
        (5, 2, []),
        (8, 1, [5]),
    ],
)
def test_fresh_blocks_are_begun_and_not_filled(start: int, count: int, fresh: list[int]) -> None:
    plan = StepPlan((sequence([3, 4, 5], start, count),))
    assert build_batch(plan, 4, 0).fresh_blocks.tolist() == fresh


def test_an_empty_plan_is_an_empty_batch() -> None:
    batch = build_batch(StepPlan(()), 4, 0)
    assert batch.num_rows == 0
    assert batch.work.spans == batch.work.squares == ()
    assert build_batch(StepPlan((sequence([], 0, 0),)), 4, 0).num_rows == 0
