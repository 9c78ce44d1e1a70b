"""How the memory for KV is divided between blocks and the window slots of windowed layers."""

from dataclasses import dataclass, replace

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.runner.kv_cache import KVLayout
from parrot.utils.config import ConfigError

# Contexts of this many windows fill blocks and slots evenly. A larger value favours long contexts.
_DESIGN_WINDOWS = 8
_LEAST_PART = 1 / 3  # Minimum share of the memory for slots, for contexts inside the window.
# Contexts whose windows are kept, for each context that can run. More find their windows again.
_KEPT_PER_RUNNING = 3
_MAX_BLOCKS = 1 << 20  # Maximum number of blocks of a model whose blocks take no memory.


@dataclass(frozen=True, slots=True)
class KvSizes:
    """The layout of an engine's KV, and its numbers of blocks and window slots."""

    layout: KVLayout
    num_blocks: int
    num_slots: int = 0  # 0: blocks have the KV of all layers.
    # In CPU memory.
    num_host_blocks: int = 0
    num_host_slots: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes + self.num_slots * self.layout.slot_bytes


class KvMemory:
    """The KV of a model on one rank, and how its memory can be divided."""

    def __init__(
        self, spec: DecoderSpec, config: BuiltinConfig, block_size: int, dtype: torch.dtype
    ) -> None:
        """Raises `ConfigError` for window slots that the model cannot use."""
        quantised = config.instance.kv_cache_dtype == "fp8"
        self.layout = KVLayout.of(spec, block_size, dtype, quantised=quantised)
        self._slotted = KVLayout.of(spec, block_size, dtype, quantised=quantised, with_slots=True)
        self._needs = WindowNeeds.of(spec, config, block_size)
        self._num_slots = config.instance.num_window_slots
        if not self._num_slots:
            return
        least = None if self._needs is None else self._needs.least
        if least is None:
            why = "no context of this model is longer than a sliding window; use null"
        elif self._num_slots < least:
            why = f"the model needs at least {least}"
        else:
            return
        raise ConfigError(f"`instance.num_window_slots` is {self._num_slots}, but {why}")

    def with_blocks(self, num_blocks: int) -> KvSizes:
        """The sizes for a given number of blocks."""
        needs, layout = self._needs, self._slotted
        num_slots = self._num_slots
        if num_slots is None and needs is not None:
            wanted = needs.most
            if layout.block_bytes:
                part = needs.part(layout)
                slot_bytes = part / (1 - part) * num_blocks * layout.block_bytes
                wanted = min(wanted, int(slot_bytes) // layout.slot_bytes)
            num_slots = max(needs.least, wanted)
            num_slots = num_slots if num_slots < num_blocks else 0
        if not num_slots:
            return KvSizes(self.layout, num_blocks)
        return KvSizes(layout, num_blocks, num_slots)

    def in_memory_of(self, num_blocks: int) -> KvSizes:
        """The sizes for the memory that `num_blocks` blocks with the KV of all layers take."""
        needs, layout = self._needs, self._slotted
        if needs is None or self._num_slots == 0:
            return KvSizes(self.layout, num_blocks)
        num_bytes = num_blocks * self.layout.block_bytes
        num_slots = int(needs.part(layout) * num_bytes) // layout.slot_bytes
        num_slots = self._num_slots or max(needs.least, min(needs.most, num_slots))
        if layout.block_bytes:
            found = (num_bytes - num_slots * layout.slot_bytes) // layout.block_bytes
        else:
            found = min(_MAX_BLOCKS, num_slots // needs.per_context * needs.max_blocks)
        if self._num_slots is None and (found <= num_slots or num_slots < needs.least):
            return KvSizes(self.layout, num_blocks)
        if found <= 0:
            raise ConfigError(
                f"`instance.num_window_slots` is {num_slots}, which leaves no memory for KV blocks"
            )
        return KvSizes(layout, found, num_slots)

    def with_host(self, sizes: KvSizes, num_bytes: int) -> KvSizes:
        """`sizes` with `num_bytes` of CPU memory."""
        layout, needs, num_slots = sizes.layout, self._needs, 0
        if sizes.num_slots and needs is not None:
            num_slots = int(needs.part(layout) * num_bytes) // layout.slot_bytes
        if layout.block_bytes:
            num_blocks = (num_bytes - num_slots * layout.slot_bytes) // layout.block_bytes
        else:
            num_blocks = num_slots * sizes.num_blocks // sizes.num_slots
        if sizes.num_slots and not (num_blocks and num_slots):
            return sizes
        return replace(sizes, num_host_blocks=num_blocks, num_host_slots=num_slots)


@dataclass(frozen=True, slots=True)
class WindowNeeds:
    """The window slots that a model with windows and the limits of an engine need."""

    per_context: int  # Slots of a context that is not running.
    least: int  # Slots with which the engine can run.
    most: int  # Slots beyond which more slots have no use.
    max_blocks: int  # Blocks of the longest context.

    @classmethod
    def of(cls, spec: DecoderSpec, config: BuiltinConfig, block_size: int) -> "WindowNeeds | None":
        """None if no context is longer than the windows."""
        max_len = min(config.instance.max_seq_len or spec.max_positions, spec.max_positions)
        if spec.window is None or spec.window + block_size >= max_len:
            return None
        limits = config.scheduler
        per_context = -(-spec.window // block_size) + 1
        running = limits.max_batch_size * (per_context + 1)
        written = -(-limits.max_num_batched_tokens // block_size)
        kept = _KEPT_PER_RUNNING * limits.max_batch_size * per_context
        most = running + written + kept
        return cls(per_context, per_context + 4, most, -(-max_len // block_size))

    def part(self, layout: KVLayout) -> float:
        """The part of the memory that slots get at most."""
        slots = self.per_context * layout.slot_bytes
        blocks = _DESIGN_WINDOWS * (self.per_context - 1) * layout.block_bytes
        return max(_LEAST_PART, slots / (slots + blocks))
