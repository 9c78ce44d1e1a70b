"""Launches the matrix products of few rows."""

from dataclasses import dataclass

import torch
import triton

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.launch import KVView, early_launch, starts_early
from parrot.engine.kernels.linear.matrix_kernels import few_rows_linear_kernel, few_rows_qkv_kernel
from parrot.engine.kernels.linear.row_kernels import row_linear_kernel, row_qkv_kernel
from parrot.engine.kernels.linear.tiles import Product
from parrot.engine.kernels.row_codes import CodedRows, row_codes


@dataclass(frozen=True, slots=True)
class UndividedRows:
    """Rows of an RMS norm before the division by the root mean square.

    The next product divides its result. `rows` [tokens, size] are values times the norm's weight.
    `squares` float32 [tokens, parts] are sums of squares of parts of the values."""

    rows: torch.Tensor
    squares: torch.Tensor
    eps: float


Rows = torch.Tensor | UndividedRows | CodedRows


def few_rows_linear(
    x: Rows,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """out [rows, n] = x [rows, k] weight^T + bias, with weight [n, k] and few rows (`most_rows`).

    With `silu`, weight is [gate | up] with 2 n rows, and out = silu(gate) * up. With out
    [splits, rows, n], each split gets the product of a part of k; the caller sums them
    (`num_splits`). A row's result does not depend on the number of rows, with one exception: one
    row, or two rows with small weights, are summed in another order (`Product`).

    With `scales` float32 [n] or [n / 128, k / 128], weight is e4m3 and is multiplied by them. The
    rows of x are then in e4m3 as well (`coded_rows`)."""
    _launch(x, _Weight(weight, bias, scales), out, silu=silu)
    return out


def coded_rows(x: Rows, weight: torch.Tensor, scales: torch.Tensor, *, silu: bool = False) -> Rows:
    """x in e4m3, if the product with a weight in e4m3 does not round it."""
    if isinstance(x, CodedRows):
        return x
    rows, *_ = parts_of(x)
    num_out, size = weight.shape
    num_out //= 2 if silu else 1
    product = Product(len(rows), num_out, size, weight.dtype, silu, is_blocked(scales))
    if product.is_row:
        return x
    assert not isinstance(x, UndividedRows), "the division changes which numbers are rounded up"
    return row_codes(rows)


def few_rows_add_and_norm(
    x: torch.Tensor | CodedRows,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> UndividedRows:
    """residual [rows, n] += x weight^T + bias, in place. Returns rms_norm(residual) * norm_weight.

    `scales`: see `few_rows_linear`. Does not support float16, in which the residual times the
    norm's weight may overflow."""
    num_rows, num_out = residual.shape
    assert weight.shape[0] == num_out == len(norm_weight), (weight.shape, residual.shape)
    assert residual.is_contiguous()
    assert residual.dtype != torch.float16
    product = Product(
        num_rows, num_out, weight.shape[1], weight.dtype, is_blocked=is_blocked(scales)
    )
    parts = triton.cdiv(num_out, product.tile()["BN"])
    squares = torch.empty((num_rows, parts), dtype=torch.float32, device=residual.device)
    rows = torch.empty_like(residual)
    added = _Added(residual, norm_weight, squares)
    _launch(x, _Weight(weight, bias, scales), rows, added=added)
    return UndividedRows(rows, squares, eps)


def few_rows_qkv(
    x: Rows,
    weight: torch.Tensor,
    kv: KVView,
    table_rows: torch.Tensor,
    cos_sin: torch.Tensor,
    shape: AttentionShape,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`few_rows_linear` and `rope_and_store` in one kernel, for heads that `can_rotate`.

    Returns q [rows, heads, dim]. Rows with a negative `table_rows` are not written."""
    rows, squares, eps, powers = parts_of(x)
    num_rows, size = rows.shape
    product = _qkv_product(rows, weight, scales, shape)
    assert weight.shape == (product.outputs, size), (weight.shape, shape)
    assert weight.is_contiguous()
    kv.check()
    assert not kv.is_quantised, "an exponent needs a whole head, and programs have parts"
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert can_rotate(shape, x, weight, scales)
    assert (weight.dtype == torch.float8_e4m3fn) == (scales is not None), weight.dtype
    q = kv.k.new_empty((num_rows, shape.num_heads, shape.head_dim))
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
        scales,
        powers,
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
        E4M3=scales is not None,
        **({} if product.is_row else {"BLOCKED": product.is_blocked}),
        **tile,
        **early_launch(starts_early(rows.device)),
    )
    return q


def parts_of(x: Rows) -> tuple[torch.Tensor, torch.Tensor | None, float, torch.Tensor | None]:
    """Rows, their squares, the norm's eps, and their powers of two."""
    if isinstance(x, UndividedRows):
        return x.rows, x.squares, x.eps, None
    return (x.codes, None, 0.0, x.powers) if isinstance(x, CodedRows) else (x, None, 0.0, None)


def can_rotate(
    shape: AttentionShape, x: Rows, weight: torch.Tensor, scales: torch.Tensor | None = None
) -> bool:
    """Whether `few_rows_qkv` supports these rows and heads."""
    rows, *_ = parts_of(x)
    product = _qkv_product(rows, weight, scales, shape)
    if not 0 < len(rows) <= product.most_rows:
        return False
    return shape.head_dim % product.tile()["BN"] == 0


def _qkv_product(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, shape: AttentionShape
) -> Product:
    num_out = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    size = rows.shape[1]
    return Product(len(rows), num_out, size, weight.dtype, is_blocked=is_blocked(scales))


def is_blocked(scales: torch.Tensor | None) -> bool:
    """Whether scales belong to blocks of 128 x 128 weights, and not to outputs."""
    return scales is not None and scales.dim() == 2


@dataclass(frozen=True, slots=True)
class _Weight:
    numbers: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Added:
    """The residual that a product is added to, and the norm of the sum."""

    residual: torch.Tensor
    gain: torch.Tensor
    squares: torch.Tensor  # Output.


def _launch(
    x: Rows, weight: _Weight, out: torch.Tensor, *, silu: bool = False, added: _Added | None = None
) -> None:
    rows, squares, eps, powers = parts_of(x)
    numbers, bias, scales = weight.numbers, weight.bias, weight.scales
    (num_rows, num_out), size = out.shape[-2:], rows.shape[1]
    splits = out.numel() // (num_rows * num_out)
    assert len(rows) == num_rows, (rows.shape, out.shape)
    assert splits == 1 or (bias is None and not silu and squares is None), "parts of a product"
    assert numbers.shape == ((2 if silu else 1) * num_out, size), (numbers.shape, out.shape)
    assert (numbers.dtype == torch.float8_e4m3fn) == (scales is not None), numbers.dtype
    assert numbers.is_contiguous()
    assert out.is_contiguous()
    assert rows.stride(1) == 1
    product = Product(num_rows, num_out, size, numbers.dtype, silu, is_blocked(scales))
    assert num_rows <= product.most_rows, out.shape
    if splits == 1 and product.is_row:
        kernel, tile = row_linear_kernel, product.row_tile()
    else:
        kernel, tile = few_rows_linear_kernel, product.matrix_tile()
        tile |= {"SPLIT": size // splits, "BLOCKED": product.is_blocked}
        assert splits == 1 or tile["SPLIT"] % tile["BK"] == 0, (size, splits)
        assert (scales is None) == (powers is None), "rows in another type than the weights"
    kernel[(triton.cdiv(num_out, tile["BN"]), splits)](
        rows,
        numbers,
        bias,
        out,
        squares,
        None if added is None else added.residual,
        None if added is None else added.gain,
        None if added is None else added.squares,
        scales,
        powers,
        eps,
        num_rows,
        rows.stride(0),
        N=num_out,
        K=size,
        BIAS=bias is not None,
        PARTS=0 if squares is None else squares.shape[1],
        SILU=silu,
        ADD=added is not None,
        E4M3=scales is not None,
        **tile,
        **early_launch(starts_early(rows.device)),
    )


def num_splits(num_rows: int, weight: torch.Tensor, scales: torch.Tensor | None = None) -> int:
    """The best number of splits of k for a product (`Product.num_splits`)."""
    num_out, size = weight.shape
    product = Product(num_rows, num_out, size, weight.dtype, is_blocked=is_blocked(scales))
    return product.num_splits
