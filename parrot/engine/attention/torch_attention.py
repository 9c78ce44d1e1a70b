"""Run a work list in plain torch: on any device, fast enough on a CPU, the kernels' reference.

Items of about the same size are padded to one call. What the kernels do with slots is done by place
here: the partial results of all calls are one list, and each row merges those that are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.quantised import PooledKV, dequantise, quantise
from parrot.engine.attention.work_list import (
    KV_END,
    KV_FIRST,
    OWN,
    Q_COUNT,
    Q_FIRST,
    TABLE_ROW,
    LongArray,
    SplitConfig,
    StepRows,
    WorkList,
)
from parrot.engine.kernels.attention_shape import AttentionShape

WHOLE_SPANS = SplitConfig(
    num_sms=1, min_span=(1 << 30,) * 3, narrow_rows=1024, tile_rows=1024, dense=1, dense_min=64
)
"""Spans are not split, and long prompts are cut so that their masks stay small."""

Partial = tuple[torch.Tensor, torch.Tensor]
"""Outputs [rows, heads, head_dim], and the natural log of the sum of exponentials [rows, heads]."""

# What one more call in each layer costs: about as much as reading 1.2 MB of KV.
_MEMORY_RATE = 10e9
_CALL_S = 120e-6

# Padding is free up to here, in row-tokens: about what one more call costs.
_FREE_PADDING = 1024
_MAX_PADDING_RATIO = 0.25


def cpu_gate(dtype: torch.dtype) -> GateConfig:
    """Sharing costs a call of its own, and then any number of rows reads the KV once."""
    call_s = _CALL_S * 2 / dtype.itemsize  # shapes count numbers of two bytes
    return GateConfig(
        memory_rate=_MEMORY_RATE,
        l2_bytes=0,
        row_tile=1 << 30,
        partial_rate=1e30,
        launch_s=0.0,
        node_s=call_s,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """`num_items` items, each padded to `num_rows` rows and `num_blocks` blocks. `rows` None: all
    rows of the step, in order. `blocks` None: those of a single item, neighbours from `first_block`
    on. `mask` [items, 1, 1 or rows * group, length] is added to the scores."""

    rows: torch.Tensor | None
    blocks: torch.Tensor | None
    first_block: int
    mask: torch.Tensor | None
    num_items: int
    num_rows: int
    num_blocks: int
    length: int


@dataclass(frozen=True, slots=True)
class _Merge:
    """Row r takes partial `first[r]`; the rows `rows` take the merge of their `parts`
    [len(rows), most parts], where the index past the last partial means that there is none."""

    first: torch.Tensor
    rows: torch.Tensor | None
    parts: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """`slots`: where each row's KV goes, block * block_size + offset. `dense` as in `WorkList`.
    `merge` None: the only call's result is that of the step."""

    slots: torch.Tensor
    calls: tuple[_Call, ...]
    dense: tuple[tuple[int, int], ...]
    merge: _Merge | None


class TorchAttention:
    """Attention over a pool [layers, 2, kv_heads, blocks, block_size, head_dim]."""

    def __init__(self, pool: PooledKV, num_heads: int) -> None:
        _, _, num_kv_heads, _, block_size, head_dim = pool.numbers.shape
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size)
        self._pool = pool
        self._device = pool.numbers.device
        self._gathered = torch.empty(0, dtype=pool.numbers.dtype, device=self._device)

    def plan(self, work: WorkList, step: StepRows) -> TorchPlan:
        size = self.shape.page_size
        requests, positions = step.requests, step.positions.astype(np.int64)
        slots = step.tables[requests, positions // size] * size + positions % size
        items = np.concatenate((work.narrow, work.shared, work.fills, work.converted_fills)).astype(
            np.int64
        )
        calls, owners = [], []
        for members in _group(items[:, Q_COUNT], _num_keys(items, work, positions)):
            call, rows = self._call(items[members], work, step, positions)
            calls.append(call)
            owners.append(rows)
        owners += [np.arange(first, first + count) for first, count in work.dense]
        return TorchPlan(
            self._tensor(slots), tuple(calls), work.dense, self._merge(owners, len(positions))
        )

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TorchPlan
    ) -> torch.Tensor:
        new: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = (k, v)
        if self._pool.exponents is not None:
            new, exponents = quantise(torch.stack((k, v)))
            k, v = dequantise(new, exponents, k.dtype)
            _store(self._pool.exponents[layer], plan, exponents)
        _store(self._pool.numbers[layer], plan, new)
        partials = [self._run_call(call, q, layer) for call in plan.calls]
        for first, count in plan.dense:
            partials.append(self._run_dense(*(x[first : first + count] for x in (q, k, v))))
        if plan.merge is None:
            return partials[0][0].flatten(1)
        return _merge_partials(partials, plan.merge).flatten(1)

    def _tensor(self, array: LongArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _call(
        self, items: LongArray, work: WorkList, step: StepRows, positions: LongArray
    ) -> tuple[_Call, LongArray]:
        """The call for some items, and the row that each of its partials is for; -1: none."""
        items = items[np.argsort(items[:, Q_FIRST], kind="stable")]
        size = self.shape.page_size
        counts = items[:, Q_COUNT, None]
        column = np.arange(counts.max())
        rows = _rows(items, work, np.minimum(column, counts - 1))
        visible = _num_visible(items, positions[rows])
        owners = np.where((column < counts) & (visible > 0), rows, -1)
        length = int(visible.max())
        last_page = (items[:, KV_FIRST] + visible.max(axis=1) - 1) // size
        pages = items[:, KV_FIRST, None] // size + np.arange(-(-length // size))
        pages = np.minimum(pages, last_page[:, None])
        blocks = step.tables[items[:, TABLE_ROW, None], pages].astype(np.int64)
        in_order = np.array_equal(rows.ravel(), np.arange(len(positions)))
        neighbours = len(items) == 1 and bool((np.diff(blocks) == 1).all())
        call = _Call(
            rows=None if in_order else self._tensor(rows.ravel()),
            blocks=None if neighbours else self._tensor(blocks.ravel()),
            first_block=int(blocks[0, 0]),
            mask=self._mask(np.maximum(visible, 1), length),
            num_items=len(items),
            num_rows=len(column),
            num_blocks=blocks.shape[1],
            length=length,
        )
        return call, owners.ravel()

    def _mask(self, visible: LongArray, length: int) -> torch.Tensor | None:
        """Hide all but the first `visible` [items, rows] keys."""
        if (visible == length).all():
            return None
        if (visible == visible[:, :1]).all():
            visible = visible[:, :1]
        else:
            visible = np.repeat(visible, self.shape.group, axis=1)
        hidden = torch.from_numpy(np.arange(length) >= visible[:, None, :, None])
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype)
        return mask.masked_fill_(hidden, float("-inf")).to(self._device)

    def _merge(self, owners: Sequence[LongArray], num_rows: int) -> _Merge | None:
        """Each row's partials, where the calls leave them."""
        owner = np.concatenate(owners)
        place = np.flatnonzero(owner >= 0)
        place = place[np.argsort(owner[place], kind="stable")]
        counts = np.bincount(owner[place], minlength=num_rows)
        begin = np.cumsum(counts) - counts
        first = place[begin]
        many = np.flatnonzero(counts > 1)
        if not len(many):
            is_result = len(owners) == 1 and np.array_equal(first, np.arange(len(owner)))
            return None if is_result else _Merge(self._tensor(first), None, None)
        column = np.arange(counts.max())
        absent = column >= counts[many, None]
        parts = place[np.where(absent, 0, begin[many, None] + column)]
        parts[absent] = len(owner)
        return _Merge(self._tensor(first), self._tensor(many), self._tensor(parts))

    def _run_call(self, call: _Call, q: torch.Tensor, layer: int) -> Partial:
        n, rows, (heads, d) = call.num_items, call.num_rows, q.shape[1:]
        kv_heads, group = self.shape.num_kv_heads, self.shape.group
        picked = q if call.rows is None else q.index_select(0, call.rows)
        picked = picked.view(n, rows, kv_heads, group, d).transpose(1, 2)
        k, v = self._read(call, layer).transpose(1, 2)
        out, lse = attend(picked.reshape(n, kv_heads, rows * group, d), k, v, mask=call.mask)
        out = out.view(n, kv_heads, rows, group, d).transpose(1, 2)
        lse = lse.view(n, kv_heads, rows, group).transpose(1, 2)
        return out.reshape(n * rows, heads, d), lse.reshape(n * rows, heads)

    def _read(self, call: _Call, layer: int) -> torch.Tensor:
        """The KV of a call [2, kv_heads, items, length, d], valid until the next read."""
        numbers = self._read_numbers(call, self._pool.numbers[layer])
        if self._pool.exponents is None:
            return numbers
        exponents = self._pool.exponents[layer]
        if call.blocks is None:
            exponents = exponents[:, :, call.first_block : call.first_block + call.num_blocks]
        else:
            exponents = exponents.index_select(2, call.blocks)
        exponents = exponents.reshape(*numbers.shape[:3], -1)[..., : call.length]
        return dequantise(numbers, exponents, self._pool.dtype)

    def _read_numbers(self, call: _Call, pool: torch.Tensor) -> torch.Tensor:
        n, num_blocks = call.num_items, call.num_blocks
        _, kv_heads, _, block_size, d = pool.shape
        if call.blocks is None:
            kv = pool[:, :, call.first_block : call.first_block + num_blocks]
        else:
            num_elements = 2 * kv_heads * n * num_blocks * block_size * d
            if self._gathered.numel() < num_elements:
                self._gathered = torch.empty_like(self._gathered).resize_(num_elements * 5 // 4)
            kv = self._gathered[:num_elements].view(2 * kv_heads, n * num_blocks, block_size * d)
            torch.index_select(pool.view(2 * kv_heads, -1, block_size * d), 1, call.blocks, out=kv)
        return kv.view(2, kv_heads, n, num_blocks * block_size, d)[:, :, :, : call.length]

    def _run_dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        """Rows of one context among themselves. The query heads of a KV head take the place of
        heads, along which its keys and values are repeated without being copied."""
        rows, heads, d = q.shape
        shape = (self.shape.num_kv_heads, self.shape.group, rows, d)
        queries = q.transpose(0, 1).reshape(shape)
        keys, values = (x.transpose(0, 1).unsqueeze(1).expand(shape) for x in (k, v))
        out, lse = attend(queries, keys, values, is_causal=True)
        return out.reshape(heads, rows, d).transpose(0, 1), lse.reshape(heads, rows).T


def _store(pool: torch.Tensor, plan: TorchPlan, new: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Write `new` [2, rows, kv_heads, ...] to a layer of a pool."""
    for slots, rows in zip(pool.flatten(2, 3), new, strict=True):
        slots.index_copy_(1, plan.slots, rows.transpose(0, 1))


def _rows(items: LongArray, work: WorkList, members: LongArray) -> LongArray:
    """Rows of q: for item i its tokens `members[i]`."""
    places = items[:, Q_FIRST, None] + members
    own = items[:, OWN, None] != 0
    ordered = work.token_order[np.where(own, 0, places)]
    return np.where(own, places, ordered)


def _num_visible(items: LongArray, positions: LongArray) -> LongArray:
    """Keys that queries at `positions` [items, queries] see; none of an item behind them."""
    ends = items[:, KV_END, None]
    ends = np.where(items[:, OWN, None] != 0, np.minimum(ends, positions + 1), ends)
    return ends - items[:, KV_FIRST, None]


def _num_keys(items: LongArray, work: WorkList, positions: LongArray) -> LongArray:
    last = _rows(items, work, items[:, Q_COUNT, None] - 1)
    return _num_visible(items, positions[last])[:, 0]


def _group(num_rows: LongArray, num_keys: LongArray) -> list[list[int]]:
    """Groups of items, largest first. An item joins while the padding of its group stays free or
    a small part of the real work; the number of groups grows only with the spread of sizes."""
    groups: list[list[int]] = []
    tallest = longest = real = 0
    sizes = list(zip(num_rows.tolist(), num_keys.tolist(), strict=True))
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rows, keys = sizes[item]
        work = rows * keys
        if groups:
            padded = (len(groups[-1]) + 1) * max(tallest, rows) * max(longest, keys)
            if padded - real - work <= max(_FREE_PADDING, _MAX_PADDING_RATIO * (real + work)):
                groups[-1].append(item)
                tallest, longest, real = max(tallest, rows), max(longest, keys), real + work
                continue
        groups.append([item])
        tallest, longest, real = rows, keys, work
    return groups


_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Partial:
    """Attention over a part of a context, with the log-sum-exp that lets parts be merged.

    q [n, heads, rows, d], k and v [n, heads, length, d], mask broadcastable to
    [n, heads, rows, length] -> out like q, and the natural log of the sum of the exponentials of
    the scores, float32 [n, heads, rows]."""
    if q.device.type == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=None)
        return out, lse
    return attend_reference(q, k, v, mask, is_causal)


def attend_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> Partial:
    """`attend` in plain operations, on any device."""
    scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.float()
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.float()
    return out.to(q.dtype), lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """outs [rows, parts, heads, d], lses [rows, parts, heads] -> [rows, heads, d].

    softmax over a union of keys is the mean of the softmaxes over the parts, weighted by exp(lse).
    An absent part has an lse of -inf."""
    weights = lses.softmax(dim=1).to(outs.dtype)
    return (outs * weights.unsqueeze(-1)).sum(dim=1)


def _merge_partials(partials: Sequence[Partial], plan: _Merge) -> torch.Tensor:
    outs = [out for out, _ in partials]
    if plan.rows is None or plan.parts is None:
        return torch.cat(outs).index_select(0, plan.first)
    _, heads, d = outs[0].shape
    lses = [lse for _, lse in partials]
    out = torch.cat([*outs, outs[0].new_zeros(1, heads, d)])
    lse = torch.cat([*lses, lses[0].new_full((1, heads), float("-inf"))])
    result = out.index_select(0, plan.first)
    return result.index_copy_(0, plan.rows, merge(out[plan.parts], lse[plan.parts]))
