"""Launches the matrix products of few rows."""

from dataclasses import dataclass

import torch
import triton

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.launch import KVView, early_launch, starts_early
from parrot.engine.kernels.linear.matrix_kernels import few_rows_linear_kernel, few_rows_qkv_kernel
from parrot.engine.kernels.linear.row_kernels import row_linear_kernel, row_qkv_kernel
from parrot.engine.kernels.linear.tiles import FEW_ROWS, Product


@dataclass(frozen=True, slots=True)
class UndividedRows:
    """Rows of an RMS norm before the division by the root mean square.

    The next product divides its result. `rows` [tokens, size] are values times the norm's weight.
    `squares` float32 [tokens, parts] are sums of squares of parts of the values."""

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
    """out [rows, n] = x [rows, k] weight^T + bias, with weight [n, k] and up to `FEW_ROWS` rows.

    With `silu`, weight is [gate | up] with 2 n rows, and out = silu(gate) * up. With out
    [splits, rows, n], each split gets the product of a part of k; the caller sums them
    (`num_splits`). A row's result does not depend on the number of rows, with one exception: one
    row, or two rows with small weights, are summed in another order (`Product`)."""
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
    """residual [rows, n] += x weight^T + bias, in place. Returns rms_norm(residual) * norm_weight.

    Does not support float16, in which the residual times the norm's weight may overflow."""
    num_rows, num_out = residual.shape
    assert weight.shape[0] == num_out == len(norm_weight), (weight.shape, residual.shape)
    assert residual.is_contiguous()
    assert residual.dtype != torch.float16
    product = Product(num_rows, num_out, x.shape[1], x.dtype)
    parts = triton.cdiv(num_out, product.tile()["BN"])
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
    """`few_rows_linear` and `rope_and_store` in one kernel, for heads that `can_rotate`.

    Returns q [rows, heads, dim]. Rows with a negative `table_rows` are not written."""
    rows, squares, eps = _parts(x)
    num_rows, size = rows.shape
    product = _qkv_product(rows, shape)
    assert weight.shape == (product.outputs, size), (weight.shape, shape)
    assert weight.is_contiguous()
    kv.check()
    assert not kv.is_quantised, "an exponent needs a whole head, and programs have parts"
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert can_rotate(shape, x)
    q = rows.new_empty((num_rows, shape.num_heads, shape.head_dim))
    kernel = row_qkv_kernel if product.is_row else few_rows_qkv_kernel
    tile = product.tile()
    kernel[(product.outputs // tile["BN"],)](
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


def can_rotate(shape: AttentionShape, x: torch.Tensor | UndividedRows) -> bool:
    """Whether `few_rows_qkv` supports these rows and heads."""
    rows, _, _ = _parts(x)
    return len(rows) <= FEW_ROWS and shape.head_dim % _qkv_product(rows, shape).tile()["BN"] == 0


def _qkv_product(rows: torch.Tensor, shape: AttentionShape) -> Product:
    num_out = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return Product(len(rows), num_out, rows.shape[1], rows.dtype)


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
    product = Product(num_rows, num_out, size, x.dtype, silu)
    if splits == 1 and product.is_row:
        kernel, tile = row_linear_kernel, product.row_tile()
    else:
        kernel, tile = few_rows_linear_kernel, product.matrix_tile()
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
    """The best number of splits of k for a product (`Product.num_splits`)."""
    return Product(len(x), len(weight), x.shape[1], x.dtype).num_splits
