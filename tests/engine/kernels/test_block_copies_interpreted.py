"""Gathering and scattering blocks in Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels import block_copy_kernels
from parrot.engine.kernels.block_copies import gather_blocks, scatter_blocks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or "Interpreted" not in type(block_copy_kernels.block_copy_kernel).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)


@pytest.mark.parametrize("words", [8, 24, 1500])
def test_gathered_blocks_are_scattered_to_other_blocks(words: int) -> None:
    pool = torch.randint(0, 2**62, (4, 9, words))
    before = pool.clone()
    wide = torch.zeros((3, 4 * words + 16), dtype=torch.int64)
    pieces = wide[:, : 4 * words].view(3, 4, words)
    blocks = torch.tensor([7, 0, 3], dtype=torch.int32)
    gather_blocks(pool, blocks, pieces)
    assert torch.equal(pieces, before[:, [7, 0, 3]].transpose(0, 1))
    assert not wide[:, 4 * words :].any()
    targets = torch.tensor([1, 8, 2], dtype=torch.int32)
    scatter_blocks(pieces, targets, pool)
    assert torch.equal(pool[:, [1, 8, 2]], before[:, [7, 0, 3]])
    assert torch.equal(pool[:, [0, 3, 4, 5, 6, 7]], before[:, [0, 3, 4, 5, 6, 7]])
