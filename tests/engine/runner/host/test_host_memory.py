"""CPU memory for KV: its size, its layout, and that whole blocks are copied."""

from pathlib import Path

import pytest

import torch  # isort: skip

from parrot.engine.config import BuiltinConfig, parse_engine_config
from parrot.engine.core.steps import Transfer
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner.host import copies as available
from parrot.engine.runner.host.copies import GIB, HostMemory, PlainCopies, block_parts, host_slots
from parrot.engine.runner.kv_cache import KVCache, KVLayout
from parrot.utils.config import ConfigError

CPU = torch.device("cpu")
MIB = 1 << 20
LAYOUTS = [
    KVLayout((LayerGroup((0, 1), 3, 16),), 4, torch.float32),
    KVLayout((LayerGroup((0, 1), 1, 16),), 8, torch.bfloat16, quantised=True),
]


def filled(layout: KVLayout, *, paged: bool) -> KVCache:
    cache = KVCache(layout, 9, CPU, paged=paged)
    for tensor in cache.block_tensors:
        tensor.copy_(torch.randint(0, 99, tensor.shape))
    return cache


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_blocks_are_stored_and_loaded(layout: KVLayout, paged: bool) -> None:
    cache = filled(layout, paged=paged)
    before = [tensor.clone() for tensor in cache.block_tensors]
    copies = PlainCopies(cache.block_tensors, 5)
    copies.transfer([Transfer(1, True, (7, 2), (0, 4))])
    copies.transfer([Transfer(2, False, (3, 8), (4, 0))])
    assert [(r.transfer_id, r.succeeded) for r in copies.landed(wait=False)] == [
        (1, True),
        (2, True),
    ]
    assert not copies.landed(wait=True)
    for tensor, old in zip(cache.block_tensors, before, strict=True):
        assert torch.equal(tensor[:, :, :, [3, 8]], old[:, :, :, [2, 7]])
        kept = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(tensor[:, :, :, kept], old[:, :, :, kept])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_is_as_large_as_a_block(layout: KVLayout) -> None:
    cache = filled(layout, paged=True)
    memory = HostMemory(block_parts(cache.block_tensors), 3)
    assert memory.slots.shape == (3, layout.block_bytes)
    assert not memory.is_pinned


def test_the_default_follows_free_memory() -> None:
    assert host_slots(None, MIB, 10**6, 10 * GIB) == 5 * 1024
    assert host_slots(None, MIB, 100, 10 * GIB) == 400
    assert host_slots(0.0, MIB, 100, 10 * GIB) == 0
    assert host_slots(1.5, MIB, 100, 10 * GIB) == 1536
    assert host_slots(None, MIB, 10**6, 1000 * GIB) == 32 * 1024


def test_sizes_that_are_not_available_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`instance.host_kv_gb` is 11, but only"):
        host_slots(11, MIB, 100, 10 * GIB)
    with pytest.raises(ConfigError, match="one KV block takes"):
        host_slots(1e-6, MIB, 100, 10 * GIB)
    with pytest.raises(ConfigError, match="host_kv_gb"):
        parse_engine_config({"instance": {"host_kv_gb": -1}}, "test")
    with pytest.raises(ConfigError, match=r"needs `scheduler\.prefix_caching`"):
        parse_engine_config(
            {"instance": {"host_kv_gb": 1}, "scheduler": {"prefix_caching": False}}, "test"
        )
    assert BuiltinConfig().instance.host_kv_gb is None


def test_a_control_group_has_the_rest_of_its_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "_CONTROL_GROUP", tmp_path)
    unlimited = available.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("70\n")
    (tmp_path / "memory.stat").write_text("anon 50\ninactive_file 20\n")
    assert available.available_memory() == pytest.approx(unlimited, rel=0.2)
    (tmp_path / "memory.max").write_text("100\n")
    assert available.available_memory() == 50


def test_any_number_of_slots_is_split_into_the_tensors_of_a_block() -> None:
    parts = [torch.zeros((rows, 5, size), dtype=torch.uint8) for rows, size in ((4, 8), (2, 3))]
    for num_slots in (0, 3):
        held = HostMemory(parts, num_slots)
        shapes = [tuple(view.shape) for view in held.split(held.slots)]
        assert shapes == [(num_slots, 4, 8), (num_slots, 2, 3)]
