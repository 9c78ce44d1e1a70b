"""The capacities of captured CUDA graphs."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import PlanBuffers
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.graphs import (
    GraphCapacities,
    StepSize,
    bucket_list,
    limited,
    mixed_sizes,
)
from parrot.engine.runner.step_computer import SyntheticPlans

SHAPE = AttentionShape(32, 32, 64, 64)
SPLIT = SplitConfig()


def decodes(num_rows: int, length: int) -> WorkList:
    tables = np.arange(num_rows * 40, dtype=np.int32).reshape(num_rows, 40)
    starts = np.full(num_rows, length - 1, dtype=np.int32)
    step = StepRows(tables, starts, np.ones(num_rows, dtype=np.int32))
    return plan_work(step, SHAPE, None, SPLIT)


@pytest.mark.parametrize(("num_rows", "counts"), [(8, False), (16, True), (64, False)])
def test_even_plans_have_a_capacity_of_their_own_if_it_is_faster(
    num_rows: int, counts: bool
) -> None:
    capacities, size = GraphCapacities(SHAPE, SPLIT), StepSize(num_rows)
    even = decodes(num_rows, 2000)
    assert even.narrow_is_even
    capacity = capacities.of(size, even)
    assert capacity is not None
    assert capacity.is_even is counts
    assert capacity.holds(even)
    uneven = replace(even, narrow_is_even=False)
    assert capacities.of(size, uneven) == replace(capacity, is_even=False)


def test_plans_that_no_graph_supports_have_no_capacity() -> None:
    capacities, work = GraphCapacities(SHAPE, SPLIT), decodes(8, 100)
    assert capacities.of(StepSize(8), work) is not None
    assert capacities.of(StepSize(8), replace(work, dense=((0, 4096),))) is None
    assert capacities.of(StepSize(4), work) is None


def test_only_plans_that_convert_pages_get_a_capacity_for_conversions() -> None:
    split = SplitConfig(converted_pages=1000)
    shape = AttentionShape(32, 8, 64, 64, number_bytes=1)
    capacities, size = GraphCapacities(shape, split), StepSize(128, 8)
    for num_tokens, converts in ((63, False), (64, True)):
        tables = np.arange(40, dtype=np.int32)[None]
        counts = (np.array([n], dtype=np.int32) for n in (2000, num_tokens))
        work = plan_work(StepRows(tables, *counts), shape, None, split)
        capacity = capacities.of(size, work)
        assert capacity is not None
        assert capacity.holds(work)
        assert (capacity.converted_fills > 0) is (capacity.converted_pages > 0) is converts
    longer = replace(work, converted_pages=np.arange(513, dtype=np.int32))
    assert capacities.of(size, longer) is None


@pytest.mark.parametrize(
    ("max_tokens", "largest"), [(8192, 2048), (1087, 1024), (700, 640), (256, 256), (7, 0)]
)
def test_prompts_have_graphs_up_to_a_number_of_tokens(max_tokens: int, largest: int) -> None:
    sizes = mixed_sizes(256, max_tokens)
    rows = [size.rows for size in sizes]
    assert max(rows, default=0) == largest
    assert rows == sorted(rows)
    assert all(size.logits == min(size.rows, 256) for size in sizes)
    # At most a third of a step with more than 64 tokens is padding.
    assert all(after <= 1.5 * before for before, after in pairwise(rows) if before > 64)
    decodes = [StepSize(n) for n in bucket_list(256)]
    assert limited([*decodes, *mixed_sizes(256, 8192)], max_tokens) == (*decodes, *sizes)


@pytest.mark.parametrize("max_seq_len", [400, 9216])
def test_the_warm_up_has_a_step_of_many_rows_with_a_split_context(max_seq_len: int) -> None:
    """Products in e4m3 and the merge have other kernels for many rows."""
    shape = AttentionShape(32, 8, 64, 64)

    def is_large(work: WorkList) -> bool:
        return len(work.token_order) > 512 and work.num_slots > 0

    plans = SyntheticPlans(shape, GateConfig(), SPLIT, 8192, max_seq_len)
    assert any(map(is_large, plans.for_kernels()))
    small = replace(plans, max_tokens=256)
    assert all(len(work.token_order) <= 256 for work in small.for_kernels())


@pytest.mark.parametrize("number_bytes", [1, 2])
def test_captured_plans_fit_their_capacity_with_and_without_converted_pages(
    number_bytes: int,
) -> None:
    shape = AttentionShape(32, 8, 64, 64, number_bytes)
    split = SplitConfig(converted_pages=1000 if number_bytes == 1 else 0)
    capacities, plans = (
        GraphCapacities(shape, split),
        SyntheticPlans(shape, GateConfig(), split, 8192, 16384),
    )
    captured = set()
    for size in (StepSize(16, 8), StepSize(256, 8), StepSize(8)):
        for work in plans.for_graphs(size):
            own = capacities.of(size, work)
            assert own is not None
            for capacity in (own, capacities.largest(size)):
                buffers = PlanBuffers(work, torch.device("cpu"), capacity)
                assert (buffers.converted_pages >= 0).sum() == len(work.converted_pages)
            captured.add((size.rows, own.converted_fills > 0))
    converting = {(256, True)} if number_bytes == 1 else set()
    assert captured == {(16, False), (256, False), (8, False)} | converting
