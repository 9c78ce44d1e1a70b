"""The KV cache of all contexts: one pool of blocks for each group of layers (`LayerGroup`).

    pool [layers, 2 (k, v), kv_heads, blocks, block_size, head_dim]
    exponents [layers, 2, kv_heads, blocks, block_size], if it is quantised (`attention.quantised`)

The pools of layers with windows may have slots instead of blocks (`core.window_pool`). A slot has
the KV of one block in these layers. There are fewer slots than blocks.

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
from parrot.engine.attention.quantised import PooledKV, PooledLayers
from parrot.engine.core.steps import BlockCopy, RunnerInfo, WindowInfo
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
    """The shapes and the type of a model's KV. A block has the KV of all groups without slots."""

    groups: tuple[LayerGroup, ...]
    block_size: int  # Tokens per block.
    dtype: torch.dtype  # The type that attention reads. A quantised pool stores e4m3 instead.
    quantised: bool = False

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        block_size: int,
        dtype: torch.dtype,
        *,
        quantised: bool = False,
        with_slots: bool = False,
    ) -> "KVLayout":
        """`with_slots`: layers with windows have slots."""
        return cls(spec.layer_groups(with_slots=with_slots), block_size, dtype, quantised)

    @property
    def dtype_name(self) -> str:
        return "e4m3" if self.quantised else str(self.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        """The size of a block. It is 0 if all layers have slots."""
        return sum(self._bytes_of(group) for group in self.groups if not group.in_slots)

    @property
    def slot_bytes(self) -> int:
        """The size of a window slot. It is 0 if no layer has slots."""
        return sum(self._bytes_of(group) for group in self.groups if group.in_slots)

    def _bytes_of(self, group: LayerGroup) -> int:
        size = 1 if self.quantised else self.dtype.itemsize
        exponent = 1 if self.quantised else 0
        token_bytes = 2 * group.num_kv_heads * (group.head_dim * size + exponent)
        return len(group.layers) * self.block_size * token_bytes


def blocks_in_free_memory(
    layout: KVLayout, device: torch.device, num_ranks: int = 1, step_bytes: int = 0
) -> int:
    """The default number of blocks, from the free memory. It can be 0 on a GPU.

    `num_ranks` ranks divide the CPU memory evenly. `step_bytes`: GPU memory that is left for
    steps at least."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # Loading and rounding weights leaves unused memory there.
        free, _ = torch.cuda.mem_get_info(device)
        return device_pool_bytes(free, step_bytes) // layout.block_bytes
    budget = min(_CPU_CACHE_LIMIT, int(available_memory() * _CPU_SHARE_OF_FREE))
    return max(1, budget // num_ranks // layout.block_bytes)


def device_pool_bytes(free: int, step_bytes: int) -> int:
    """The default size of the pool on a GPU with `free` bytes. Steps take `step_bytes` of them."""
    return max(0, min(int(free * _DEVICE_SHARE_OF_FREE), free - step_bytes))


class KVCache:
    """Owns the memory of the pools. The engine core decides which context uses which block."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        *,
        paged: bool = False,
        num_slots: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
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
        # Tensors [layers, 2, kv_heads, blocks, block_size, ...]. Block b is `t[:, :, :, b]`.
        # In the paged layout `t[l, i, :, b]` is contiguous.
        self.block_tensors = self._tensors(in_slots=False)
        # The same for layers with slots. Slot s is `t[:, :, :, s]`.
        self.slot_tensors = self._tensors(in_slots=True)

    def _tensors(self, *, in_slots: bool) -> tuple[torch.Tensor, ...]:
        groups = self.layout.groups
        tensors = zip((*groups, *groups), (*self.pools, *self.exponents), strict=False)
        return tuple(tensor for group, tensor in tensors if group.in_slots == in_slots)

    def _allocate(
        self, group: LayerGroup, block: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        middle = (group.num_kv_heads, self.num_slots if group.in_slots else self.num_blocks)
        shape = (len(group.layers), 2, *(reversed(middle) if self._paged else middle), *block)
        memory = _zeros(shape, dtype, self._device)
        return memory.transpose(2, 3) if self._paged else memory

    @property
    def pooled(self) -> PooledKV:
        """The pool of the only group for attention, with dimensions in memory order."""
        [group] = self.pooled_layers()
        return group.pool

    def pooled_layers(self) -> list[PooledLayers]:
        """`pooled` of each group of layers."""
        numbers = map(self._in_order, self.pools)
        exponents = map(self._in_order, self.exponents)
        dtype = self.layout.dtype
        return [
            PooledLayers(group.layers, PooledKV(pool, next(exponents, None), dtype), group.in_slots)
            for group, pool in zip(self.layout.groups, numbers, strict=True)
        ]

    def _in_order(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.transpose(2, 3) if self._paged else memory

    def host_copies(self, num_slots: int, num_window_slots: int = 0) -> HostCopies | None:
        """Make a host tier with `num_slots` slots for blocks; None for 0 slots.

        `num_window_slots`: slots for window slots, if there are any."""
        if not num_slots:
            return None
        if not self.slot_tensors:
            return self._copies(self.block_tensors, num_slots)
        from parrot.engine.runner.host.slots import SlottedCopies  # Only models with windows.

        blocks = self._copies(self.block_tensors, num_slots) if self.block_tensors else None
        windows = self._copies(self.slot_tensors, num_window_slots)
        return SlottedCopies(blocks, windows, self.num_slots - 1)

    def _copies(self, tensors: tuple[torch.Tensor, ...], num_slots: int) -> HostCopies:
        if self._paged and self._device.type == "cuda":
            from parrot.engine.runner.host.cuda import CudaCopies  # Imports Triton.

            return CudaCopies(tensors, self.layout.block_size, num_slots)
        return PlainCopies(tensors, num_slots)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.num_slots * self.layout.slot_bytes

    def prepare(
        self,
        copies: Sequence[BlockCopy],
        fresh_blocks: IntArray | None = None,
        fresh_slots: IntArray | None = None,
    ) -> None:
        """Run the block copies of a step in order, and clear `fresh_blocks` and `fresh_slots`."""
        for copy in copies:
            for tensor in self.block_tensors:
                self._copy(tensor, copy.source, copy.target, copy.num_tokens)
            for tensor in self.slot_tensors:
                self._copy(tensor, copy.source_slot, copy.target_slot, copy.num_tokens)
        if self._paged:
            return
        if fresh_blocks is not None and len(fresh_blocks):
            self._clear(self.block_tensors, fresh_blocks)
        if fresh_slots is not None and len(fresh_slots):
            self._clear(self.slot_tensors, fresh_slots)

    def _copy(self, tensor: torch.Tensor, source: int, target: int, num_tokens: int) -> None:
        to = tensor[:, :, :, target]
        to[:, :, :, :num_tokens] = tensor[:, :, :, source, :num_tokens]
        if not self._paged:
            to[:, :, :, num_tokens:] = 0

    def _clear(self, tensors: Sequence[torch.Tensor], fresh: IntArray) -> None:
        places = torch.from_numpy(fresh).long().to(self._device)
        for tensor in tensors:
            tensor.index_fill_(3, places, 0)


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
    num_slots: int = 0,
    num_host_slots: int = 0,
) -> RunnerInfo:
    """The properties of a runner. The model's maximum also limits `max_seq_len`."""
    spec, window = model.spec, None
    if num_slots:
        assert spec.window is not None, spec
        slot_bytes = cache.layout.slot_bytes
        window = WindowInfo(num_slots, spec.window, slot_bytes, num_host_slots)
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
        window=window,
    )
