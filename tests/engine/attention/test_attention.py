"""The torch backend against float64 attention over the logical tokens of each context."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.attention import TorchAttention
from parrot.engine.attention.batch import Batch, Span, Square, build_batch
from parrot.engine.attention.buckets import bucket_spans, bucket_squares
from parrot.engine.attention.partial import attend, attend_reference, merge
from parrot.engine.core.plan import SequenceStep, StepPlan

BLOCK = 4
SHARE_ALL, SHARE_NONE = 1, 10**9


class World:
    """Contexts with random KV in a pool whose unused slots are poisoned."""

    def __init__(self, kv_heads: int, group: int, dim: int, dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (kv_heads, group, dim)
        self.dtype = dtype
        self.pool = torch.full((2, 2, kv_heads, 256, BLOCK, dim), float("nan"), dtype=dtype)
        self.free = torch.randperm(256, generator=self.generator).tolist()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.steps: list[SequenceStep] = []

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def add(
        self, length: int, count: int, parent: int | None = None, shared_blocks: int = 0
    ) -> None:
        """A context with `length` tokens computed (after the shared ones) and `count` new."""
        kv_heads, _, dim = self.shape
        blocks: list[int] = []
        k, v = self.random(length, kv_heads, dim), self.random(length, kv_heads, dim)
        if parent is not None:
            tokens = shared_blocks * BLOCK
            blocks = list(self.steps[parent].block_ids[:shared_blocks])
            k = torch.cat((self.keys[parent][:tokens], k))
            v = torch.cat((self.values[parent][:tokens], v))
        start = len(k)
        while len(blocks) * BLOCK < start + count:
            blocks.append(self.free.pop())
            self.pool[:, :, :, blocks[-1]] = 0  # what the cache does for a block that begins
        for layer in range(2):
            for position in range(start):
                block, offset = blocks[position // BLOCK], position % BLOCK
                self.pool[layer, 0, :, block, offset] = k[position]
                self.pool[layer, 1, :, block, offset] = v[position]
        self.keys.append(k)
        self.values.append(v)
        self.steps.append(SequenceStep(len(self.steps), [0] * count, start, blocks, None))

    def run(self, min_saved_tokens: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """-> the backend's result and the reference, [rows, heads * dim]."""
        kv_heads, group, dim = self.shape
        batch = build_batch(StepPlan(tuple(self.steps)), BLOCK, min_saved_tokens)
        q = self.random(batch.num_rows, kv_heads * group, dim)
        k, v = (
            self.random(batch.num_rows, kv_heads, dim),
            self.random(batch.num_rows, kv_heads, dim),
        )
        backend = TorchAttention(self.pool, kv_heads * group)
        out = backend.run(1, q, k, v, backend.plan(batch))
        return out, self.reference(q, k, v), batch

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        _, group, dim = self.shape
        outs, row = [], 0
        for i, step in enumerate(self.steps):
            new = slice(row, row + len(step.token_ids))
            keys = torch.cat((self.keys[i], k[new])).double().repeat_interleave(group, dim=1)
            values = torch.cat((self.values[i], v[new])).double().repeat_interleave(group, dim=1)
            for j in range(len(step.token_ids)):
                end = step.start + j + 1
                scores = torch.einsum("hd,thd->ht", q[row + j].double(), keys[:end]) * dim**-0.5
                outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:end]))
            row += len(step.token_ids)
        return torch.stack(outs).flatten(1)


def assert_close(out: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    error = (out.double() - want).norm() / want.norm()
    assert error < tolerance, error


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 8), (2, 3, 16), (3, 3, 64), (1, 4, 8), (2, 8, 4)]),
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 7]), st.integers(0, 6)),
        min_size=1,
        max_size=9,
    ),
    gate=st.sampled_from([SHARE_ALL, 12, SHARE_NONE]),
    seed=st.integers(0, 99),
)
def test_random_trees_match_the_reference(
    shape: tuple[int, int, int], sequences: list[tuple[int, int, int]], gate: int, seed: int
) -> None:
    world = World(*shape, torch.float32, seed)
    for i, (length, count, shared) in enumerate(sequences):
        parent = (seed + i) % i if i and shared else None
        full = 0 if parent is None else min(shared, world.steps[parent].start // BLOCK)
        world.add(length, count, parent, full)
    assert_close(*world.run(gate)[:2])


@pytest.mark.parametrize("gate", [SHARE_ALL, SHARE_NONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_levels_of_sharing(gate: int, dtype: torch.dtype) -> None:
    world = World(3, 3, 16, dtype, 0)
    world.add(40, 1)
    for _ in range(3):
        world.add(17, 1, parent=0, shared_blocks=9)
    for length in (0, 3, 9):
        world.add(length, 1, parent=2, shared_blocks=12)
    world.add(5, 1)
    out, want, batch = world.run(gate)
    assert_close(out, want, 2e-6 if dtype == torch.float32 else 8e-3)
    assert (batch.work.shared_tokens_saved > 0) == (gate == SHARE_ALL)


@pytest.mark.parametrize(
    "lengths", [[1], [3], [4], [5], [0, 4, 8], [1, 2, 3, 4, 5], [0, 0], [30, 1]]
)
def test_lengths_around_a_block(lengths: list[int]) -> None:
    world = World(2, 2, 8, torch.float32, 1)
    for length in lengths:
        world.add(length, 1)
    assert_close(*world.run(SHARE_NONE)[:2])


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_equal_and_extreme_scores(scale: float) -> None:
    """Scores of +-1000 and a prefix that outweighs everything else by far."""
    world = World(1, 2, 8, torch.float32, 2)
    world.add(16, 1)
    world.add(3, 1, parent=0, shared_blocks=4)
    world.add(3, 4, parent=0, shared_blocks=4)
    for keys in world.keys:
        keys.mul_(scale)
    world.pool[:, 0].mul_(scale)
    assert_close(*world.run(SHARE_ALL)[:2], 1e-5)


def test_nan_in_one_context_stays_there() -> None:
    world = World(1, 2, 8, torch.float32, 3)
    for _ in range(3):
        world.add(9, 1)
    for layer in range(2):
        world.pool[layer, :, :, world.steps[1].block_ids[0]] = float("nan")
    out, want, _ = world.run(SHARE_NONE)
    assert out[1].isnan().all()
    assert_close(out[[0, 2]], want[[0, 2]])


def test_neighbouring_blocks_are_read_in_place() -> None:
    world = World(2, 2, 8, torch.float32, 4)
    world.free = list(range(255, -1, -1))
    world.add(30, 1)
    assert world.steps[0].block_ids == list(range(8))
    out, want, batch = world.run(SHARE_NONE)
    backend = TorchAttention(world.pool, 4)
    assert backend.plan(batch).spans[0].blocks is None
    assert_close(out, want)


def test_the_new_kv_is_written_to_its_layer_only() -> None:
    world = World(2, 1, 8, torch.float32, 5)
    world.add(4, 2)
    before = world.pool.clone()
    batch = build_batch(StepPlan(tuple(world.steps)), BLOCK, 1)
    backend = TorchAttention(world.pool, 2)
    q, k, v = (world.random(2, 2, 8) for _ in range(3))
    backend.run(0, q, k, v, backend.plan(batch))
    block = world.steps[0].block_ids[1]
    assert torch.equal(world.pool[0, 0, :, block, :2], k.transpose(0, 1))
    assert torch.equal(world.pool[0, 1, :, block, :2], v.transpose(0, 1))
    assert torch.equal(world.pool[1].nan_to_num(), before[1].nan_to_num())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 1, 64), (4, 2, 33, 16)])
def test_partial_attention_and_its_lse(is_causal: bool, shape: tuple[int, ...]) -> None:
    n, heads, rows, dim = shape
    length = rows if is_causal else 37
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(shape, generator=generator)
    k, v = (torch.randn((n, heads, length, dim), generator=generator) for _ in range(2))
    mask = None
    if not is_causal:
        mask = torch.zeros(n, 1, 1, length).index_fill_(3, torch.arange(30, 37), float("-inf"))
    out, lse = attend(q, k, v, mask=mask, is_causal=is_causal)
    want, want_lse = attend_reference(q.double(), k, v, mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_merging_parts_is_attention_over_their_union() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, 2, 3, 8), generator=generator)
    k, v = (torch.randn((1, 2, 20, 8), generator=generator) for _ in range(2))
    parts = [attend(q, k[:, :, a:b], v[:, :, a:b]) for a, b in [(0, 3), (3, 4), (4, 20)]]
    parts.append((torch.zeros_like(q), torch.full((1, 2, 3), float("-inf"))))
    outs = torch.stack([out[0].transpose(0, 1) for out, _ in parts], dim=1)
    lses = torch.stack([lse[0].transpose(0, 1) for _, lse in parts], dim=1)
    want = attend(q, k, v)[0][0].transpose(0, 1)
    torch.testing.assert_close(merge(outs, lses), want, rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3000)), min_size=1, max_size=40))
def test_buckets_hold_every_partial_once_and_waste_little(shapes: list[tuple[int, int]]) -> None:
    spans = [Span(np.arange(rows), np.arange(-(-length // 16)), length) for rows, length in shapes]
    buckets = bucket_spans(spans)
    slots = np.concatenate([b.slots for b in buckets])
    assert sorted(slots[slots >= 0].tolist()) == list(range(sum(rows for rows, _ in shapes)))
    for bucket in buckets:
        assert len(bucket.rows) == len(bucket.slots) == bucket.num_items * bucket.num_rows
        assert len(bucket.blocks) == bucket.num_items * bucket.num_blocks
    padded = sum(b.num_items * b.num_rows * int(b.kv_lens.max()) for b in buckets)
    real = sum(rows * length for rows, length in shapes)
    assert padded <= 1.25 * real + 1024 * len(buckets)


def test_squares_are_bucketed_after_the_spans() -> None:
    squares = [Square(0, 3), Square(3, 2), Square(5, 200)]
    buckets = bucket_squares(squares, first_slot=10)
    slots = np.concatenate([b.slots for b in buckets])
    assert sorted(slots[slots >= 0].tolist()) == list(range(10, 215))
    assert len(buckets) == 2
