"""The KV pool leaves GPU memory for steps. Sizes are estimates; tests/gpu runs the steps."""

import pytest
import torch

from parrot.engine.config import SchedulerConfig
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.runner.kv_cache import KVLayout, blocks_in_free_memory, device_pool_bytes
from parrot.engine.runner.step_memory import step_bytes

GIB = 1 << 30
SPEC = open_checkpoint("llama-3.1-8b", dummy=True).spec


def needed(*, unpacks: bool = False, num_converted: int = 0, **limits: int) -> int:
    return step_bytes(
        SPEC,
        SchedulerConfig(**limits),
        torch.bfloat16,
        unpacks=unpacks,
        num_converted=num_converted,
    )


def test_steps_need_memory_for_their_largest_arrays() -> None:
    default = needed()
    assert 1.5 * GIB < default < 3 * GIB
    # For each token gate and up, in two bytes: in an eager step, and up to 2,048 in graphs.
    of_token = 2 * 2 * 14336
    assert needed(max_num_batched_tokens=8192) - default > 6144 * of_token
    assert default - needed(max_num_batched_tokens=1024) > 2 * 1024 * of_token
    assert needed(max_num_batched_tokens=65536) < 24 * GIB
    assert needed(max_batch_size=512) - default > 256 * 128256 * 2
    assert needed(unpacks=True) - default > 2 * 14336 * 4096 * 2


def test_steps_that_convert_a_head_have_it_three_times() -> None:
    head = 32000 * 4096
    assert needed(num_converted=head) - needed() == 3 * 2 * head


def test_kv_leaves_the_memory_that_steps_need() -> None:
    assert device_pool_bytes(100 * GIB, 2 * GIB) == 90 * GIB
    assert device_pool_bytes(8 * GIB, 2 * GIB) == 6 * GIB
    assert device_pool_bytes(GIB, 2 * GIB) == 0


def test_blocks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout.of(SPEC, 64, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * GIB, 24 * GIB))
    device = torch.device("cuda:0")
    assert blocks_in_free_memory(layout, device, 1, 2 * GIB) == 6 * GIB // layout.block_bytes
    assert blocks_in_free_memory(layout, device, 1, 9 * GIB) == 0
