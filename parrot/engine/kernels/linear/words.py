"""Launches the products with weights in codes."""

import torch
import triton

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.launch import KVView, early_launch, starts_early
from parrot.engine.kernels.linear.products import Rows, UndividedRows, parts_of
from parrot.engine.kernels.linear.words_kernels import (
    words_linear_kernel,
    words_numbers_kernel,
    words_qkv_kernel,
)
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.kernels.linear.words_tiles import WordsProduct

_NUMBERS_OUTPUTS = 64  # Outputs of a program that writes numbers.


def words_linear(
    x: Rows,
    weight: Words,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """out [rows, n] = x [rows, k] weight^T + bias. See `few_rows_linear`.

    The number of rows is not limited."""
    _launch(x, weight, bias, out, silu=silu)
    return out


def words_add_and_norm(
    x: torch.Tensor,
    weight: Words,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
) -> UndividedRows:
    """See `few_rows_add_and_norm`."""
    assert residual.is_contiguous()
    assert residual.dtype != torch.float16
    tile = WordsProduct.of(len(x), weight).tile()
    parts = triton.cdiv(weight.outputs, tile["BN"])
    squares = torch.empty((len(x), parts), dtype=torch.float32, device=x.device)
    rows = torch.empty_like(residual)
    _launch(x, weight, bias, rows, added=(residual, norm_weight, squares))
    return UndividedRows(rows, squares, eps)


def words_qkv(
    x: Rows,
    weight: Words,
    kv: KVView,
    table_rows: torch.Tensor,
    cos_sin: torch.Tensor,
    shape: AttentionShape,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `few_rows_qkv`."""
    rows, squares, eps, _ = parts_of(x)
    tile = WordsProduct.of(len(rows), weight).tile()
    assert rows.shape[1] == weight.inputs, (rows.shape, weight.inputs)
    assert rows.stride(1) == 1
    assert len(rows) <= tile["BM"], len(rows)
    assert shape.head_dim % tile["BN"] == 0
    kv.check()
    assert not kv.is_quantised, "an exponent needs a whole head, and programs have parts"
    q = rows.new_empty((len(rows), shape.num_heads, shape.head_dim))
    words_qkv_kernel[(weight.outputs // tile["BN"],)](
        rows,
        weight.words,
        weight.factors,
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
        len(rows),
        rows.stride(0),
        kv.k.stride(0),
        kv.tables.stride(0),
        K=weight.inputs,
        H=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=shape.head_dim,
        PAGE=shape.page_size,
        BITS=weight.bits,
        GROUP=weight.group,
        BLOCKS=weight.num_blocks,
        HALF=weight.has_half_scales,
        LEAST=weight.has_least,
        SHIFT=weight.shift,
        BIAS=bias is not None,
        PARTS=0 if squares is None else squares.shape[1],
        ASSEMBLY=_has_assembly(rows),
        **tile,
        **early_launch(starts_early(rows.device)),
    )
    return q


def words_numbers(weight: Words, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a weight [outputs, inputs], rounded to a type."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=weight.words.device)
    words_numbers_kernel[(weight.num_blocks, triton.cdiv(weight.outputs, _NUMBERS_OUTPUTS))](
        weight.words,
        weight.factors,
        out,
        N=weight.outputs,
        K=weight.inputs,
        BITS=weight.bits,
        GROUP=weight.group,
        BN=_NUMBERS_OUTPUTS,
        HALF=weight.has_half_scales,
        LEAST=weight.has_least,
        SHIFT=weight.shift,
        num_warps=4,
    )
    return out


def _launch(
    x: Rows,
    weight: Words,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    silu: bool = False,
    added: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """`added`: the residual, the norm's weight, and the squares of the sum, which are written."""
    rows, squares, eps, _ = parts_of(x)
    (num_rows, num_out), size = out.shape[-2:], rows.shape[1]
    splits = out.numel() // (num_rows * num_out)
    assert len(rows) == num_rows, (rows.shape, out.shape)
    assert (weight.outputs, weight.inputs) == ((2 if silu else 1) * num_out, size), out.shape
    assert splits == 1 or (bias is None and not silu and squares is None), "parts of a product"
    assert weight.num_blocks % splits == 0, (weight.num_blocks, splits)
    assert out.is_contiguous()
    assert rows.stride(1) == 1
    tile = WordsProduct.of(num_rows, weight, splits).tile()
    outputs = tile["BN"] // (2 if silu else 1)
    grid = triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_out, outputs), splits
    residual, gain, sums = (None, None, None) if added is None else added
    words_linear_kernel[grid](
        rows,
        weight.words,
        weight.factors,
        bias,
        out,
        squares,
        residual,
        gain,
        sums,
        eps,
        num_rows,
        rows.stride(0),
        N=num_out,
        K=size,
        BITS=weight.bits,
        GROUP=weight.group,
        BLOCKS=weight.num_blocks // splits,
        HALF=weight.has_half_scales,
        LEAST=weight.has_least,
        SHIFT=weight.shift,
        BIAS=bias is not None,
        PARTS=0 if squares is None else squares.shape[1],
        SILU=silu,
        ADD=added is not None,
        ASSEMBLY=_has_assembly(rows),
        **tile,
        **early_launch(starts_early(rows.device)),
    )


def _has_assembly(rows: torch.Tensor) -> bool:
    return rows.device.type == "cuda" and rows.dtype == torch.bfloat16
