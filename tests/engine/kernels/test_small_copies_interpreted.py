"""Copies of few numbers, in Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels import small_copies
from parrot.engine.kernels.small_copies import copy_numbers

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or "Interpreted" not in type(small_copies.copy_numbers_kernel).__name__,
    reason="the kernel was imported for a device; tests/gpu runs it",
)


@pytest.mark.parametrize("count", [0, 1, 3, 1024, 1100])
def test_only_the_first_numbers_are_copied(count: int) -> None:
    source = torch.randint(-9, 9, (1200,), dtype=torch.int32)
    target = torch.full((1200,), 77, dtype=torch.int32)
    copy_numbers(source, target, count)
    assert torch.equal(target[:count], source[:count])
    assert (target[count:] == 77).all()


@pytest.mark.parametrize("num_tokens", [1, 3, 1024, 1100])
def test_pending_tokens_are_filled_in(num_tokens: int) -> None:
    """Numbers after the tokens may be negative."""
    generator = torch.Generator().manual_seed(num_tokens)
    known = torch.randint(-1, 50, (9,), generator=generator).int()
    source = torch.randint(-9, 50, (num_tokens + 5,), generator=generator).int()
    source[num_tokens:] = -3
    target = torch.zeros_like(source)
    copy_numbers(source, target, len(source), known, num_tokens)
    token = source[:num_tokens]
    expected = torch.where(token < 0, known[(-1 - token).clamp(min=0).long()].clamp(min=0), token)
    assert torch.equal(target[:num_tokens], expected)
    assert torch.equal(target[num_tokens:], source[num_tokens:])
