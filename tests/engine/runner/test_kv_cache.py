"""Copies and clearing in the pool of KV blocks."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from parrot.engine.core.steps import BlockCopy
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner import kv_cache
from parrot.engine.runner.kv_cache import MIB, KVCache, KVLayout, blocks_in_free_memory

LAYOUT = KVLayout((LayerGroup((0, 1), 3, 4),), block_size=4, dtype=torch.float32)
QUANTISED = replace(LAYOUT, quantised=True)
NONE = np.empty(0, dtype=np.int64)
CPU = torch.device("cpu")


def filled_cache() -> KVCache:
    cache = KVCache(LAYOUT, 6, CPU)
    cache.pools[0].copy_(torch.arange(cache.pools[0].numel()).view_as(cache.pools[0]))
    return cache


def test_the_pool_has_the_size_that_is_reported() -> None:
    cache = KVCache(LAYOUT, 6, CPU)
    assert cache.pools[0].shape == (2, 2, 3, 6, 4, 4)
    assert cache.num_bytes == cache.pools[0].numel() * 4
    assert not cache.pools[0].any()


def test_a_copy_fills_the_first_slots_and_clears_the_rest() -> None:
    cache = filled_cache()
    before = cache.pools[0].clone()
    cache.prepare([BlockCopy(source=1, target=4, num_tokens=3)], NONE)
    assert torch.equal(cache.pools[0][:, :, :, 4, :3], before[:, :, :, 1, :3])
    assert not cache.pools[0][:, :, :, 4, 3:].any()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(cache.pools[0][:, :, :, others], before[:, :, :, others])


def test_the_tensors_of_a_block_hold_all_its_bytes() -> None:
    for layout, paged in itertools.product((LAYOUT, QUANTISED), (False, True)):
        cache = KVCache(layout, 6, CPU, paged=paged)
        blocks = [tensor[:, :, :, 4] for tensor in cache.block_tensors]
        assert sum(block.nbytes for block in blocks) == layout.block_bytes
        if paged:
            assert all(block[1, 0].is_contiguous() for block in blocks)


def test_quantised_blocks_take_a_byte_for_each_number_and_each_row() -> None:
    assert QUANTISED.block_bytes == 2 * 2 * 3 * 4 * (4 + 1)
    cache = KVCache(QUANTISED, 6, CPU)
    for tensor in cache.block_tensors:
        tensor.random_(1, 200)
    before = [tensor.clone() for tensor in cache.block_tensors]
    cache.prepare([BlockCopy(source=1, target=4, num_tokens=3)], np.array([2]))
    for tensor, old in zip(cache.block_tensors, before, strict=True):
        assert torch.equal(tensor[:, :, :, 4, :3], old[:, :, :, 1, :3])
        assert not tensor[:, :, :, 4, 3:].any()
        assert not tensor[:, :, :, 2].any()
        assert torch.equal(tensor[:, :, :, [0, 1, 3, 5]], old[:, :, :, [0, 1, 3, 5]])


def test_copies_happen_in_order() -> None:
    cache = filled_cache()
    first = cache.pools[0][:, :, :, 0].clone()
    cache.prepare([BlockCopy(0, 1, 4), BlockCopy(1, 2, 4)], NONE)
    assert torch.equal(cache.pools[0][:, :, :, 2], first)


def test_copies_come_before_fresh_blocks_are_cleared() -> None:
    cache = filled_cache()
    source = cache.pools[0][:, :, :, 3].clone()
    cache.prepare([BlockCopy(3, 5, 4)], np.array([3]))
    assert torch.equal(cache.pools[0][:, :, :, 5], source)
    assert not cache.pools[0][:, :, :, 3].any()


def test_earlier_contents_are_cleared_even_if_they_are_nan() -> None:
    cache = KVCache(LAYOUT, 3, CPU)
    cache.pools[0].fill_(float("nan"))
    cache.prepare([BlockCopy(0, 1, 0)], np.array([2]))
    assert not cache.pools[0][:, :, :, 1:].isnan().any()


def test_the_default_size_follows_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(available: int, num_ranks: int = 1) -> int:
        monkeypatch.setattr(kv_cache, "available_memory", lambda: available)
        return blocks_in_free_memory(LAYOUT, CPU, num_ranks)

    assert blocks(1000 * MIB) == 250 * MIB // LAYOUT.block_bytes
    assert blocks(10**12) == 2048 * MIB // LAYOUT.block_bytes
    assert blocks(0) == blocks(0, 4) == 1
    assert blocks(1000 * MIB, 4) == 250 * MIB // 4 // LAYOUT.block_bytes


def test_free_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_cache.available_memory() > MIB

    def unreadable(self: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert kv_cache.available_memory() > MIB


def test_slots_are_copied_and_cleared_like_blocks() -> None:
    groups = (LayerGroup((0,), 3, 4), LayerGroup((1,), 3, 4, in_slots=True))
    layout = replace(LAYOUT, groups=groups)
    cache = KVCache(layout, 6, CPU, num_slots=4)
    assert cache.num_bytes == 6 * layout.block_bytes + 4 * layout.slot_bytes
    [blocks], [slots] = cache.block_tensors, cache.slot_tensors
    for tensor in (blocks, slots):
        tensor.normal_()
    before = slots.clone()
    cache.prepare([BlockCopy(0, 5, 3, source_slot=1, target_slot=2)], NONE, np.array([3]))
    assert torch.equal(slots[:, :, :, 2, :3], before[:, :, :, 1, :3])
    assert not slots[:, :, :, 2, 3:].any()
    assert not slots[:, :, :, 3].any()
    assert torch.equal(slots[:, :, :, :2], before[:, :, :, :2])
    assert torch.equal(blocks[:, :, :, 5, :3], blocks[:, :, :, 0, :3])
