"""Launch the matrix products of few rows."""

from dataclasses import dataclass

import torch
import triton

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.launch import KVView, early_launch, starts_early
from parrot.engine.kernels.linear_kernels import (
    few_rows_linear_kernel,
    few_rows_qkv_kernel,
    row_linear_kernel,
)

FEW_ROWS = 64
"""The most rows for which these products are faster than cuBLAS."""

_ROWS = 2
_SMALL = 8 << 20  # weights that fit the registers of a device
_MAX_COLUMNS = 4096
_SOME_OUTPUTS = 3072  # enough for tiles of 64
_MANY_OUTPUTS = 4096  # enough for wide tiles to occupy a GPU
_FEW_PROGRAMS = 96
_MIN_DOT = 16
_HALF = FEW_ROWS // 2


@dataclass(frozen=True, slots=True)
class UndividedRows:
    """RMS-normed rows but for their division by the root mean square, which a product of them
    does at its end.

    rows     [tokens, size]: values times the norm's weight
    squares  float32 [tokens, parts]: sums of the squares of the values' parts"""

    rows: torch.Tensor
    squares: torch.Tensor
    eps: float


def few_rows_linear(
    x: torch.Tensor | UndividedRows,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """out [rows, n] = x [rows, k] weight^T + bias, weight [n, k], for up to `FEW_ROWS` rows, nearly
    at the rate at which memory can be read. With `silu`, weight is [gate | up] with 2 n rows, and
    out = silu(gate) * up. An out [splits, rows, n] gets products of parts of k, which are to be
    summed (`num_splits`). A row's result does not depend on how many others there are, but for
    small weights, of which one or two rows are summed in another order."""
    assert weight.shape[0] == (2 if silu else 1) * out.shape[-1], (weight.shape, out.shape)
    rows, squares, eps = _parts(x)
    _launch(rows, weight, bias, out, silu=silu, squares=squares, eps=eps)
    return out


def few_rows_add_and_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
) -> UndividedRows:
    """residual [rows, n] += x weight^T + bias, in place; returns rms_norm(residual) * norm_weight.

    Not for float16: a residual times the norm's weight may be too large for it."""
    num_rows, num_out = residual.shape
    assert weight.shape[0] == num_out == len(norm_weight), (weight.shape, residual.shape)
    assert residual.is_contiguous()
    assert residual.dtype != torch.float16
    parts = triton.cdiv(num_out, _outputs_of_program(num_rows, num_out, x.shape[1]))
    squares = torch.empty((num_rows, parts), dtype=torch.float32, device=x.device)
    rows = torch.empty_like(residual)
    _launch(x, weight, bias, rows, residual=residual, gain=norm_weight, squares_out=squares)
    return UndividedRows(rows, squares, eps)


def few_rows_qkv(
    x: torch.Tensor | UndividedRows,
    weight: torch.Tensor,
    kv: KVView,
    table_rows: torch.Tensor,
    cos_sin: torch.Tensor,
    shape: AttentionShape,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`few_rows_linear` and `rope_and_store` (which see) in one, for heads that `can_rotate`:
    returns q [rows, heads, dim]; that of rows with a negative `table_rows` is not written."""
    rows, squares, eps = _parts(x)
    num_rows, size = rows.shape
    num_out = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    assert weight.shape == (num_out, size), (weight.shape, shape)
    assert weight.is_contiguous()
    kv.check()
    assert not kv.is_quantised, "an exponent needs a whole head, and programs have parts"
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert can_rotate(shape, num_rows)
    q = rows.new_empty((num_rows, shape.num_heads, shape.head_dim))
    tile = _tile(num_rows, num_out, size, rows.dtype, silu=False)
    few_rows_qkv_kernel[(num_out // tile["BN"],)](
        rows,
        weight,
        bias,
        squares,
        q,
        kv.positions,
        table_rows,
        kv.tables,
        cos_sin,
        kv.k,
        kv.v,
        eps,
        num_rows,
        rows.stride(0),
        kv.k.stride(0),
        kv.tables.stride(0),
        K=size,
        H=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=shape.head_dim,
        PAGE=shape.page_size,
        BIAS=bias is not None,
        PARTS=0 if squares is None else squares.shape[1],
        **tile,
        **early_launch(starts_early(rows.device)),
    )
    return q


def _parts(x: torch.Tensor | UndividedRows) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    return (x.rows, x.squares, x.eps) if isinstance(x, UndividedRows) else (x, None, 0.0)


def can_rotate(shape: AttentionShape, num_rows: int) -> bool:
    """Whether `few_rows_qkv` takes this number of rows and these heads."""
    num_out = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return num_rows <= FEW_ROWS and shape.head_dim % _num_outputs(num_rows, num_out) == 0


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    silu: bool = False,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    squares_out: torch.Tensor | None = None,
) -> None:
    (num_rows, num_out), size = out.shape[-2:], x.shape[1]
    splits = out.numel() // (num_rows * num_out)
    assert len(x) == num_rows <= FEW_ROWS, (x.shape, out.shape)
    assert splits == 1 or (bias is None and not silu and squares is None), "parts of a product"
    assert weight.shape[1] == size, (weight.shape, x.shape)
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert x.stride(1) == 1
    if splits == 1 and _is_small(num_rows, num_out, size, silu=silu):
        kernel, tile = row_linear_kernel, _row_tile(num_rows, num_out, size, silu=silu)
    else:
        kernel = few_rows_linear_kernel
        tile = _tile(num_rows, num_out, size, x.dtype, silu=silu)
        tile["SPLIT"] = size // splits
        assert splits == 1 or tile["SPLIT"] % tile["BK"] == 0, (size, splits)
    kernel[(triton.cdiv(num_out, tile["BN"]), splits)](
        x,
        weight,
        bias,
        out,
        squares,
        residual,
        gain,
        squares_out,
        eps,
        num_rows,
        x.stride(0),
        N=num_out,
        K=size,
        BIAS=bias is not None,
        PARTS=0 if squares is None else squares.shape[1],
        SILU=silu,
        ADD=residual is not None,
        **tile,
        **early_launch(starts_early(x.device)),
    )


def num_splits(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Into how many parts of its inputs a product of few rows is best split, if somebody sums them:
    so many that its programs occupy a GPU."""
    (num_rows, size), num_out = x.shape, len(weight)
    if _is_small(num_rows, num_out, size, silu=False):
        return 1
    tile = _tile(num_rows, num_out, size, x.dtype, silu=False)
    is_wide = triton.cdiv(num_out, tile["BN"]) > _FEW_PROGRAMS
    return 1 if is_wide or size % (2 * tile["BK"]) else 2


def _is_small(num_rows: int, num_out: int, size: int, *, silu: bool) -> bool:
    """Whether the product is one of `row_linear_kernel`."""
    num_weights = num_out * size * (2 if silu else 1)
    return num_rows <= _ROWS and size <= _MAX_COLUMNS and num_weights <= _SMALL


def _outputs_of_program(num_rows: int, num_out: int, size: int) -> int:
    """The tile sizes of products without SiLU."""
    if _is_small(num_rows, num_out, size, silu=False):
        return _row_tile(num_rows, num_out, size, silu=False)["BN"]
    return _num_outputs(num_rows, num_out)


def _row_tile(num_rows: int, num_out: int, size: int, *, silu: bool) -> dict[str, int]:
    outputs, warps = (8, 8) if num_out < _MANY_OUTPUTS else (16, 4)
    return {
        "ROWS": num_rows,
        "BN": outputs,
        "BK": triton.next_power_of_2(size),
        "num_warps": warps,
    }


def _tile(
    num_rows: int, num_out: int, size: int, dtype: torch.dtype, *, silu: bool
) -> dict[str, int]:
    """Tuned on an H200 for types of two bytes (docs/kernels.md). Short outputs need more programs
    than wide tiles give; the fewer programs, the more of the weights must each have on its way."""
    outputs, columns, stages, warps = _choose(num_rows, num_out, silu=silu)
    if dtype == torch.float32:  # twice the bytes, and no matrix unit: all would not fit
        columns //= 4
    return {
        "BM": max(_MIN_DOT, triton.next_power_of_2(num_rows)),
        "BN": outputs,
        "BK": min(columns, max(_MIN_DOT, triton.next_power_of_2(size))),
        "STAGES": stages,
        "num_warps": warps,
    }


def _num_outputs(num_rows: int, num_out: int) -> int:
    return _choose(num_rows, num_out, silu=False)[0]


def _choose(num_rows: int, num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """Outputs and columns of a tile, stages, warps."""
    choose = _tile_of_32 if num_rows <= _HALF else _tile_of_64
    return choose(num_out, silu=silu)


def _tile_of_32(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 256, 4, 2) if silu else (16, 512, 4, 2)
    if silu:
        return (128, 128, 3, 4) if num_out > 2 * _MANY_OUTPUTS else (64, 64, 6, 4)
    if num_out < _MANY_OUTPUTS:
        return 64, 128, 6, 4
    return 64, 128, (4 if num_out > 2 * _MANY_OUTPUTS else 6 if num_out > 5120 else 8), 4


def _tile_of_64(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """Every program reads x, which with more than half of the rows takes as long as the weights."""
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 64, 6, 4) if silu else (16, 256, 5, 4)
    if silu:
        return 64, 64, (4 if num_out > 2 * _MANY_OUTPUTS else 6), 4
    return (128, 128, 4, 8) if num_out > 2 * _MANY_OUTPUTS else (64, 128, 6, 4)
