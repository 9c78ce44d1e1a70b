"""The rooms in which captured graphs come."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dataclasses import replace

import numpy as np

from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.graphs import Rooms, StepSize

SHAPE = AttentionShape(32, 32, 64, 64)
SPLIT = SplitConfig()


def decodes(num_rows: int, length: int) -> WorkList:
    tables = np.arange(num_rows * 40, dtype=np.int32).reshape(num_rows, 40)
    starts = np.full(num_rows, length - 1, dtype=np.int32)
    step = StepRows(tables, starts, np.ones(num_rows, dtype=np.int32))
    return plan_work(step, SHAPE, None, SPLIT)


@pytest.mark.parametrize(("num_rows", "counts"), [(8, False), (16, True), (64, False)])
def test_even_plans_have_rooms_of_their_own_where_it_counts(num_rows: int, counts: bool) -> None:
    rooms, size = Rooms(SHAPE, SPLIT), StepSize(num_rows)
    even = decodes(num_rows, 2000)
    assert even.narrow_is_even
    room = rooms.of(size, even)
    assert room is not None
    assert room.is_even is counts
    assert room.holds(even)
    uneven = replace(even, narrow_is_even=False)
    assert rooms.of(size, uneven) == replace(room, is_even=False)


def test_no_room_for_what_no_graph_has() -> None:
    rooms, work = Rooms(SHAPE, SPLIT), decodes(8, 100)
    assert rooms.of(StepSize(8), work) is not None
    assert rooms.of(StepSize(8), replace(work, dense=((0, 4096),))) is None
    assert rooms.of(StepSize(4), work) is None
