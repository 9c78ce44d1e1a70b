"""Launch the matrix products of few rows."""

import torch
import triton

from parrot.engine.kernels.linear_kernels import few_rows_linear_kernel, one_row_linear_kernel

FEW_ROWS = 32
"""With more rows, cuBLAS is as fast."""

_ONE_ROW_OUTPUTS = 4
_ONE_ROW_COLUMNS = 2048
_ONE_ROW_WARPS = 4
_MANY_OUTPUTS = 4096  # enough for wide tiles to occupy a GPU
_MIN_DOT = 16


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, silu: bool = False
) -> torch.Tensor:
    """out [rows, n] = x [rows, k] weight^T, weight [n, k], for up to `FEW_ROWS` rows, nearly at the
    rate at which memory can be read. With `silu`, weight is [gate | up] with 2 n rows, and
    out = silu(gate) * up. A row's result does not depend on how many others there are, but for
    the case of one row alone."""
    num_rows, num_out, size = len(x), out.shape[1], x.shape[1]
    assert len(out) == num_rows <= FEW_ROWS, (x.shape, out.shape)
    assert weight.shape == (2 * num_out if silu else num_out, size), (weight.shape, out.shape)
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert x.stride(1) == 1
    if num_rows == 1:  # 0.1 ms a step faster for an 8B model than the matrix unit
        return _one_row(x, weight, out, silu=silu)
    # Tuned on an H200 (docs/kernels.md). Short outputs need more programs than wide tiles give.
    wide = num_out >= _MANY_OUTPUTS
    block_n = 64 if wide else 16
    deep = not silu and num_out <= 2 * _MANY_OUTPUTS
    block_k = min(256 if deep else 128, max(_MIN_DOT, triton.next_power_of_2(size)))
    few_rows_linear_kernel[(triton.cdiv(num_out, block_n),)](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        N=num_out,
        K=size,
        BM=max(_MIN_DOT, triton.next_power_of_2(num_rows)),
        BN=block_n,
        BK=block_k,
        STAGES=3 if silu else 4,
        SILU=silu,
        num_warps=4 if wide else 2,
    )
    return out


def _one_row(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, silu: bool
) -> torch.Tensor:
    num_out, size = out.shape[1], x.shape[1]
    one_row_linear_kernel[(triton.cdiv(num_out, _ONE_ROW_OUTPUTS),)](
        x,
        weight,
        out,
        N=num_out,
        K=size,
        BN=_ONE_ROW_OUTPUTS,
        BK=min(_ONE_ROW_COLUMNS, triton.next_power_of_2(size)),
        SILU=silu,
        num_warps=_ONE_ROW_WARPS,
    )
    return out
