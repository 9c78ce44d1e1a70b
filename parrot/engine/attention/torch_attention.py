"""Runs a work list in plain torch, on any device. It is the reference of the kernels in tests.

Items of similar size are padded to one call. The partial results of all calls form one list, and
each row merges its own partial results by their indices instead of slots.
"""

import math
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
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule, plain_rule

SCORES = 1 << 20  # Target number of scores computed at once. They fit in a core's cache.
LEAST_ROWS = 64  # Fewest rows that are multiplied at once, even if this exceeds `SCORES`.
# Most scores computed at once: `LEAST_ROWS` rows of one head with 128k tokens.
_MOST_SCORES = LEAST_ROWS << 17
_NO_SCORE = -1e30  # A finite replacement for minus infinity.

Partial = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [rows, heads, head_dim], and the log-sum-exp [rows, heads] if parts are merged."""


@dataclass(frozen=True, slots=True)
class Causal:
    """The causal mask of a prompt's last tokens. The last token has the last of `num_keys` keys."""

    num_keys: int
    group: int  # Rows per token.
    # [rows of a block, tokens of a block], added to a block's last scores.
    mask: torch.Tensor
    window: torch.Tensor | None  # Like `mask`, added to the first scores of a full window.


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    *,
    mask: torch.Tensor | None = None,
    with_lse: bool = False,
) -> Partial:
    """Attention over a part of a context.

    q [batch, rows, d], k and v [batch, keys, d] -> out like q, and `with_lse` the natural log of
    the sum of exponentials of the scores, float32 [batch, rows], for `merge`. `mask`
    [batch or 1, rows or 1, keys] is added to the scores. It must hide what `rule` hides."""
    (batch, num_rows, _), num_keys = q.shape, k.shape[1]
    step = min(num_rows, max(SCORES // (batch * num_keys), LEAST_ROWS))
    most = max(1, _MOST_SCORES // (step * num_keys))
    if batch > most:
        return _joined(
            [
                attend(q[at], k[at], v[at], rule, mask=_part(mask, 0, at), with_lse=with_lse)
                for at in _slices(batch, most)
            ],
            0,
        )
    if num_rows > step:
        return _joined(
            [
                _attend(torch.baddbmm, q[:, at], k, v, rule, _part(mask, 1, at), with_lse)
                for at in _slices(num_rows, step)
            ],
            1,
        )
    return _attend(torch.baddbmm, q, k, v, rule, mask, with_lse)


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    causal: Causal,
    *,
    with_lse: bool = False,
) -> Partial:
    """`attend` for the last tokens of a context, with a causal mask.

    Each block of rows skips the keys after its last token, and before its first token's window."""
    # Heads are computed one by one. torch would copy a batch of partial matrices.
    batch, num_rows, _ = q.shape
    block, group = len(causal.mask), causal.group
    out, lse = torch.empty_like(q), q.new_empty((batch, num_rows), dtype=torch.float32)
    for head, first in product(range(batch), range(0, num_rows, block)):
        end = min(first + block, num_rows)
        seen = causal.num_keys - (num_rows - end) // group
        size = end - first, (end - first) // group
        mask, before, begin = causal.mask[: size[0], : size[1]], None, 0
        if rule.window is not None:
            assert causal.window is not None
            start = causal.num_keys - (num_rows - first) // group + 1 - rule.window
            begin = max(0, start)
            before = causal.window[: size[0], begin - start : size[1]]
        rows = q[head, first:end], k[head, begin:seen], v[head, begin:seen]
        out[head, first:end], sums = _attend(torch.addmm, *rows, rule, mask, with_lse, before)
        if sums is not None:
            lse[head, first:end] = sums
    return out, lse if with_lse else None


def _attend(
    add_product: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    mask: torch.Tensor | None,
    with_lse: bool,
    before: torch.Tensor | None = None,
) -> Partial:
    """`attend` for rows of one head (without a batch dimension) or of several heads.

    A mask with fewer keys applies to the last keys, and `before` to the first keys."""
    # Scores are rounded to the type of q. In bfloat16 the products then take a third of the time.
    if mask is not None and mask.shape[-1] == k.shape[-2] and rule.softcap is None:
        scores = add_product(mask, q, k.mT, alpha=rule.scale)
    else:
        scores = add_product(q.new_empty(1), q, k.mT, beta=0, alpha=rule.scale)
        if rule.softcap is not None:
            scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if mask is not None:
            scores[..., -mask.shape[-1] :].add_(mask)
    if before is not None:
        scores[..., : before.shape[-1]].add_(before)
    if not with_lse:
        return scores.softmax(-1) @ v, None
    weights = scores.softmax(-1, dtype=torch.float32)
    lse = scores.amax(-1).float() - weights.amax(-1).log()
    return weights.to(v.dtype) @ v, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """outs [rows, parts, heads, d], lses [rows, parts, heads] -> [rows, heads, d].

    The softmax over all keys is the mean of the parts' softmaxes, weighted by exp(lse). A missing
    part has an lse of -inf."""
    weights = lses.softmax(dim=1).to(outs.dtype)
    return (outs * weights.unsqueeze(-1)).sum(dim=1)


# Spans are not split, because `attend` chooses the number of rows itself.
WHOLE_SPANS = SplitConfig(num_sms=1, min_span=(1 << 30,) * 3, tile_rows=1 << 30)

Tensors = torch.Tensor | Sequence[torch.Tensor]

# Costs of sharing on a CPU. An additional call per layer costs as much as reading 1.2 MB of KV.
_MEMORY_RATE = 10e9  # Bytes/s at which a CPU reads KV.
_CALL_S = 120e-6  # Seconds of an additional call.

# An item joins a call if the padding is at most this number of row-key pairs, or at most this ratio
# of the real pairs. 1,024 pairs take about as long as another call.
_FREE_PADDING = 1024
_MAX_PADDING_RATIO = 0.25
# Prompt chunks with this number of row-key pairs get a call of their own, which skips hidden keys.
_ALONE = 1 << 14

_MOST_TOKENS = 128  # Most tokens in a causal block. A block also computes its hidden scores.
# Up to this number of multiplications, float32 is faster than oneDNN's bfloat16, which has a
# constant cost per product.
_FEW_PRODUCTS = 3 << 16


def cpu_gate(dtype: torch.dtype) -> GateConfig:
    """The cost model of sharing on a CPU: a shared node is one more call."""
    call_s = _CALL_S * 2 / dtype.itemsize  # `AttentionShape` assumes numbers of two bytes.
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
    """Items of similar size, padded to equal numbers of rows and blocks."""

    rows: torch.Tensor | None  # Rows of q; None for all rows of the step, in order.
    blocks: torch.Tensor  # [items * blocks of an item].
    gathered: torch.Tensor  # Buffer for the blocks [2 * kv_heads, all blocks, numbers of a block].
    mask: torch.Tensor | None  # For `attend`.
    causal: Causal | None  # For `attend_causal`.
    num_items: int
    num_rows: int  # Rows of an item.
    dtype: torch.dtype  # Type of the products.


@dataclass(frozen=True, slots=True)
class _Merge:
    """How partial results become the result of a step."""

    first: torch.Tensor  # The result of row r is partial `first[r]`, unless r is in `rows`.
    rows: torch.Tensor | None  # Rows with several partial results.
    # [rows, most partials of a row]: their partial results. Missing ones have the index after the
    # last partial result.
    parts: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a step, for layers with the same window."""

    calls: tuple[_Call, ...]
    merge: _Merge | None  # None if the result of the only call is the result of the step.


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The attention plan of a step."""

    slots: torch.Tensor  # The slot of each row's KV: block * block_size + offset.
    calls: dict[int | None, _Calls]  # By the size of the window; None: no window.


class PromptKernel(Protocol):
    """A faster kernel for the attention of a prompt's last tokens.

    A protocol, because this package may not import its implementation
    (`cpu.attention.PromptAttention`)."""

    def takes(self, q: torch.Tensor, num_keys: int) -> bool:
        """Whether the kernel supports q [tokens, heads, head_dim]."""

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, num_keys: int, *, with_lse: bool = False
    ) -> Partial:
        """Causal attention. The keys of the tokens are the last of `num_keys` keys."""


class TorchAttention:
    """Attention over a pool [layers, 2, kv_heads, blocks, block_size, head_dim].

    `prompts` is set once its kernel is compiled."""

    def __init__(
        self, pool: PooledKV, num_heads: int, rules: Sequence[ScoreRule] | None = None
    ) -> None:
        """`rules`: of each layer; None: `plain_rule`."""
        _, _, num_kv_heads, _, block_size, head_dim = pool.numbers.shape
        self.shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size)
        self._pool = pool
        self._slots = [layer.flatten(2, 3).unbind() for layer in pool.numbers]
        self._blocks = [layer.flatten(3).flatten(0, 1) for layer in pool.numbers]
        self._device = pool.numbers.device
        self._gathered = torch.empty(0, dtype=pool.numbers.dtype, device=self._device)
        self.prompts: PromptKernel | None = None
        self._plain = plain_rule(head_dim)
        self._rules = rules or [self._plain] * len(pool.numbers)
        self._windows = list(dict.fromkeys(rule.window for rule in self._rules))

    def plan(self, work: WorkList, step: StepRows) -> TorchPlan:
        size = self.shape.page_size
        requests, positions = step.requests, step.positions.astype(np.int64)
        slots = step.tables[requests, positions // size] * size + positions % size
        items = np.concatenate((work.narrow, work.shared, work.fills, work.converted_fills)).astype(
            np.int64
        )
        calls = {window: self._calls(items, work, step, window) for window in self._windows}
        return TorchPlan(self._tensor(slots), calls)

    def _calls(
        self, items: LongArray, work: WorkList, step: StepRows, window: int | None
    ) -> _Calls:
        positions = step.positions.astype(np.int64)
        if window is not None:
            items = _in_window(items, work, positions, window, self.shape.page_size)
        calls, owners = [], []
        for members in _group(items[:, Q_COUNT], _num_keys(items, work, positions)):
            call, rows = self._call(items[members], work, step, positions, window)
            calls.append(call)
            owners.append(rows)
        return _Calls(tuple(calls), self._merge(owners, len(positions)))

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TorchPlan
    ) -> torch.Tensor:
        if self._pool.exponents is not None:
            (k, v), exponents = quantise(torch.stack((k, v)))
            _store(self._pool.exponents[layer].flatten(2, 3), plan, exponents)
        _store(self._slots[layer], plan, (k, v))
        planned = plan.calls[self._rules[layer].window]
        merge = planned.merge
        with_lse = merge is not None and merge.parts is not None
        partials = [self._run_call(call, q, layer, with_lse) for call in planned.calls]
        if merge is None:
            return partials[0][0].flatten(1)
        return _merge_partials(partials, merge).flatten(1)

    def _tensor(self, array: LongArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _call(
        self,
        items: LongArray,
        work: WorkList,
        step: StepRows,
        positions: LongArray,
        window: int | None,
    ) -> tuple[_Call, LongArray]:
        """The call for `items`, and the row of each of its partial results; -1 for padding."""
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
        mask = None
        if causal is None:
            before = None
            if window is not None:
                before = positions[rows] + 1 - window - items[:, KV_FIRST, None]
            mask = self._mask(np.maximum(visible, 1), before, num_keys, dtype)
        call = _Call(
            rows=None if in_order else self._tensor(rows.ravel()),
            blocks=self._tensor(blocks.ravel()),
            gathered=self._room(blocks.size),
            mask=mask,
            causal=causal,
            num_items=len(items),
            num_rows=len(column),
            dtype=dtype,
        )
        return call, owners.ravel()

    def _product_type(self, num_pairs: int) -> torch.dtype:
        """The type of the products of a call with `num_pairs` pairs of a row and a key."""
        dtype = self._pool.dtype
        if dtype is torch.bfloat16 and self._device.type == "cpu":
            num_products = num_pairs * self.shape.num_heads * self.shape.head_dim
            is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return dtype if is_fast and num_products > _FEW_PRODUCTS else torch.float32
        return torch.float32 if dtype.itemsize < 4 else dtype

    def _room(self, num_blocks: int) -> torch.Tensor:
        """The buffer for the gathered blocks of one call. Calls reuse the same memory."""
        heads, _, size = self._blocks[0].shape
        if self._gathered.numel() < heads * num_blocks * size:
            self._gathered = self._gathered.new_empty(heads * num_blocks * size * 5 // 4)
        return self._gathered[: heads * num_blocks * size].view(heads, num_blocks, size)

    def _mask(
        self, visible: LongArray, before: LongArray | None, num_keys: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A mask per KV head that hides all keys except the first `visible` [items, rows].

        It also hides the first `before` keys [items, rows]."""
        keys = np.arange(num_keys)
        if before is not None and (before > 0).any():
            hides = (keys >= visible[:, :, None]) | (keys < before[:, :, None])
            # A row may see no key of an item, and a softmax over infinities would be NaN.
            return self._of_heads(np.repeat(hides, self.shape.group, axis=1), dtype, _NO_SCORE)
        if (visible == num_keys).all():
            return None
        if (visible == visible[:, :1]).all():
            visible = visible[:, :1]
        else:
            visible = np.repeat(visible, self.shape.group, axis=1)
        return self._of_heads(keys >= visible[:, :, None], dtype)

    def _of_heads(
        self, hides: npt.NDArray[np.bool_], dtype: torch.dtype, value: float = -math.inf
    ) -> torch.Tensor:
        mask = self._hidden(hides, dtype, value)
        return mask if len(mask) == 1 else mask.repeat(self.shape.num_kv_heads, 1, 1)

    def _causal(self, visible: LongArray, dtype: torch.dtype) -> Causal | None:
        """The causal mask, if the call is one large item whose tokens are consecutive."""
        num_items, count = visible.shape
        last = int(visible[0, -1])
        is_large = num_items == 1 and count > 1 and count * last >= _ALONE
        if not is_large or (visible[0] != np.arange(last - count, last) + 1).any():
            return None
        group = self.shape.group
        size = max(SCORES // last, LEAST_ROWS) // group
        rows = np.arange(min(max(size, 1), _MOST_TOKENS, count))
        tokens = np.repeat(rows, group)[:, None]
        window = self._hidden(rows < tokens, dtype) if any(self._windows) else None
        return Causal(last, group, self._hidden(rows > tokens, dtype), window)

    def _hidden(
        self, where: npt.NDArray[np.bool_], dtype: torch.dtype, value: float = -math.inf
    ) -> torch.Tensor:
        mask = torch.zeros(where.shape, dtype=dtype)
        return mask.masked_fill_(torch.from_numpy(where), value).to(self._device)

    def _merge(self, owners: Sequence[LongArray], num_rows: int) -> _Merge | None:
        """The merge of the partial results. `owners`: the row of each partial result, by call."""
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
        rule = self._rules[layer]
        picked = q if call.rows is None else q.index_select(0, call.rows)
        if call.causal is not None and self.prompts is not None and rule == self._plain:
            num_keys = call.causal.num_keys
            if self.prompts.takes(picked, num_keys):
                kv = self._read(call, layer).view(2, kv_heads, -1, d)
                return self.prompts.run(picked, kv, num_keys, with_lse=with_lse)
        picked = picked.view(n, rows, kv_heads, group, d).permute(2, 0, 1, 3, 4)
        picked = picked.reshape(kv_heads * n, rows * group, d).to(call.dtype)
        kv = self._read(call, layer).view(2, kv_heads * n, -1, d).to(call.dtype)
        k, v = kv.unbind()  # Unpacking the tensor itself is slower.
        if call.causal is None:
            out, lse = attend(picked, k, v, rule, mask=call.mask, with_lse=with_lse)
        else:
            out, lse = attend_causal(picked, k, v, rule, call.causal, with_lse=with_lse)
        out = out.view(kv_heads, n, rows, group, d).permute(1, 2, 0, 3, 4)
        if lse is not None:
            lse = lse.view(kv_heads, n, rows, group).permute(1, 2, 0, 3).reshape(n * rows, heads)
        return out.reshape(n * rows, heads, d).to(q.dtype), lse

    def _read(self, call: _Call, layer: int) -> torch.Tensor:
        """Gather the KV of a call. The result is valid until the next call of this method."""
        torch.index_select(self._blocks[layer], 1, call.blocks, out=call.gathered)
        if self._pool.exponents is None:
            return call.gathered
        exponents = self._pool.exponents[layer].flatten(0, 1).index_select(1, call.blocks)
        numbers = call.gathered.view(*exponents.shape, -1)
        return dequantise(numbers, exponents, self._pool.dtype)


def _store(slots: Tensors, plan: TorchPlan, new: Tensors) -> None:
    """Write new k and v [rows, kv_heads, ...] to the slots [kv_heads, slots, ...] of a layer."""
    for place, rows in zip(slots, new, strict=True):
        place.index_copy_(1, plan.slots, rows.transpose(0, 1))


def _rows(items: LongArray, work: WorkList, members: LongArray) -> LongArray:
    """The rows of q of tokens `members[i]` of each item i."""
    places = items[:, Q_FIRST, None] + members
    own = items[:, OWN, None] != 0
    ordered = work.token_order[np.where(own, 0, places)]
    return np.where(own, places, ordered)


def _num_visible(items: LongArray, positions: LongArray) -> LongArray:
    """The number of an item's keys that are visible at `positions` [items, queries].

    0 or less if all its keys come later."""
    ends = items[:, KV_END, None]
    ends = np.where(items[:, OWN, None] != 0, np.minimum(ends, positions + 1), ends)
    return ends - items[:, KV_FIRST, None]


def _in_window(
    items: LongArray, work: WorkList, positions: LongArray, window: int, page_size: int
) -> LongArray:
    """Items without the pages that are in no row's window."""
    counts = items[:, Q_COUNT, None]
    rows = _rows(items, work, np.minimum(np.arange(counts.max()), counts - 1))
    first = np.maximum(positions[rows].min(axis=1) + 1 - window, 0) // page_size * page_size
    clipped = items.copy()
    clipped[:, KV_FIRST] = np.maximum(items[:, KV_FIRST], first)
    return clipped[clipped[:, KV_FIRST] < items[:, KV_END]]


def _num_keys(items: LongArray, work: WorkList, positions: LongArray) -> LongArray:
    last = _rows(items, work, items[:, Q_COUNT, None] - 1)
    return _num_visible(items, positions[last])[:, 0]


def _group(num_rows: LongArray, num_keys: LongArray) -> list[list[int]]:
    """Group items of similar size, largest first.

    An item joins a group while the padding is cheap (`_FREE_PADDING`, `_MAX_PADDING_RATIO`)."""
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
