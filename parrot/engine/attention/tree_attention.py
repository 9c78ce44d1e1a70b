"""Launches the tree attention kernels for a work list."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from parrot.engine.attention.work_list import (
    CONVERTED_FIRST,
    ITEM_FIELDS,
    TABLE_ROW,
    SplitConfig,
    WorkList,
)
from parrot.engine.kernels.attention_kernels import attend_items, merge_partials
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule, plain_rule
from parrot.engine.kernels.launch import (
    KVView,
    NewKV,
    early_launch,
    is_hopper,
    starts_early,
)
from parrot.engine.kernels.quantised_kernels import attend_quantised_items, convert_pages_kernel
from parrot.engine.kernels.tile_kernels import attend_tiles

T = TypeVar("T")

_MAX_BYTES = 512 << 20  # Largest size of the buffer of converted pages, in bytes.
_SHARE_OF_POOL = 4  # The buffer has at most 1/4 of the pool's pages.
_BLOCK_ROWS = 32  # Rows (one token of one head) that a program of the conversion processes.


class ConvertedPages:
    """Owns the buffer for `num_pages` converted pages of one layer. All layers reuse it."""

    def __init__(self, num_pages: int, page: torch.Size, like: torch.Tensor) -> None:
        """`page`: [kv_heads, page_size, head_dim]; `like`: of the type and device of q."""
        self.k, self.v = (like.new_empty((num_pages, *page)) for _ in "kv")
        # Row r of this table starts with page r. Kernels prefetch the last entry and never use it.
        self._table = torch.arange(num_pages + 1, dtype=torch.int32, device=like.device)[:, None]

    @classmethod
    def of(cls, codes: torch.Tensor, dtype: torch.dtype) -> "ConvertedPages":
        """A buffer for a pool of codes [layers, 2, pages, kv_heads, page_size, head_dim].

        It is small in comparison with the pool."""
        _, _, num_pages, *page = codes.shape
        like = torch.empty(0, dtype=dtype, device=codes.device)
        page_bytes = 2 * torch.Size(page).numel() * like.element_size()
        num_converted = min(num_pages // _SHARE_OF_POOL, _MAX_BYTES // page_bytes)
        return cls(num_converted, torch.Size(page), like)

    def __len__(self) -> int:
        return len(self.k)

    def convert(self, kv: KVView, pages: torch.Tensor) -> KVView:
        """Convert `pages` of a quantised layer, in order (int32; -1 for padding).

        Row r of the result's block table starts with the r-th of them."""
        assert len(pages) <= len(self), (len(pages), len(self))
        num_rows = self.k[0, ..., 0].numel()
        convert_pages_kernel[(len(pages), triton.cdiv(num_rows, _BLOCK_ROWS))](
            kv.k,
            kv.v,
            kv.k_exponents,
            kv.v_exponents,
            pages,
            self.k,
            self.v,
            ROWS=num_rows,
            D=self.k.shape[-1],
            BLOCK=_BLOCK_ROWS,
            num_warps=4,
        )
        return KVView(self.k, self.v, self._table, kv.positions)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of the largest plan that fixed buffers hold.

    A captured graph launches programs for the whole capacity. `is_even` selects the tiles of narrow
    items; both kinds of plans run with either."""

    num_tokens: int
    narrow: int
    shared: int
    fills: int
    slots: int
    is_even: bool = False
    converted_fills: int = 0
    converted_pages: int = 0

    @classmethod
    def of(cls, work: WorkList) -> "Capacity":
        return cls(
            len(work.token_order),
            len(work.narrow),
            len(work.shared),
            len(work.fills),
            work.num_slots,
            work.narrow_is_even,
            len(work.converted_fills),
            len(work.converted_pages),
        )

    def holds(self, work: WorkList) -> bool:
        need = Capacity.of(work)
        return (
            need.num_tokens <= self.num_tokens
            and need.narrow <= self.narrow
            and need.shared <= self.shared
            and need.fills <= self.fills
            and need.slots <= self.slots
            and need.converted_fills <= self.converted_fills
            and need.converted_pages <= self.converted_pages
        )


class PlanBuffers:
    """A work list in GPU memory at fixed addresses: one int32 buffer, one copy per plan.

        [ narrow | shared | fills | converted_fills | token_order | slot_indptr | slot_of |
          converted_pages ]

    The unused entries of a smaller plan are zero (items without tokens, tokens without slots), and
    -1 for pages. In converted fills TABLE_ROW is CONVERTED_FIRST, a row of the converted table."""

    def __init__(
        self, work: WorkList, device: torch.device, capacity: Capacity | None = None
    ) -> None:
        """`capacity`: by default the size of `work`."""
        capacity = capacity or Capacity.of(work)
        sizes = (
            capacity.narrow * ITEM_FIELDS,
            capacity.shared * ITEM_FIELDS,
            capacity.fills * ITEM_FIELDS,
            capacity.converted_fills * ITEM_FIELDS,
            capacity.num_tokens,
            capacity.num_tokens + 1,
            capacity.slots,
            capacity.converted_pages,
        )
        # Kernels read items as 32-byte rows, so every part must be aligned.
        starts = np.cumsum([0, *(-(-size // 32) * 32 for size in sizes)]).tolist()
        self.capacity = capacity
        pinned = device.type == "cuda"
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=pinned)
        self._device = torch.empty(starts[-1], dtype=torch.int32, device=device)
        parts = list(zip(starts, sizes, strict=False))
        self._host_parts = [self._host[a : a + n].numpy() for a, n in parts]
        views = [self._device[a : a + n] for a, n in parts]
        self.narrow, self.shared, self.fills, self.converted_fills = views[:4]
        self.token_order, self.slot_indptr, self.slot_of, self.converted_pages = views[4:]
        self.upload(work)

    def upload(self, work: WorkList) -> None:
        """Replace the plan, on the current stream. The copy of the last plan must have finished."""
        assert self.capacity.holds(work), (self.capacity, Capacity.of(work))
        converted_fills = work.converted_fills.copy()
        converted_fills[:, TABLE_ROW] = converted_fills[:, CONVERTED_FIRST]
        items = (work.narrow, work.shared, work.fills, converted_fills)
        sources = (*items, work.token_order, work.slot_indptr, work.slot_of, work.converted_pages)
        for target, source in zip(self._host_parts, sources, strict=True):
            flat = source.reshape(-1)
            target[: len(flat)] = flat
            target[len(flat) :] = 0
        self._host_parts[5][len(work.slot_indptr) :] = work.num_slots
        self._host_parts[7][len(work.converted_pages) :] = -1
        self._device.copy_(self._host, non_blocking=True)
        self.work = work


_DENSE_TOKENS = 1024  # The length of a dense span is a multiple of this number of tokens.
_MERGE_SLOTS = 8  # Partial results that a program of the merge loads at once.
# Heads of a program of the merge, with more tokens than in the graphs of most decodes. In such
# steps most programs have nothing to merge.
_MERGE_HEADS, _MANY_TOKENS = 8, 256


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Compile-time parameters of an attention kernel."""

    # Keys in a tile. `attend_tiles` needs a divisor of the page size. `attend_items` is faster with
    # a divisor, because it gathers the rows of a tile that spans pages.
    block_keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # Per thread; None for no limit.


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The tiles of all classes of items, chosen on an H200 (docs/internals/kernels.md)."""

    # Tiles of narrow items. `deep` reads fastest, but only `deep_resident` of its programs run at
    # the same time. If equal programs need slightly more than a full round, the last round leaves
    # most of the GPU idle. So `light` is used up to `deep_rounds` rounds.
    deep: TileConfig = TileConfig(64, 4, 3)
    light: TileConfig = TileConfig(32, 2, 4)
    deep_resident: int = 396
    deep_rounds: int = 4
    wide: TileConfig = TileConfig(64, 4, 3)  # Tiles of shared items and fills.

    def narrow(self, programs: int, *, is_even: bool) -> TileConfig:
        return self.light if is_even and self.evenness_counts(programs) else self.deep

    def evenness_counts(self, programs: int) -> bool:
        return 1.0 < programs / self.deep_resident < self.deep_rounds


_QUANTISED_TILE = TileConfig(64, 4, 3, max_registers=128)
# Four programs run per multiprocessor. Light tiles were slower for any number of programs.
_FOR_QUANTISED = KernelConfig(
    deep=_QUANTISED_TILE, light=_QUANTISED_TILE, deep_resident=528, deep_rounds=0
)


# The tiles of larger heads take twice the registers and the shared memory. Not measured.
_LARGE_HEAD = 256
_NARROW_LARGE = TileConfig(32, 4, 3)
_FOR_LARGE_HEADS = KernelConfig(
    deep=_NARROW_LARGE, light=_NARROW_LARGE, deep_rounds=0, wide=TileConfig(32, 8, 3)
)


def config_for(shape: AttentionShape) -> KernelConfig:
    """The tiles for a head size and the number type of a pool."""
    if shape.head_dim >= _LARGE_HEAD:
        return _FOR_LARGE_HEADS
    return _FOR_QUANTISED if shape.number_bytes == 1 else KernelConfig()


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments that all launches of one `run` have in common."""

    q: torch.Tensor
    kv: KVView
    plan: PlanBuffers
    out: torch.Tensor
    early: bool  # Kernels may start before the previous one has ended.
    next_early: bool  # So may the kernel after attention, as soon as attention has started.
    rule: ScoreRule


class TreeAttention:
    """Attention for layers of one shape. Owns the buffers of partial results."""

    def __init__(
        self,
        shape: AttentionShape,
        max_slots: int,
        device: torch.device,
        config: KernelConfig | None = None,
        *,
        converted: ConvertedPages | None = None,
        upcast: bool = False,
    ) -> None:
        """`max_slots`: the most partial results of a plan, float32 [max_slots, heads, head_dim].

        `converted`: the buffer for converted pages. `upcast`: compute in float32, for Triton's
        interpreter, which does not support bfloat16."""
        self.shape = shape
        self.config = config or config_for(shape)
        self.upcast = upcast
        self._converted = converted
        self._plain = plain_rule(shape.head_dim)
        is_cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        size = (max(max_slots, 1), shape.num_heads)
        self.partial_out = torch.empty((*size, shape.head_dim), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(size, dtype=torch.float32, device=device)

    def run(
        self,
        q: torch.Tensor,
        kv: KVView,
        plan: PlanBuffers,
        out: torch.Tensor,
        new: NewKV | None = None,
        *,
        rule: ScoreRule | None = None,
        only_last: bool = False,
        next_early: bool = False,
    ) -> torch.Tensor:
        """Compute the attention of each token to the KV up to its own position. Returns `out`.

        q          [tokens, heads, head_dim]; heads contiguous, tokens at any stride
        out        [tokens, heads, head_dim], contiguous
        new        required if the plan has dense spans
        rule       of the layer; None for `plain_rule`
        only_last  compute at least the output of each request's last token
        next_early the next kernel may start as soon as attention has started"""
        num_wide = len(plan.shared) + len(plan.fills) + len(plan.converted_fills)
        side = self._side if len(plan.narrow) and num_wide else None
        early = side is None and starts_early(q.device)
        step = _Step(q, kv, plan, out, early, next_early, rule or self._plain)
        self._check(step)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        if len(plan.shared):
            self._wide(step, plan.shared, own=False)
        if len(plan.fills):
            self._wide(step, plan.fills, own=True)
        if len(plan.converted_fills):
            assert self._converted is not None
            converted = self._converted.convert(kv, plan.converted_pages)
            self._wide(replace(step, kv=converted), plan.converted_fills, own=True)
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            if len(plan.narrow):
                programs = len(plan.narrow) // ITEM_FIELDS * self.shape.num_kv_heads
                even = plan.capacity.is_even
                self._items(step, plan.narrow, 16, self.config.narrow(programs, is_even=even))
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        if plan.capacity.slots:
            self._merge(step)
        for first, count in plan.work.dense:
            assert new is not None
            span = slice(first, first + count)
            last = slice(first + count - 1, first + count) if only_last else span
            out[last] = dense_attention(q[last], new.k[span], new.v[span], step.rule)
        return out

    def _check(self, step: _Step) -> None:
        shape, kv, plan = self.shape, step.kv, step.plan
        assert kv.k.shape[1:] == (shape.num_kv_heads, shape.page_size, shape.head_dim), kv.k.shape
        kv.check()
        assert kv.tables.stride(1) == 1
        assert step.q.stride()[1:] == (shape.head_dim, 1), step.q.stride()
        assert step.out.is_contiguous()
        assert len(step.q) <= plan.capacity.num_tokens, (len(step.q), plan.capacity)
        num_slots = plan.work.num_slots
        assert num_slots <= len(self.partial_out), (num_slots, len(self.partial_out))

    def _wide(self, step: _Step, items: torch.Tensor, *, own: bool) -> None:
        tile, rows = self.config.wide, step.plan.work.tile_rows
        if self.shape.page_size % tile.block_keys:
            if step.kv.is_quantised:
                tile = replace(tile, num_warps=8)
            self._items(step, items, rows, tile)
        else:
            self._tiles(step, items, rows, tile, own=own)

    def _arguments(self, step: _Step, items: torch.Tensor) -> tuple[object, ...]:
        """The arguments from the block tables to the stride of q, common to all item kernels."""
        return (
            step.kv.tables,
            step.kv.positions,
            step.plan.token_order,
            items,
            step.plan.slot_of,
            step.out,
            self.partial_out,
            self.partial_lse,
            step.rule.scale * math.log2(math.e),
            step.q.stride(0),
        )

    def _items(self, step: _Step, items: torch.Tensor, rows: int, tile: TileConfig) -> None:
        shape, kv = self.shape, step.kv
        if kv.is_quantised:
            attend_quantised_items[(shape.num_kv_heads, len(items) // ITEM_FIELDS)](
                step.q,
                kv.k.view(torch.int16),
                kv.v.view(torch.int16),
                kv.k_exponents,
                kv.v_exponents,
                *self._arguments(step, items),
                kv.tables.stride(0),
                **early_launch(step.early),
                **self._constants(step.rule, rows, tile),
            )
            return
        if self._copies_early(step):
            self._early_items(step, items)
            return
        attend_items[(shape.num_kv_heads, len(items) // ITEM_FIELDS)](
            step.q,
            kv.k,
            kv.v,
            *self._arguments(step, items),
            kv.k.stride(0),
            kv.tables.stride(0),
            STRIDE_HEAD=kv.k.stride(1),
            STRIDE_TOKEN=kv.k.stride(2),
            ALL_MASKED=rows == 16 or step.rule.window is not None,
            EARLY=step.next_early,
            **early_launch(step.early),
            **self._constants(step.rule, rows, tile),
        )

    def _copies_early(self, step: _Step) -> bool:
        """Whether `attend_early` computes a step. With more tokens, it is not faster."""
        q = step.q
        if len(q) > 1 or not step.early or self.upcast or not is_hopper(q.device):
            return False
        # Gluon is imported only on GPUs that run the kernel.
        from parrot.engine.kernels.early_kernels import supports

        return q.dtype == torch.bfloat16 and supports(self.shape, step.rule)

    def _early_items(self, step: _Step, items: torch.Tensor) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        from parrot.engine.kernels.early_kernels import (
            COPIED,
            KEYS,
            MAX_REGISTERS,
            WARPS,
            attend_early,
        )

        shape, kv = self.shape, step.kv
        describe = partial(GluonDescriptor.from_tensor, layout=COPIED.value)
        k_rows, v_rows = self._kv_rows(kv, int(KEYS.value), describe)
        attend_early[(shape.num_kv_heads, len(items) // ITEM_FIELDS)](
            step.q,
            k_rows,
            v_rows,
            kv.tables,
            kv.positions,
            items,
            step.plan.slot_of,
            step.out,
            self.partial_out,
            self.partial_lse,
            step.rule.scale * math.log2(math.e),
            kv.tables.stride(0),
            EARLY=step.next_early,
            **self._sizes(),
            num_warps=int(WARPS.value),
            maxnreg=MAX_REGISTERS,
            launch_pdl=True,
        )

    def _tiles(
        self, step: _Step, items: torch.Tensor, rows: int, tile: TileConfig, *, own: bool
    ) -> None:
        shape, kv = self.shape, step.kv
        k_rows, v_rows = self._kv_rows(kv, tile.block_keys, TensorDescriptor.from_tensor)
        attend_tiles[(shape.num_kv_heads, len(items) // ITEM_FIELDS)](
            step.q,
            k_rows,
            v_rows,
            kv.k_exponents,
            kv.v_exponents,
            *self._arguments(step, items),
            kv.tables.stride(0),
            OWN=own,
            QUANTISED=kv.is_quantised,
            **self._constants(step.rule, rows, tile),
        )

    def _kv_rows(
        self, kv: KVView, block_keys: int, describe: Callable[[torch.Tensor, list[int]], T]
    ) -> tuple[T, T]:
        """Descriptors of the rows of k and v [pages * kv_heads * page_size, head_dim]."""
        dim = self.shape.head_dim
        block = [block_keys, dim]
        return describe(kv.k.view(-1, dim), block), describe(kv.v.view(-1, dim), block)

    def _sizes(self) -> dict[str, int]:
        """The constants of all item kernels."""
        shape = self.shape
        return {
            "G": shape.group,
            "H": shape.num_heads,
            "D": shape.head_dim,
            "PAGE": shape.page_size,
        }

    def _constants(
        self, rule: ScoreRule, rows: int, tile: TileConfig
    ) -> dict[str, int | float | None]:
        gathers = self.shape.page_size % tile.block_keys > 0  # Gathering takes more registers.
        is_simple = not gathers and rule.window is None  # Windows take more registers as well.
        limited = tile.max_registers is not None and is_simple
        return {
            **self._sizes(),
            "BM": rows,
            "BN": tile.block_keys,
            "STAGES": tile.num_stages,
            "WINDOW": rule.window or 0,
            "SOFTCAP": (rule.softcap or 0.0) * math.log2(math.e),
            "UPCAST": self.upcast,
            "num_warps": tile.num_warps,
            **({"maxnreg": tile.max_registers} if limited else {}),
        }

    def _merge(self, step: _Step) -> None:
        num_heads = self.shape.num_heads
        is_many = len(step.q) > _MANY_TOKENS and num_heads % _MERGE_HEADS == 0
        heads = _MERGE_HEADS if is_many else 1
        merge_partials[(len(step.q), num_heads // heads)](
            self.partial_out,
            self.partial_lse,
            step.plan.slot_indptr,
            step.out,
            H=num_heads,
            D=self.shape.head_dim,
            SLOTS=_MERGE_SLOTS,
            HEADS=heads,
            EARLY=step.next_early,
            num_warps=1,
            **early_launch(step.early),
        )


def split_for(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, converted_pages: int = 0
) -> SplitConfig:
    """The split rules for a device and the number type of a pool.

    `converted_pages`: the size of the buffer of converted pages."""
    split = SplitConfig(converted_pages=converted_pages)
    if shape.number_bytes == 1:
        split = replace(split, waves=(4.0, 1.0, 1.0), min_span=(256, 256, 256), uneven=1.0)
    if device.type != "cuda":
        return split
    return replace(
        split,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        dense=_DENSE_TOKENS if can_be_dense(shape, dtype, device) else None,
    )


def can_be_dense(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN supports these heads, on a GPU on which `dense_attention` is faster."""
    if not is_hopper(device):
        return False
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.empty((1, n, 128, shape.head_dim), dtype=dtype, device=device) for n in sizes)
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Causal attention of tokens to each other, or of the last token if q has one token.

    The rule may only have a scale.

    q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim].
    """
    # cuDNN's kernel uses less energy than Parrot's, and the power limit bounds long prompts. Its
    # preparation takes about 30 ms for each new number of tokens.
    is_causal = len(q) > 1
    assert rule == ScoreRule(rule.scale), rule
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda and is_causal else SDPBackend.MATH
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=rule.scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)
