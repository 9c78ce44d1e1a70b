"""How models with sliding windows divide the memory for KV."""

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.sizes import KvMemory
from parrot.utils.config import ConfigError

GIB = 1 << 30
# The window of Mistral 7B version 0.1.
MISTRAL = KNOWN_SHAPES["mistral-7b"] | {"sliding_window": 4096}


def memory_of(shape: str | dict, *, batch: int = 256, **instance: object) -> KvMemory:
    config = KNOWN_SHAPES[shape] if isinstance(shape, str) else shape
    builtin = {"instance": instance, "scheduler": {"max_batch_size": batch}}
    spec = spec_from_config(config, "tested")
    return KvMemory(spec, BuiltinConfig.model_validate(builtin), 64, torch.bfloat16)


def num_blocks_in(memory: KvMemory, gib: int) -> int:
    return gib * GIB // memory.layout.block_bytes


def test_gemma_3_at_32k_takes_a_fifth_of_full_attention() -> None:
    memory = memory_of("gemma-3-27b")
    sizes = memory.in_memory_of(num_blocks_in(memory, 60))
    num_blocks, window = 32768 // 64, 1024 // 64 + 1
    own = num_blocks * sizes.layout.block_bytes + window * sizes.layout.slot_bytes
    assert own <= 0.2 * num_blocks * memory.layout.block_bytes
    assert own == pytest.approx(2.9 * GIB, rel=0.03)


def test_contexts_of_eight_windows_fill_blocks_and_slots_evenly() -> None:
    memory = memory_of("gemma-3-27b")
    before = num_blocks_in(memory, 60)
    sizes = memory.in_memory_of(before)
    assert 59.9 * GIB < sizes.num_bytes <= 60 * GIB
    assert sizes.num_blocks > 3.5 * before
    num_contexts = sizes.num_blocks // (8 * 1024 // 64)
    assert sizes.num_slots // 17 == pytest.approx(num_contexts, abs=1)


def test_slots_get_at_least_a_third_of_the_memory() -> None:
    memory = memory_of("gemma-2-9b")
    sizes = memory.in_memory_of(num_blocks_in(memory, 60))
    assert sizes.num_slots * sizes.layout.slot_bytes == pytest.approx(20 * GIB, rel=0.01)


def test_no_more_slots_than_contexts_can_use() -> None:
    memory = memory_of("gemma-3-4b", batch=4)
    assert memory.in_memory_of(num_blocks_in(memory, 60)).num_slots == 4 * 18 + 32 + 3 * 4 * 17


def test_a_model_with_windows_in_all_layers_has_blocks_without_memory() -> None:
    memory = memory_of(MISTRAL)
    sizes = memory.in_memory_of(num_blocks_in(memory, 60))
    assert sizes.layout.block_bytes == 0
    assert sizes.num_slots == 60 * GIB // sizes.layout.slot_bytes
    assert sizes.num_blocks == sizes.num_slots // 65 * (32768 // 64)


def test_cpu_memory_is_divided_like_that_of_the_gpu() -> None:
    for shape in ("gemma-3-27b", MISTRAL):
        memory = memory_of(shape)
        sizes = memory.in_memory_of(num_blocks_in(memory, 60))
        host = memory.with_host(sizes, 30 * GIB)
        assert host.num_host_slots == pytest.approx(sizes.num_slots / 2, rel=0.01)
        assert host.num_host_blocks == pytest.approx(sizes.num_blocks / 2, rel=0.01)
        assert memory.with_host(sizes, 1 << 20) == sizes  # Not even one block and one slot fit.
    memory = memory_of("llama-3.1-8b")
    sizes = memory.with_host(memory.in_memory_of(100), 7 * memory.layout.block_bytes)
    assert (sizes.num_host_blocks, sizes.num_host_slots) == (7, 0)


def test_blocks_keep_all_kv_if_slots_save_no_memory() -> None:
    for memory in (
        memory_of("llama-3.1-8b"),
        memory_of("gemma-3-27b", max_seq_len=1024),
        memory_of("gemma-3-27b", num_window_slots=0),
        memory_of("gemma-2-9b", batch=1, max_seq_len=8192),
    ):
        assert memory.in_memory_of(60).layout == memory.layout
        assert memory.in_memory_of(60).num_slots == 0
    assert memory_of("gemma-3-27b").with_blocks(20).num_slots == 0


def test_slots_in_addition_to_a_configured_number_of_blocks() -> None:
    sizes = memory_of("gemma-3-27b").with_blocks(1000)
    assert sizes.num_blocks == 1000
    assert sizes.num_slots * sizes.layout.slot_bytes < sizes.num_bytes / 2
    assert memory_of("gemma-3-27b", num_window_slots=50).with_blocks(1000).num_slots == 50


def test_numbers_of_slots_that_the_model_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_window_slots` is 9, but no context of this model"):
        memory_of("llama-3.1-8b", num_window_slots=9)
    with pytest.raises(ConfigError, match=r"num_window_slots` is 9, but the model needs .* 21"):
        memory_of("gemma-3-27b", num_window_slots=9)
    with pytest.raises(ConfigError, match=r"num_window_slots` is 900, which leaves no memory for"):
        memory_of("gemma-3-27b", num_window_slots=900).in_memory_of(100)
