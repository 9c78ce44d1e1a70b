"""The KV cache of all contexts: one pool of blocks for each group of layers (`LayerGroup`).

    pool [layers, 2 (k, v), kv_heads, blocks, block_size, head_dim]
    exponents [layers, 2, kv_heads, blocks, block_size], if it is quantised (`attention.quantised`)

- **Plain layout.** The blocks of one head are contiguous. A CPU uses a span of adjacent blocks in
  place, and gathers other spans in long pieces. Unwritten positions are zero, because CPU
  attention adds masked positions with weight 0, and 0 * NaN of an earlier owner would be NaN.
- **Paged layout**, for the Triton kernels: memory has the order [layers, 2, blocks, kv_heads,
  block_size, head_dim] under the same shape. The kernels never read unwritten positions, so blocks
  are not cleared.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.core.steps import BlockCopy, RunnerInfo
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.spec import DecoderSpec, LayerGroup
from parrot.engine.runner.device import device_name
from parrot.engine.runner.host.copies import HostCopies, PlainCopies, available_memory

MIB = 1 << 20
_CPU_CACHE_LIMIT = 2048 * MIB  # Largest default size of the pool in CPU memory, in bytes.
_CPU_SHARE_OF_FREE = 0.25  # The default pool takes at most this share of the free CPU memory.
_DEVICE_SHARE_OF_FREE = 0.9  # The default pool takes this share of the free GPU memory.


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shapes and the type of a model's KV. A block has the KV of all groups of layers."""

    groups: tuple[LayerGroup, ...]
    block_size: int  # Tokens per block.
    dtype: torch.dtype  # The type that attention reads. A quantised pool stores e4m3 instead.
    quantised: bool = False

    @classmethod
    def of(
        cls, spec: DecoderSpec, block_size: int, dtype: torch.dtype, *, quantised: bool = False
    ) -> "KVLayout":
        return cls(spec.layer_groups, block_size, dtype, quantised)

    @property
    def dtype_name(self) -> str:
        return "e4m3" if self.quantised else str(self.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        size = 1 if self.quantised else self.dtype.itemsize
        exponent = 1 if self.quantised else 0
        return sum(
            len(layers) * 2 * num_kv_heads * self.block_size * (head_dim * size + exponent)
            for layers, num_kv_heads, head_dim in self.groups
        )


def blocks_in_free_memory(layout: KVLayout, device: torch.device, num_ranks: int = 1) -> int:
    """The default number of blocks, from the free memory. It can be 0 on a GPU.

    `num_ranks` ranks divide the CPU memory evenly."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE_OF_FREE) // layout.block_bytes
    budget = min(_CPU_CACHE_LIMIT, int(available_memory() * _CPU_SHARE_OF_FREE))
    return max(1, budget // num_ranks // layout.block_bytes)


class KVCache:
    """Owns the memory of the pool. The engine core decides which context uses which block."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, *, paged: bool = False
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._device = device
        self._paged = paged
        dtype = torch.uint8 if layout.quantised else layout.dtype
        size = layout.block_size
        self.pools = [
            self._allocate(group, (size, group.head_dim), dtype) for group in layout.groups
        ]
        self.exponents: list[torch.Tensor] = []
        if layout.quantised:
            self.exponents = [
                self._allocate(group, (size,), torch.uint8) for group in layout.groups
            ]

    def _allocate(
        self, group: LayerGroup, block: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        middle = (group.num_kv_heads, self.num_blocks)
        shape = (len(group.layers), 2, *(reversed(middle) if self._paged else middle), *block)
        memory = _zeros(shape, dtype, self._device)
        return memory.transpose(2, 3) if self._paged else memory

    @property
    def pooled(self) -> PooledKV:
        """The pool of the only group for attention, with dimensions in memory order."""
        [pool] = self.pooled_groups()
        return pool

    def pooled_groups(self) -> list[PooledKV]:
        """`pooled` of each group of layers."""
        numbers = map(self._in_order, self.pools)
        exponents = map(self._in_order, self.exponents)
        dtype = self.layout.dtype
        return [PooledKV(pool, next(exponents, None), dtype) for pool in numbers]

    def _in_order(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.transpose(2, 3) if self._paged else memory

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors [layers, 2, kv_heads, blocks, block_size, ...]. Block b is `t[:, :, :, b]`.

        In the paged layout `t[l, i, :, b]` is contiguous."""
        return (*self.pools, *self.exponents)

    def host_copies(self, num_slots: int) -> HostCopies | None:
        """Make a host tier with `num_slots` slots; None for 0 slots."""
        if not num_slots:
            return None
        if self._paged and self._device.type == "cuda":
            from parrot.engine.runner.host.cuda import CudaCopies  # Imports Triton.

            return CudaCopies(self.block_tensors, self.layout.block_size, num_slots)
        return PlainCopies(self.block_tensors, num_slots)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def prepare(self, copies: Sequence[BlockCopy], fresh_blocks: IntArray | None = None) -> None:
        """Run the block copies of a step in order and clear `fresh_blocks`."""
        for copy in copies:
            for tensor in self.block_tensors:
                source, target = tensor[:, :, :, copy.source], tensor[:, :, :, copy.target]
                target[:, :, :, : copy.num_tokens] = source[:, :, :, : copy.num_tokens]
                if not self._paged:
                    target[:, :, :, copy.num_tokens :] = 0
        if not self._paged and fresh_blocks is not None and len(fresh_blocks):
            blocks = torch.from_numpy(fresh_blocks).long().to(self._device)
            for tensor in self.block_tensors:
                tensor.index_fill_(3, blocks, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero and are allocated at the first write. Filling the pool would take 1 s
    # and memory that may never be used.
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def runner_info(
    model: Decoder,
    cache: KVCache,
    num_blocks: int,
    max_seq_len: int | None,
    num_host_blocks: int = 0,
    *,
    draft_sizes: Sequence[int],
) -> RunnerInfo:
    """The properties of a runner. The model's maximum also limits `max_seq_len`."""
    spec = model.spec
    return RunnerInfo(
        num_blocks=num_blocks,
        block_size=cache.layout.block_size,
        max_seq_len=min(max_seq_len or spec.max_positions, spec.max_positions),
        vocab_size=spec.vocab_size,
        model_mem=model.num_bytes / MIB,
        cache_mem=cache.num_bytes / MIB,
        draft_sizes=tuple(draft_sizes),
        kv_dtype=cache.layout.dtype_name,
        num_host_blocks=num_host_blocks,
        block_bytes=cache.layout.block_bytes,
        num_ranks=1 if model.ranks is None else model.ranks.size,
        device=device_name(model.device),
        architecture=spec.architecture,
    )
