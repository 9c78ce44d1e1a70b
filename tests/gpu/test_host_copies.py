"""Copies between GPU memory and CPU memory, in parallel with steps: exact, in order, and without
leaks."""

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import SequenceStep, StepPlan, Transfer
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.host.copies import GIB
from parrot.engine.runner.host.cuda import CudaCopies
from parrot.engine.runner.kv_cache import KVCache, KVLayout
from parrot.engine.runner.load import load_runner
from parrot.utils.clock import MonotonicClock
from tests.support.random_world import World
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE = 300, 200, 64
LARGE = LayerGroup((0, 1, 2, 3), 8, 128)
LAYOUTS = {
    "bf16": KVLayout((LayerGroup(tuple(range(4)), 8, 128),), BLOCK_SIZE, torch.bfloat16),
    "fp8": KVLayout(
        (LayerGroup(tuple(range(4)), 8, 128),), BLOCK_SIZE, torch.bfloat16, quantised=True
    ),
    "small": KVLayout((LayerGroup(tuple(range(2)), 1, 16),), BLOCK_SIZE, torch.float32),
}
SIZES = {"hidden_size": 64, "num_attention_heads": 4}


def filled(layout: KVLayout) -> KVCache:
    cache = KVCache(layout, NUM_BLOCKS, torch.device("cuda"), paged=True)
    for tensor in cache.block_tensors:
        memory = tensor.transpose(2, 3).view(torch.uint8)
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    return cache


def bits(cache: KVCache) -> list[torch.Tensor]:
    """The bits of each tensor, with blocks first."""
    return [
        t.permute(3, 0, 1, 2, *range(4, t.dim())).clone().view(torch.uint8).cpu()
        for t in cache.block_tensors
    ]


def finish(copies: CudaCopies, count: int) -> None:
    while count:
        landed = copies.landed(wait=True)
        assert landed
        assert all(report.succeeded and report.seconds > 0 for report in landed)
        count -= len(landed)


def writing(*blocks: int) -> StepPlan:
    """A step that writes these blocks."""
    tokens = [0] * BLOCK_SIZE * len(blocks)
    return StepPlan((SequenceStep(1, tokens, 0, list(blocks), None),))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_loaded_blocks_equal_the_stored_blocks(kind: str) -> None:
    cache, rng = filled(LAYOUTS[kind]), random.Random(1)
    copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, NUM_SLOTS)
    copies.warm_up(NUM_BLOCKS - 1)
    before = bits(cache)
    left = rng.sample(range(NUM_BLOCKS), 90)
    slots = rng.sample(range(NUM_SLOTS), 90)
    copies.transfer([Transfer(n, True, tuple(left[n::4]), tuple(slots[n::4])) for n in range(4)])
    finish(copies, 4)
    assert all(torch.equal(a, b) for a, b in zip(bits(cache), before, strict=True))
    targets = rng.sample(range(NUM_BLOCKS), 90)
    copies.transfer(
        [Transfer(n, False, tuple(targets[n::3]), tuple(slots[n::3])) for n in range(3)]
    )
    finish(copies, 3)
    others = [block for block in range(NUM_BLOCKS) if block not in targets]
    for after, old in zip(bits(cache), before, strict=True):
        assert torch.equal(after[targets], old[left])
        assert torch.equal(after[others], old[others])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_block_is_written_only_after_its_copy_has_read_it(kind: str) -> None:
    """While the device is busy, blocks are copied to the host. The next step and a copy from the
    host write the same blocks."""
    cache = filled(LAYOUTS[kind])
    copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, NUM_SLOTS)
    copies.warm_up(NUM_BLOCKS - 1)
    before = bits(cache)
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for round_number in range(5):
        left = list(range(100))
        for _ in range(3):
            work = (work @ work).clamp(-1, 1)
        copies.transfer([Transfer(1, True, tuple(left), tuple(left))])
        copies.guard(writing(*left[:50]))
        for tensor in cache.block_tensors:
            tensor[:, :, :, :50] = round_number
        copies.transfer([Transfer(2, False, tuple(range(50, 150)), tuple(range(100, 200)))])
        finish(copies, 2)
        copies.transfer([Transfer(3, False, tuple(left), tuple(left))])
        finish(copies, 1)
        for after, old in zip(bits(cache), before, strict=True):
            assert torch.equal(after[:100], old[:100])


def test_a_copy_reads_the_results_of_the_previous_step() -> None:
    cache = filled(LAYOUTS["bf16"])
    copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, NUM_SLOTS)
    copies.warm_up(NUM_BLOCKS - 1)
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        work = (work @ work).clamp(-1, 1)
    cache.pools[0][:, :, :, :40] = 3.0
    copies.transfer([Transfer(1, True, tuple(range(40)), tuple(range(40)))])
    finish(copies, 1)
    copies.transfer([Transfer(2, False, tuple(range(60, 100)), tuple(range(40)))])
    finish(copies, 1)
    assert bool((cache.pools[0][:, :, :, 60:100] == 3.0).all())


def test_memory_that_cannot_be_pinned_is_used_without_pinning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:
            return 2

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch.cuda, "cudart", Runtime)
        cache = filled(LAYOUTS["small"])
        copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, NUM_SLOTS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be pinned" in caplog.text
    before = bits(cache)
    copies.transfer([Transfer(1, True, (5, 6), (0, 1)), Transfer(2, False, (8, 9), (1, 0))])
    finish(copies, 2)
    assert torch.equal(bits(cache)[0][[9, 8]], before[0][[5, 6]])


def test_memory_is_pinned_in_place() -> None:
    cache = filled(LAYOUTS["bf16"])
    copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, NUM_SLOTS)
    assert copies._slots.is_pinned()


def test_random_operations(tmp_path: Path) -> None:
    """The GPU has 30 blocks and the host 60, so KV is often evicted and loaded. Each greedy answer
    must equal the answer to the same prompt alone."""
    folder = str(make_tiny_model(tmp_path, overrides=SIZES))
    spec = open_checkpoint(folder).spec
    layout = KVLayout.of(spec, 16, torch.float32)
    config = BuiltinConfig.model_validate(
        {
            "model": folder,
            "device": "cuda",
            "dtype": "float32",
            "scheduler": {"max_batch_size": 16, "max_num_batched_tokens": 128},
            "instance": {
                "num_kv_cache_blocks": 30,
                "host_kv_gb": 60 * layout.block_bytes / GIB,
                "block_size": 16,
                "max_seq_len": 400,
            },
        }
    )
    runner, tokenizer, _ = load_runner(config)
    assert isinstance(runner, CudaRunner)
    core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
    assert core.host is not None
    tier = core.host.tier
    tier._prefill_s = lambda: None  # The tier always loads KV instead of computing it.
    world = World(core, random.Random(3), free_weight=0.4)
    world.run(int(os.environ.get("PARROT_GPU_OPERATIONS", "2000")))
    assert core.runtime_info().num_free_blocks == 30
    assert tier.totals.num_failed == 0
    assert tier.totals.num_stored > world.num_operations // 10
    assert tier.totals.num_loaded > world.num_operations // 50
    world.check_answers(runner, 40)


SCRIPT = """
import torch
from parrot.engine.core.steps import Transfer
from tests.gpu.test_host_copies import BLOCK_SIZE, LAYOUTS, CudaCopies, KVCache

cache = KVCache(LAYOUTS["bf16"], 2000, torch.device("cuda"), paged=True)
copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, 2000)
places = tuple(range(1000))
number = 0
while True:
    number += 2
    copies.transfer([Transfer(number, True, places, places)])
    copies.transfer([Transfer(number + 1, False, tuple(p + 1000 for p in places), places)])
    print("copying", flush=True)
    copies.landed(wait=True)
"""


def test_a_process_that_is_killed_during_copies_leaks_nothing() -> None:
    """A second process, and then this process, can do the same copies."""
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline() == b"copying\n"
            process.send_signal(signal.SIGKILL)
            process.wait(30)
    test_loaded_blocks_equal_the_stored_blocks("bf16")
