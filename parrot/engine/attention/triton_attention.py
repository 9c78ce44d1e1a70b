"""Attention over a paged pool with the Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from parrot.engine.attention.quantised import PooledKV, dequantise, quantise
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


class TritonAttention:
    """Attention over a pool [layers, 2, blocks, kv_heads, block_size, head_dim].

    The last block of the pool belongs to no context. Padding writes to it."""

    def __init__(
        self,
        pool: PooledKV,
        num_heads: int,
        max_slots: int,
        *,
        rules: Sequence[ScoreRule] | None = None,
        converted: ConvertedPages | None = None,
        upcast: bool = False,
    ) -> None:
        """`rules`: of each layer; None: `plain_rule`.

        `converted`: the buffer of a sibling. Their steps must not run at the same time."""
        memory, exponents = pool.numbers, pool.exponents
        _, _, num_blocks, kv_heads, self._block_size, head_dim = memory.shape
        self.is_quantised = exponents is not None
        size = 1 if self.is_quantised else 2
        self.shape = AttentionShape(num_heads, kv_heads, head_dim, self._block_size, size)
        self._rules = rules or [plain_rule(head_dim)] * len(memory)
        self._pool = pool
        self._spare_block = num_blocks - 1
        self._layers = [(layer[0], layer[1]) for layer in memory]
        self._exponents = [(None, None)] * len(memory) if exponents is None else exponents
        self.device = memory.device
        self.num_layers = len(memory)
        self._upcast = upcast
        self.converted = converted
        if converted is None and self.is_quantised:
            self.converted = ConvertedPages.of(memory, pool.dtype)
        self._kernels = self._make_kernels(max_slots)

    @property
    def max_slots(self) -> int:
        return len(self._kernels.partial_out)

    def split_config(self) -> SplitConfig:
        """The split rules for the device and this pool."""
        num_pages = 0 if self.converted is None else len(self.converted)
        dtype = self._pool.dtype
        split = split_for(self.shape, dtype, self.device, converted_pages=num_pages)
        has_scales = all(rule == ScoreRule(rule.scale) for rule in self._rules)
        return split if has_scales else replace(split, dense=None)

    def sibling(self, max_slots: int) -> "TritonAttention":
        """Attention over the same pool, with its own buffers of partial results."""
        return TritonAttention(
            self._pool,
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
        (k, v), (k_exponents, v_exponents) = self._layers[layer], self._exponents[layer]
        return KVView(k, v, plan.tables, plan.positions, k_exponents, v_exponents)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        new: NewKV | None,
        plan: TritonPlan,
        *,
        only_last: bool = False,
    ) -> torch.Tensor:
        """q [rows, heads, head_dim] -> [rows, heads * head_dim]. The KV of q must be in the pool.

        `new` may be None for a plan without dense spans. With `only_last`, only the result of each
        sequence's last row is defined."""
        if plan.buffers.work.dense == ((0, len(q)),) and not only_last:
            assert new is not None
            return dense_attention(q, new.k, new.v, self._rules[layer]).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        view = self.view(layer, plan)
        rule = self._rules[layer]
        self._kernels.run(q, view, plan.buffers, out, new, rule=rule, only_last=only_last)
        return out.flatten(1)

    def prepare_dense(self, num_tokens: int) -> None:
        """Make cuDNN prepare its kernel for a length, so that no prompt waits for that."""
        shape = self.shape
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        size = (num_tokens, sum(heads), shape.head_dim)
        qkv = torch.zeros(size, dtype=self._pool.dtype, device=self.device)
        q, k, v = torch.split(qkv, heads, dim=1)
        dense_attention(q, k, v, self._rules[0])

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TritonPlan
    ) -> torch.Tensor:
        rows, positions = plan.table_rows.long(), plan.positions.long()
        blocks = plan.tables[rows.clamp(min=0), positions // self._block_size].long()
        blocks = torch.where(rows < 0, self._spare_block, blocks)
        slots = positions % self._block_size
        exponents = self._pool.exponents
        if exponents is not None:
            codes, powers = quantise(torch.stack((k, v)))
            k, v = dequantise(codes, powers, k.dtype)
            for target, power in zip(exponents[layer], powers, strict=True):
                target[blocks, :, slots] = power
        for target, new in zip(
            self._layers[layer], (k, v) if exponents is None else codes, strict=True
        ):
            target[blocks, :, slots] = new
        return self.attend(layer, q, NewKV(k, v), plan)
