"""Attention over a paged pool with the Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from parrot.engine.attention.quantised import PooledLayers, dequantise, quantise
from parrot.engine.attention.tree_attention import (
    ConvertedPages,
    PlanBuffers,
    TreeAttention,
    dense_attention,
    split_for,
)
from parrot.engine.attention.work_list import SplitConfig
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule, plain_rule
from parrot.engine.kernels.launch import KVView, NewKV


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The arrays in GPU memory that all layers of a step use."""

    buffers: PlanBuffers
    tables: torch.Tensor
    positions: torch.Tensor
    # int32 [rows]: each row's row of `tables`. It is negative for padding, whose KV is stored in no
    # context and whose result is undefined.
    table_rows: torch.Tensor
    slot_tables: torch.Tensor | None = None  # The window slots of `tables`.


class _Layer(NamedTuple):
    """A layer's KV [2, blocks, kv_heads, block_size, ...] and how it is found."""

    numbers: torch.Tensor
    exponents: torch.Tensor | None
    in_slots: bool


class TritonAttention:
    """Attention over pools [layers, 2, blocks, kv_heads, block_size, head_dim] of one shape.

    The last block of a pool belongs to no context. Padding writes to it."""

    def __init__(
        self,
        groups: Sequence[PooledLayers],
        num_heads: int,
        max_slots: int,
        *,
        rules: Sequence[ScoreRule] | None = None,
        converted: ConvertedPages | None = None,
        upcast: bool = False,
    ) -> None:
        """`rules`: of each layer; None: `plain_rule`.

        `converted`: the buffer of a sibling. Their steps must not run at the same time."""
        pool = groups[0].pool
        memory, self._dtype = pool.numbers, pool.dtype
        *_, kv_heads, self._block_size, head_dim = memory.shape
        self.is_quantised = pool.exponents is not None
        size = 1 if self.is_quantised else 2
        self.shape = AttentionShape(num_heads, kv_heads, head_dim, self._block_size, size)
        self._groups = groups
        layers = _layers_of(groups)
        self._layers = [layers[index] for index in range(len(layers))]
        self._rules = rules or [plain_rule(head_dim)] * len(layers)
        self.device = memory.device
        self.num_layers = len(layers)
        self._upcast = upcast
        self.converted = converted
        # Pages are converted once for all layers, but window slots are other pages.
        if converted is None and self.is_quantised and not any(g.in_slots for g in groups):
            self.converted = ConvertedPages.of(memory, self._dtype)
        self._kernels = self._make_kernels(max_slots)

    @property
    def max_slots(self) -> int:
        return len(self._kernels.partial_out)

    def split_config(self) -> SplitConfig:
        """The split rules for the device and this pool."""
        num_pages = 0 if self.converted is None else len(self.converted)
        split = split_for(self.shape, self._dtype, self.device, converted_pages=num_pages)
        has_scales = all(rule == ScoreRule(rule.scale) for rule in self._rules)
        return split if has_scales else replace(split, dense=None)

    def sibling(self, max_slots: int) -> "TritonAttention":
        """Attention over the same pool, with its own buffers of partial results."""
        return TritonAttention(
            self._groups,
            self.shape.num_heads,
            max_slots,
            rules=self._rules,
            converted=self.converted,
        )

    def ensure_slots(self, num_slots: int) -> None:
        """Grow the buffers for a plan's partial results.

        Captured graphs would keep using the old buffers. So do not call it on an instance with
        captured graphs."""
        if num_slots > self.max_slots:
            self._kernels = self._make_kernels(num_slots)

    def _make_kernels(self, max_slots: int) -> TreeAttention:
        return TreeAttention(
            self.shape, max_slots, self.device, converted=self.converted, upcast=self._upcast
        )

    def view(self, layer: int, plan: TritonPlan) -> KVView:
        numbers, exponents, _ = self._layers[layer]
        powers = (None, None) if exponents is None else exponents
        tables = self._tables(layer, plan)
        return KVView(numbers[0], numbers[1], tables, plan.positions, powers[0], powers[1])

    def _tables(self, layer: int, plan: TritonPlan) -> torch.Tensor:
        tables = plan.slot_tables if self._layers[layer].in_slots else plan.tables
        assert tables is not None, "the plan has no slots"
        return tables

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        new: NewKV | None,
        plan: TritonPlan,
        *,
        only_last: bool = False,
        next_early: bool = False,
    ) -> torch.Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]. The KV of q must be in the pool.

        `new` may be None for a plan without dense spans. With `only_last`, only the result of each
        sequence's last row is defined. `next_early`: see `TreeAttention.run`."""
        if plan.buffers.work.dense == ((0, len(q)),) and not only_last:
            assert new is not None
            return dense_attention(q, new.k, new.v, self._rules[layer]).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        view = self.view(layer, plan)
        rule = self._rules[layer]
        self._kernels.run(
            q,
            view,
            plan.buffers,
            out,
            new,
            rule=rule,
            only_last=only_last,
            next_early=next_early,
        )
        return out.flatten(1)

    def prepare_dense(self, num_tokens: int) -> None:
        """Make cuDNN prepare its kernel for a length, so that no prompt waits for that."""
        shape = self.shape
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        size = (num_tokens, sum(heads), shape.head_dim)
        qkv = torch.zeros(size, dtype=self._dtype, device=self.device)
        q, k, v = torch.split(qkv, heads, dim=1)
        dense_attention(q, k, v, self._rules[0])

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TritonPlan
    ) -> torch.Tensor:
        rows, positions = plan.table_rows.long(), plan.positions.long()
        numbers, exponents, _ = self._layers[layer]
        blocks = self._tables(layer, plan)[rows.clamp(min=0), positions // self._block_size].long()
        blocks = torch.where(rows < 0, numbers.shape[1] - 1, blocks)
        slots = positions % self._block_size
        if exponents is not None:
            codes, powers = quantise(torch.stack((k, v)))
            k, v = dequantise(codes, powers, k.dtype)
            for target, power in zip(exponents, powers, strict=True):
                target[blocks, :, slots] = power
        for target, new in zip(numbers, (k, v) if exponents is None else codes, strict=True):
            target[blocks, :, slots] = new
        return self.attend(layer, q, NewKV(k, v), plan)


def _layers_of(groups: Sequence[PooledLayers]) -> dict[int, _Layer]:
    """The layers by their number in the model."""
    found = {}
    for layers, pool, in_slots in groups:
        for index, layer in enumerate(layers):
            exponents = None if pool.exponents is None else pool.exponents[index]
            found[layer] = _Layer(pool.numbers[index], exponents, in_slots)
    return found
