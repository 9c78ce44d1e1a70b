"""The copies of a CUDA device, on a CPU with interpreted kernels."""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.core.steps import BlockCopy, Landed, SequenceStep, StepPlan, Transfer
from parrot.engine.kernels import block_copy_kernels
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner.host import cuda
from parrot.engine.runner.host.copies import RankTransfers
from parrot.engine.runner.host.cuda import CudaCopies
from parrot.engine.runner.kv_cache import KVCache, KVLayout
from tests.support.immediate_streams import Stream, immediate_streams

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or "Interpreted" not in type(block_copy_kernels.block_copy_kernel).__name__,
    reason="tests/gpu runs these on the device",
)

BLOCK_SIZE = 4
LAYOUT = KVLayout((LayerGroup((0, 1), 2, 16),), BLOCK_SIZE, torch.bfloat16, quantised=True)


@pytest.fixture
def steps() -> Iterator[Stream]:
    with immediate_streams() as stream:
        yield stream


def make(steps: Stream) -> tuple[KVCache, CudaCopies]:
    cache = KVCache(LAYOUT, 9, torch.device("cpu"), paged=True)
    for tensor in cache.block_tensors:
        tensor.copy_(torch.randint(0, 255, tensor.shape))
    copies = CudaCopies(cache.block_tensors, BLOCK_SIZE, 5)
    copies.warm_up(8)
    return cache, copies


@pytest.mark.parametrize("staged_blocks", [1, 2, 8])
def test_blocks_are_stored_and_loaded(
    steps: Stream, staged_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_STAGED_BYTES", staged_blocks * LAYOUT.block_bytes)
    cache, copies = make(steps)
    before = [tensor.clone() for tensor in cache.block_tensors]
    copies.transfer([Transfer(1, True, (6, 2, 5), (4, 0, 1))])
    copies.transfer([Transfer(2, False, (0, 7, 1), (0, 4, 1))])
    assert copies.landed(wait=True) == [Landed(2, True, 2e-3), Landed(1, True, 2e-3)]
    assert copies.landed(wait=True) == []
    for tensor, old in zip(cache.block_tensors, before, strict=True):
        assert torch.equal(tensor[:, :, :, [0, 7, 1]], old[:, :, :, [2, 6, 5]])
        assert torch.equal(tensor[:, :, :, [2, 3, 4, 5, 6, 8]], old[:, :, :, [2, 3, 4, 5, 6, 8]])


def test_copies_wait_for_steps_and_writers_wait_for_readers(steps: Stream) -> None:
    _, copies = make(steps)
    copies.transfer([Transfer(1, True, (5, 6), (0, 1))])
    out, back = copies._out.stream, copies._back.stream
    assert out.awaited == [steps]
    others = StepPlan((SequenceStep(1, [0] * 5, 4, [5, 1, 2], None),), (BlockCopy(6, 3, 2),))
    copies.guard(others)  # This step only reads blocks 5 and 6.
    assert steps.awaited == []
    copies.transfer([Transfer(2, False, (6, 7), (2, 3))])
    assert back.awaited == [steps, out]
    copies.guard(StepPlan((SequenceStep(1, [0] * 2, 3, [5, 1], None),)))
    assert steps.awaited == [out]
    copies.guard(StepPlan((), (BlockCopy(3, 6, 2),)))
    assert steps.awaited == [out, out]
    copies.landed(wait=False)
    copies.guard(StepPlan((), (BlockCopy(3, 6, 2),)))
    assert steps.awaited == [out, out]


def test_a_copy_that_cannot_be_started_is_reported_as_failed(
    steps: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copies = make(steps)

    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(cuda, "gather_blocks", fail)
    copies.transfer([Transfer(1, True, (5,), (0,)), Transfer(2, False, (6,), (0,))])
    assert [(r.transfer_id, r.succeeded) for r in copies.landed(wait=True)] == [
        (2, True),
        (1, False),
    ]


def test_a_copy_that_cannot_be_started_on_another_rank_ends_that_rank(
    steps: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copies = make(steps)
    copies.follow(RankTransfers((Transfer(1, True, (5,), (0,)),)))
    copies.follow(RankTransfers(landed=(1,)))

    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(cuda, "scatter_blocks", fail)
    with pytest.raises(RuntimeError, match="has failed on this rank"):
        copies.follow(RankTransfers((Transfer(2, False, (6,), (0,)),)))
