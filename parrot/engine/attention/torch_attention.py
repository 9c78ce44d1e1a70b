"""Run a work list in plain torch: on any device, fast enough on a CPU, the kernels' reference.

Items of about the same size are padded to one call. What the kernels do with slots is done by place
here: the partial results of all calls are one list, and each row merges those that are its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt
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

# Scores that are there at once, so that they stay in a core's cache; but at least so many rows are
# multiplied at a time.
SCORES = 1 << 20
LEAST_ROWS = 64
# And never more than these: of so many rows and 128k tokens, one head's.
_MOST_SCORES = LEAST_ROWS << 17

Partial = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [rows, heads, head_dim], and the natural log of the sum of exponentials [rows, heads],
which is only there to be merged by."""


@dataclass(frozen=True, slots=True)
class Causal:
    """The last of `num_keys` keys is that of the last token; `group` rows each.

    `mask` [rows of a block, its tokens] is added to a block's last scores."""

    num_keys: int
    group: int
    mask: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    with_lse: bool = False,
) -> Partial:
    """Attention over a part of a context, `with_lse` with what lets parts be merged.

    q [batch, rows, d], k and v [batch, keys, d] -> out like q, and the natural log of the sum of
    the exponentials of the scores, float32 [batch, rows]. `mask` [batch or 1, rows or 1, keys] is
    added to the scores."""
    (batch, num_rows, _), num_keys = q.shape, k.shape[1]
    step = min(num_rows, max(SCORES // (batch * num_keys), LEAST_ROWS))
    most = max(1, _MOST_SCORES // (step * num_keys))
    if batch > most:
        return _joined(
            [
                attend(q[at], k[at], v[at], mask=_part(mask, 0, at), with_lse=with_lse)
                for at in _slices(batch, most)
            ],
            0,
        )
    if num_rows > step:
        return _joined(
            [
                _attend(torch.baddbmm, q[:, at], k, v, _part(mask, 1, at), with_lse)
                for at in _slices(num_rows, step)
            ],
            1,
        )
    return _attend(torch.baddbmm, q, k, v, mask, with_lse)


def _slices(end: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, end, step)]


def _part(mask: torch.Tensor | None, dim: int, at: slice) -> torch.Tensor | None:
    if mask is None or mask.shape[dim] == 1:
        return mask
    return mask[at] if dim == 0 else mask[:, at]


def _joined(partials: Sequence[Partial], dim: int) -> Partial:
    lses = [lse for _, lse in partials if lse is not None]
    return torch.cat([out for out, _ in partials], dim), torch.cat(lses, dim) if lses else None


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, *, with_lse: bool = False
) -> Partial:
    """`attend` for the last tokens of a context, each of which sees the keys up to its own.

    Skips the keys that a block of rows does not see. One head after the other: matrices of which
    only the beginning is used are not copied, batches of them are."""
    batch, num_rows, _ = q.shape
    block, group = len(causal.mask), causal.group
    out, lse = torch.empty_like(q), q.new_empty((batch, num_rows), dtype=torch.float32)
    for head, first in product(range(batch), range(0, num_rows, block)):
        end = min(first + block, num_rows)
        seen = causal.num_keys - (num_rows - end) // group
        mask = causal.mask[: end - first, : (end - first) // group]
        rows = q[head, first:end], k[head, :seen], v[head, :seen]
        out[head, first:end], sums = _attend(torch.addmm, *rows, mask, with_lse)
        if sums is not None:
            lse[head, first:end] = sums
    return out, lse if with_lse else None


def _attend(
    add_product: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    with_lse: bool,
) -> Partial:
    """`attend` for some rows of one head, without a batch, or of several. A mask of fewer keys is
    for the last ones.

    Scores are rounded to the type of q: so their products in bfloat16 take a third of the time."""
    scale = q.shape[-1] ** -0.5
    if mask is not None and mask.shape[-1] == k.shape[-2]:
        scores = add_product(mask, q, k.mT, alpha=scale)
    else:
        scores = add_product(q.new_empty(1), q, k.mT, beta=0, alpha=scale)
        if mask is not None:
            scores[..., -mask.shape[-1] :].add_(mask)
    if not with_lse:
        return scores.softmax(-1) @ v, None
    weights = scores.softmax(-1, dtype=torch.float32)
    lse = scores.amax(-1).float() - weights.amax(-1).log()
    return weights.to(v.dtype) @ v, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """outs [rows, parts, heads, d], lses [rows, parts, heads] -> [rows, heads, d].

    softmax over a union of keys is the mean of the softmaxes over the parts, weighted by exp(lse).
    An absent part has an lse of -inf."""
    weights = lses.softmax(dim=1).to(outs.dtype)
    return (outs * weights.unsqueeze(-1)).sum(dim=1)


WHOLE_SPANS = SplitConfig(num_sms=1, min_span=(1 << 30,) * 3, tile_rows=1 << 30)
"""Nothing is split: `attend` takes as many rows at a time as it should."""

Tensors = torch.Tensor | Sequence[torch.Tensor]

# What one more call in each layer costs: about as much as reading 1.2 MB of KV.
_MEMORY_RATE = 10e9
_CALL_S = 120e-6

# Padding is free up to here, in row-tokens: about what one more call costs.
_FREE_PADDING = 1024
_MAX_PADDING_RATIO = 0.25
# Fills of so many row-tokens are calls of their own, which skip the keys that they cannot see.
_ALONE = 1 << 14

_MOST_TOKENS = 128  # of a causal block, whose scores are computed whole
# So few products are faster in float32, converted, than as oneDNN prepares them in bfloat16.
_FEW_PRODUCTS = 3 << 16


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
    """`num_items` items, each padded to `num_rows` rows and some `blocks` [items * blocks each],
    which are copied to `gathered` [2 * kv_heads, all blocks, numbers of a block].

    `rows` None: all rows of the step, in order. `mask` and `causal` are for `attend` and
    `attend_causal`. Products are computed in `dtype`."""

    rows: torch.Tensor | None
    blocks: torch.Tensor
    gathered: torch.Tensor
    mask: torch.Tensor | None
    causal: Causal | None
    num_items: int
    num_rows: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Merge:
    """Row r takes partial `first[r]`; the rows `rows` take the merge of their `parts`
    [len(rows), most parts], where the index past the last partial means that there is none."""

    first: torch.Tensor
    rows: torch.Tensor | None
    parts: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """`slots`: where each row's KV goes, block * block_size + offset. `merge` None: the only call's
    result is that of the step."""

    slots: torch.Tensor
    calls: tuple[_Call, ...]
    merge: _Merge | None


class PromptKernel(Protocol):
    """Computes the attention of a prompt's last tokens faster than products of whole matrices. It
    is a protocol because its implementation, `cpu.attention.PromptAttention`, stands above."""

    def takes(self, q: torch.Tensor, num_keys: int) -> bool:
        """Whether it can for q [tokens, heads, head_dim]."""

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, num_keys: int, *, with_lse: bool = False
    ) -> Partial:
        """Each of the tokens sees the keys up to its own, which is among the last of `num_keys`."""


class TorchAttention:
    """Attention over a pool [layers, 2, kv_heads, blocks, block_size, head_dim]. `prompts` computes
    what it takes, once it is there."""

    def __init__(self, pool: PooledKV, num_heads: int) -> None:
        _, _, num_kv_heads, _, block_size, head_dim = pool.numbers.shape
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size)
        self._pool = pool
        self._slots = [layer.flatten(2, 3).unbind() for layer in pool.numbers]
        self._blocks = [layer.flatten(3).flatten(0, 1) for layer in pool.numbers]
        self._device = pool.numbers.device
        self._gathered = torch.empty(0, dtype=pool.numbers.dtype, device=self._device)
        self.prompts: PromptKernel | None = None

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
        return TorchPlan(self._tensor(slots), tuple(calls), self._merge(owners, len(positions)))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TorchPlan
    ) -> torch.Tensor:
        if self._pool.exponents is not None:
            (k, v), exponents = quantise(torch.stack((k, v)))
            _store(self._pool.exponents[layer].flatten(2, 3), plan, exponents)
        _store(self._slots[layer], plan, (k, v))
        merge = plan.merge
        with_lse = merge is not None and merge.parts is not None
        partials = [self._run_call(call, q, layer, with_lse) for call in plan.calls]
        if merge is None:
            return partials[0][0].flatten(1)
        return _merge_partials(partials, merge).flatten(1)

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
        num_keys = blocks.shape[1] * size
        dtype = self._product_type(rows.size * num_keys)
        causal = self._causal(visible, dtype)
        call = _Call(
            rows=None if in_order else self._tensor(rows.ravel()),
            blocks=self._tensor(blocks.ravel()),
            gathered=self._room(blocks.size),
            mask=None if causal else self._mask(np.maximum(visible, 1), num_keys, dtype),
            causal=causal,
            num_items=len(items),
            num_rows=len(column),
            dtype=dtype,
        )
        return call, owners.ravel()

    def _product_type(self, num_pairs: int) -> torch.dtype:
        """The type in which the products of so many pairs of a row and a key are computed."""
        dtype = self._pool.dtype
        if dtype is torch.bfloat16 and self._device.type == "cpu":
            num_products = num_pairs * self.shape.num_heads * self.shape.head_dim
            is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return dtype if is_fast and num_products > _FEW_PRODUCTS else torch.float32
        return torch.float32 if dtype.itemsize < 4 else dtype

    def _room(self, num_blocks: int) -> torch.Tensor:
        """Where blocks are gathered, those of one call at a time."""
        heads, _, size = self._blocks[0].shape
        if self._gathered.numel() < heads * num_blocks * size:
            self._gathered = self._gathered.new_empty(heads * num_blocks * size * 5 // 4)
        return self._gathered[: heads * num_blocks * size].view(heads, num_blocks, size)

    def _mask(self, visible: LongArray, num_keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask that hides all but the first `visible` [items, rows] keys, for each KV head."""
        if (visible == num_keys).all():
            return None
        if (visible == visible[:, :1]).all():
            visible = visible[:, :1]
        else:
            visible = np.repeat(visible, self.shape.group, axis=1)
        mask = self._hidden(np.arange(num_keys) >= visible[:, :, None], dtype)
        return mask if len(mask) == 1 else mask.repeat(self.shape.num_kv_heads, 1, 1)

    def _causal(self, visible: LongArray, dtype: torch.dtype) -> Causal | None:
        """None if it is not one large item of which each token sees a key more."""
        num_items, count = visible.shape
        last = int(visible[0, -1])
        is_large = num_items == 1 and count > 1 and count * last >= _ALONE
        if not is_large or (visible[0] != np.arange(last - count, last) + 1).any():
            return None
        group = self.shape.group
        size = max(SCORES // last, LEAST_ROWS) // group
        rows = np.arange(min(max(size, 1), _MOST_TOKENS, count))
        return Causal(last, group, self._hidden(rows > np.repeat(rows, group)[:, None], dtype))

    def _hidden(self, where: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
        mask = torch.zeros(where.shape, dtype=dtype)
        return mask.masked_fill_(torch.from_numpy(where), float("-inf")).to(self._device)

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

    def _run_call(self, call: _Call, q: torch.Tensor, layer: int, with_lse: bool) -> Partial:
        n, rows, (heads, d) = call.num_items, call.num_rows, q.shape[1:]
        kv_heads, group = self.shape.num_kv_heads, self.shape.group
        picked = q if call.rows is None else q.index_select(0, call.rows)
        if call.causal is not None and self.prompts is not None:
            num_keys = call.causal.num_keys
            if self.prompts.takes(picked, num_keys):
                kv = self._read(call, layer).view(2, kv_heads, -1, d)
                return self.prompts.run(picked, kv, num_keys, with_lse=with_lse)
        picked = picked.view(n, rows, kv_heads, group, d).permute(2, 0, 1, 3, 4)
        picked = picked.reshape(kv_heads * n, rows * group, d).to(call.dtype)
        kv = self._read(call, layer).view(2, kv_heads * n, -1, d).to(call.dtype)
        k, v = kv.unbind()  # not by iterating, which is slower
        if call.causal is None:
            out, lse = attend(picked, k, v, mask=call.mask, with_lse=with_lse)
        else:
            out, lse = attend_causal(picked, k, v, call.causal, with_lse=with_lse)
        out = out.view(kv_heads, n, rows, group, d).permute(1, 2, 0, 3, 4)
        if lse is not None:
            lse = lse.view(kv_heads, n, rows, group).permute(1, 2, 0, 3).reshape(n * rows, heads)
        return out.reshape(n * rows, heads, d).to(q.dtype), lse

    def _read(self, call: _Call, layer: int) -> torch.Tensor:
        """The KV of a call as it is in `gathered`, until the next read."""
        torch.index_select(self._blocks[layer], 1, call.blocks, out=call.gathered)
        if self._pool.exponents is None:
            return call.gathered
        exponents = self._pool.exponents[layer].flatten(0, 1).index_select(1, call.blocks)
        numbers = call.gathered.view(*exponents.shape, -1)
        return dequantise(numbers, exponents, self._pool.dtype)


def _store(slots: Tensors, plan: TorchPlan, new: Tensors) -> None:
    """Write `new` [rows, kv_heads, ...], k and v, to slots [kv_heads, slots, ...] of a layer."""
    for place, rows in zip(slots, new, strict=True):
        place.index_copy_(1, plan.slots, rows.transpose(0, 1))


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
        if groups and (rows == 1 or work < _ALONE):
            padded = (len(groups[-1]) + 1) * max(tallest, rows) * max(longest, keys)
            if padded - real - work <= max(_FREE_PADDING, _MAX_PADDING_RATIO * (real + work)):
                groups[-1].append(item)
                tallest, longest, real = max(tallest, rows), max(longest, keys), real + work
                continue
        groups.append([item])
        tallest, longest, real = rows, keys, work
    return groups


def _merge_partials(partials: Sequence[Partial], plan: _Merge) -> torch.Tensor:
    outs = [out for out, _ in partials]
    if plan.rows is None or plan.parts is None:
        return torch.cat(outs).index_select(0, plan.first)
    _, heads, d = outs[0].shape
    lses = [lse for _, lse in partials if lse is not None]
    out = torch.cat([*outs, outs[0].new_zeros(1, heads, d)])
    lse = torch.cat([*lses, lses[0].new_full((1, heads), float("-inf"))])
    result = out.index_select(0, plan.first)
    return result.index_copy_(0, plan.rows, merge(out[plan.parts], lse[plan.parts]))
