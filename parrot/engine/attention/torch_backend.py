"""Attention in plain torch: any device, the reference for kernels, and fast enough on a CPU."""

from dataclasses import dataclass

import numpy as np
import torch

from parrot.engine.attention.batch import Batch, IntArray, WorkList
from parrot.engine.attention.buckets import (
    SpanBucket,
    SquareBucket,
    bucket_spans,
    bucket_squares,
)
from parrot.engine.attention.partial import attend, merge

# One more call in each layer costs about as much as reading this much KV.
_CALL_COST_BYTES = 1_200_000


@dataclass(frozen=True, slots=True)
class _SpanCall:
    """One padded call over the pool. `first_block` replaces `blocks` where the blocks of a single
    item are neighbours. `rows` None: all rows of the step, in order. `mask` [items, 1, 1, length]
    is added to the scores."""

    rows: torch.Tensor | None
    blocks: torch.Tensor | None
    first_block: int
    mask: torch.Tensor | None
    num_items: int
    num_rows: int
    num_blocks: int
    length: int


@dataclass(frozen=True, slots=True)
class _SquareCall:
    """`rows` None: rows [first_row, first_row + num_rows) of a single item."""

    rows: torch.Tensor | None
    first_row: int
    num_items: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Merge:
    """Row r takes partial `first[r]`; the rows `rows` take the merge of their `parts`
    [len(rows), most parts], where one past the last partial stands for none."""

    first: torch.Tensor
    rows: torch.Tensor | None
    parts: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    slots: torch.Tensor
    spans: tuple[_SpanCall, ...]
    squares: tuple[_SquareCall, ...]
    merge: _Merge | None


class TorchAttention:
    """`AttentionBackend` over a pool [layers, 2, kv_heads, blocks, block_size, head_dim]."""

    def __init__(self, pool: torch.Tensor, num_heads: int) -> None:
        self._pool = pool
        self._num_heads = num_heads
        _, _, self._num_kv_heads, _, self._block_size, head_dim = pool.shape
        self._device = pool.device
        token_bytes = 2 * self._num_kv_heads * head_dim * pool.dtype.itemsize
        self._min_saved_tokens = max(1, _CALL_COST_BYTES // token_bytes)
        self._gathered = torch.empty(0, dtype=pool.dtype, device=self._device)

    @property
    def min_saved_tokens(self) -> int:
        return self._min_saved_tokens

    def plan(self, batch: Batch) -> TorchPlan:
        work = batch.work
        num_span_slots = sum(len(s.rows) for s in work.spans)
        spans = bucket_spans(work.spans)
        squares = bucket_squares(work.squares, num_span_slots)
        return TorchPlan(
            slots=self._tensor(batch.slots),
            spans=tuple(self._span_call(b, batch.num_rows) for b in spans),
            squares=tuple(self._square_call(b) for b in squares),
            merge=self._merge(
                work, [*(b.slots for b in spans), *(b.slots for b in squares)], batch.num_rows
            ),
        )

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TorchPlan
    ) -> torch.Tensor:
        pool = self._pool[layer]
        slots: torch.Tensor = pool.flatten(2, 3)
        slots[0].index_copy_(1, plan.slots, k.transpose(0, 1))
        slots[1].index_copy_(1, plan.slots, v.transpose(0, 1))
        partials = [self._run_span(call, q, pool) for call in plan.spans]
        partials += [self._run_square(call, q, k, v) for call in plan.squares]
        if plan.merge is None:
            return partials[0][0].flatten(1)
        return _merge_partials(partials, plan.merge).flatten(1)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _span_call(self, bucket: SpanBucket, num_rows: int) -> _SpanCall:
        in_order = np.array_equal(bucket.rows, np.arange(num_rows))
        single = bucket.num_items == 1
        neighbours = single and bool((np.diff(bucket.blocks) == 1).all())
        length = int(bucket.kv_lens.max())
        mask = None
        if (bucket.kv_lens != length).any():
            hidden = np.arange(length) >= bucket.kv_lens[:, None, None, None]
            mask = torch.zeros(hidden.shape, dtype=self._pool.dtype)
            mask = mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self._device)
        return _SpanCall(
            rows=None if in_order else self._tensor(bucket.rows),
            blocks=None if neighbours else self._tensor(bucket.blocks),
            first_block=int(bucket.blocks[0]),
            mask=mask,
            num_items=bucket.num_items,
            num_rows=bucket.num_rows,
            num_blocks=-(-length // self._block_size),
            length=length,
        )

    def _square_call(self, bucket: SquareBucket) -> _SquareCall:
        rows = None if bucket.num_items == 1 else self._tensor(bucket.rows)
        return _SquareCall(rows, int(bucket.rows[0]), bucket.num_items, bucket.num_rows)

    def _merge(self, work: WorkList, bucket_slots: list[IntArray], num_rows: int) -> _Merge | None:
        """Where the calls leave the partials of each row; None when that is already the result."""
        order = np.concatenate(bucket_slots)
        place = np.empty(len(work.merge_slots), dtype=np.int64)
        place[order[order >= 0]] = np.flatnonzero(order >= 0)
        counts = np.diff(work.merge_indptr)
        places = place[work.merge_slots]
        first = places[work.merge_indptr[:-1]]
        many = np.flatnonzero(counts > 1)
        if not len(many):
            identity = len(bucket_slots) == 1 and np.array_equal(first, np.arange(len(order)))
            return None if identity else _Merge(self._tensor(first), None, None)
        column = np.arange(counts.max())
        index = work.merge_indptr[many][:, None] + column
        absent = column >= counts[many][:, None]
        parts = np.where(absent, len(order), places[np.where(absent, 0, index)])
        return _Merge(self._tensor(first), self._tensor(many), self._tensor(parts))

    def _run_span(
        self, call: _SpanCall, q: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out [items * rows, heads, d], lse [items * rows, heads]."""
        n, rows, d = call.num_items, call.num_rows, q.shape[-1]
        kv_heads, group = self._num_kv_heads, self._num_heads // self._num_kv_heads
        picked = q if call.rows is None else q.index_select(0, call.rows)
        picked = picked.view(n, rows, kv_heads, group, d).transpose(1, 2)
        kv = self._read(call, pool)
        out, lse = attend(
            picked.reshape(n, kv_heads, rows * group, d),
            kv[0].transpose(0, 1),
            kv[1].transpose(0, 1),
            mask=call.mask,
        )
        out = out.view(n, kv_heads, rows, group, d).transpose(1, 2)
        lse = lse.view(n, kv_heads, rows, group).transpose(1, 2)
        return out.reshape(n * rows, -1, d), lse.reshape(n * rows, -1)

    def _read(self, call: _SpanCall, pool: torch.Tensor) -> torch.Tensor:
        """The KV of a call [2, kv_heads, items, length, d], valid until the next read."""
        n, num_blocks = call.num_items, call.num_blocks
        _, kv_heads, _, block_size, d = pool.shape
        if call.blocks is None:
            kv = pool[:, :, call.first_block : call.first_block + num_blocks]
        else:
            num_elements = 2 * kv_heads * n * num_blocks * block_size * d
            if self._gathered.numel() < num_elements:
                self._gathered = torch.empty_like(self._gathered).resize_(num_elements * 5 // 4)
            out = self._gathered[:num_elements].view(2 * kv_heads, n * num_blocks, block_size * d)
            torch.index_select(pool.view(2 * kv_heads, -1, block_size * d), 1, call.blocks, out=out)
            kv = out
        return kv.view(2, kv_heads, n, num_blocks * block_size, d)[:, :, :, : call.length]

    def _run_square(
        self, call: _SquareCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out [items * rows, heads, d], lse [items * rows, heads]."""
        n, rows, d = call.num_items, call.num_rows, q.shape[-1]
        kv_heads, group = self._num_kv_heads, self._num_heads // self._num_kv_heads
        if call.rows is None:
            q, k, v = (x[call.first_row : call.first_row + rows] for x in (q, k, v))
        else:
            q, k, v = (x.index_select(0, call.rows) for x in (q, k, v))
        # The query heads of one KV head form the head dimension, along which k and v are repeated.
        shape = (n * kv_heads, group, rows, d)
        heads = q.view(n, rows, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(shape)
        keys, values = (
            x.view(n, rows, kv_heads, 1, d).permute(0, 2, 3, 1, 4).flatten(0, 1).expand(shape)
            for x in (k, v)
        )
        out, lse = attend(heads, keys, values, is_causal=True)
        out = out.reshape(n, kv_heads * group, rows, d).transpose(1, 2)
        lse = lse.reshape(n, kv_heads * group, rows).transpose(1, 2)
        return out.reshape(n * rows, -1, d), lse.reshape(n * rows, -1)


def _merge_partials(
    partials: list[tuple[torch.Tensor, torch.Tensor]], plan: _Merge
) -> torch.Tensor:
    outs = [out for out, _ in partials]
    if plan.rows is None or plan.parts is None:
        return torch.cat(outs).index_select(0, plan.first)
    _, heads, d = outs[0].shape
    lses = [lse for _, lse in partials]
    out = torch.cat([*outs, outs[0].new_zeros(1, heads, d)])
    lse = torch.cat([*lses, lses[0].new_full((1, heads), float("-inf"))])
    result = out.index_select(0, plan.first)
    return result.index_copy_(0, plan.rows, merge(out[plan.parts], lse[plan.parts]))
