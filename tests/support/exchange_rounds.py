"""Rounds of what ranks do through their memory, which each rank checks for itself.

What a rank contributes is drawn from a seed that all ranks know, so nobody need be asked."""

import time

import torch

from parrot.engine.kernels.ranks.exchanges import Exchanges


def run_rounds(
    exchanges: Exchanges,
    rank: int,
    size: int,
    num_rounds: int,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`shape`: the width, and the most rows. Now and then a rank is late."""
    width, max_rows = shape
    for number in range(num_rounds):
        dice = torch.Generator().manual_seed(number)
        rows = int(torch.randint(1, max_rows + 1, (), generator=dice))
        rows = rows if number % 3 == 0 else 1 + rows % 64
        splits = 2 if rows <= 64 and number % 2 else 1
        parts = torch.randn((size, splits, rows, width), generator=dice).to(dtype)
        before = torch.randn((rows, width), generator=dice).to(dtype)
        weight = torch.randn(width, generator=dice).to(dtype)
        integers = torch.randint(0, 1 << 30, (size, 2, 1 + rows // 4), generator=dice).int()
        if number % size == rank and number % 5 == 0:
            time.sleep(0.02)
        check_sum(exchanges, number % 3, parts, rank, before.to(device), weight.to(device))
        got = exchanges.gather(integers[rank].to(device))
        assert torch.equal(got.cpu(), integers.transpose(0, 1).flatten(1))
        tokens = integers[rank].flatten().to(device)
        exchanges.broadcast(tokens)
        assert torch.equal(tokens.cpu(), integers[0].flatten())


def check_sum(
    exchanges: Exchanges,
    slot: int,
    parts: torch.Tensor,
    rank: int,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    own = exchanges.slot(slot, parts.shape[1], residual)
    assert own is not None
    own.copy_(parts[rank])
    want = residual.float().cpu() + parts.float().sum(dim=(0, 1))
    normed = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
    normed = exchanges.sum_and_norm(own, residual, weight, 1e-5).float().cpu() - (
        normed * weight.float().cpu()
    )
    is_exact = residual.dtype == torch.float32
    assert (residual.float().cpu() - want).abs().max() < (1e-4 if is_exact else 0.1)
    assert normed.abs().max() < (1e-3 if is_exact else 0.3)
