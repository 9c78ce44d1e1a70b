"""How many blocks of KV there is room for on every rank of a model. All ranks ask, and all get the
same answer or raise."""

import torch

from parrot.engine.runner.host.available import available_memory
from parrot.engine.runner.host.memory import host_slots
from parrot.engine.runner.kv_cache import KVLayout, blocks_in_free_memory
from parrot.engine.runner.ranks.group import RankGroup
from parrot.utils.config import ConfigError


def blocks_for_all(layout: KVLayout, device: torch.device, group: RankGroup | None) -> int:
    """The number of blocks of the device."""
    own = blocks_in_free_memory(layout, device, 1 if group is None else group.size)
    found = own if group is None else group.least(own)
    if not found:
        which = str(device) if not own else "another rank's device"
        raise ConfigError(
            f"the weights leave too little of the memory of {which} free for KV; use a smaller "
            "model, or a device with more memory"
        )
    return found


def host_blocks_for_all(
    host_kv_gb: float | None, layout: KVLayout, num_blocks: int, group: RankGroup | None
) -> int:
    """The number of blocks of the host tier, which the ranks share out: each has its part of every
    block."""
    ranks, free = 1, available_memory()
    if group is not None:
        ranks, free = group.size, group.least(free)  # before any of them takes some
    return host_slots(host_kv_gb, ranks * layout.block_bytes, num_blocks, free)
