"""Launches the kernels between the matrix products of a layer."""

import torch
import triton

from parrot.engine.kernels.attention_shape import AttentionShape, HeadNorm
from parrot.engine.kernels.fused_kernels import (
    add_parts_kernel,
    add_rms_norm_kernel,
    rope_and_store_kernel,
    silu_mul_kernel,
)
from parrot.engine.kernels.launch import KVView, NewKV, early_launch, starts_early
from parrot.engine.kernels.row_codes import Factors

_SILU_BLOCK = 1024  # Columns that a program of `silu_mul` computes.
# Rows in e4m3 need the largest number of a row, so a program computes a whole row. With factors it
# does so in blocks. A row at once would take more than 32 registers of 1024 threads, and only one
# program would fit a multiprocessor.
_CODES_BLOCK = {"BLOCK": 2048, "num_warps": 8, "maxnreg": 80}
_PARTS_BLOCK = 512  # Columns that a program of `add_parts` computes.
# Heads that a program of `rope_and_store` rotates, and its warps. Parts have more bytes.
_ROPE_TILE, _ROPE_PARTS_TILE = (8, 2), (2, 1)
_FEW_TOKENS = 8  # Up to this number of tokens, the next kernel starts early (`EARLY`).


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    add: bool = True,
    powers: torch.Tensor | None = None,
    factors: Factors | None = None,
) -> torch.Tensor:
    """residual += x (or residual = x without `add`). Returns out = rms_norm(residual) * weight.

    `weight` is [size], all other tensors are [tokens, size]. `x` may be a slice of wider rows, or
    parts [parts, tokens, size] whose sum is x. Sums are computed in float32.

    `powers` float32 [tokens, 1]: out is in e4m3, and these are its factors, an output. `factors`:
    those of x."""
    size, parts = weight.shape[0], 1 if x.dim() == 2 else len(x)
    assert x.shape[-2:] == residual.shape == out.shape, (x.shape, residual.shape, out.shape)
    assert x.shape[-1] == size
    assert x.stride(-1) == 1
    assert residual.is_contiguous()
    assert out.is_contiguous()
    codes = out.dtype == torch.float8_e4m3fn
    assert codes == (powers is not None), out.dtype
    block = triton.next_power_of_2(size)
    add_rms_norm_kernel[(len(residual),)](
        x,
        residual,
        weight,
        out,
        powers,
        *_arrays_of(factors),
        eps,
        x.stride(-2),
        x.stride(0) if parts > 1 else 0,
        SIZE=size,
        BLOCK=block,
        ADD=add,
        PARTS=parts,
        CODES=codes,
        FACTORS=factors is not None,
        num_warps=min(max(block // 1024, 1), 8),
        **early_launch(parts > 1 and starts_early(residual.device)),
    )
    return out


def add_parts(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += the sum of parts, in place. Returns rms_norm(residual) * weight before the
    division by the root mean square, and sums of squares of blocks of the residual: see
    `products.UndividedRows`.

    Several programs share a row, so few rows with many parts are faster than with `add_rms_norm`.

    parts  float32 [parts, rows, size]"""
    num_rows, size = residual.shape
    assert parts.shape[1:] == residual.shape, (parts.shape, residual.shape)
    assert parts.is_contiguous()
    assert residual.is_contiguous()
    blocks = triton.cdiv(size, _PARTS_BLOCK)
    out, squares = torch.empty_like(residual), parts.new_empty(num_rows, blocks)
    add_parts_kernel[(blocks, num_rows)](
        parts,
        residual,
        weight,
        out,
        squares,
        parts.stride(0),
        SIZE=size,
        BLOCK=_PARTS_BLOCK,
        PARTS=len(parts),
        num_warps=4,
        **early_launch(starts_early(residual.device)),
    )
    return out, squares


def rope_and_store(
    qkv: torch.Tensor,
    kv: KVView,
    table_rows: torch.Tensor,
    cos_sin: torch.Tensor,
    shape: AttentionShape,
    norm: HeadNorm | None = None,
    *,
    keep_k: bool = False,
    factors: Factors | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, NewKV]:
    """Rotate q in place, and write k and v to the cache.

    Returns views of `qkv`: q [tokens, heads, dim], and the new k and v. With `keep_k`, k is also
    rotated in place. With a quantised cache, k and v are then the numbers that the cache stores.

    qkv         [tokens, (heads + 2 kv_heads) * head_dim], rows contiguous; or parts float32
                [parts, tokens, ...] whose sum it is. The views are then of a new tensor of type
                `dtype`, in which k and v are undefined without `keep_k`
    kv          the layer's cache, block tables and the tokens' positions
    table_rows  int32 [tokens]: each token's row of the block tables; negative to skip the token
    cos_sin     float32 [positions, head_dim]: cosines, then sines, of half the dimensions
    factors     those of qkv"""
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    assert qkv.shape[-1] == num_heads * shape.head_dim, (qkv.shape, shape)
    assert qkv.stride(-1) == 1
    kv.check()
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    parts, out = 0, qkv
    if qkv.dim() == 3:
        parts, out = len(qkv), qkv.new_empty(qkv.shape[1:], dtype=dtype)
    num_tokens = len(out)
    heads, warps = _ROPE_PARTS_TILE if parts else _ROPE_TILE
    rope_and_store_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv,
        out,
        kv.positions,
        table_rows,
        kv.tables,
        cos_sin,
        None if norm is None else norm.q_weight,
        None if norm is None else norm.k_weight,
        kv.k,
        kv.v,
        kv.k_exponents,
        kv.v_exponents,
        *_arrays_of(factors),
        0.0 if norm is None else norm.eps,
        qkv.stride(-2),
        qkv.stride(0) if parts else 0,
        out.stride(0),
        kv.k.stride(0),
        kv.tables.stride(0),
        H=shape.num_heads,
        HKV=shape.num_kv_heads,
        D=shape.head_dim,
        PAGE=shape.page_size,
        HEADS=heads,
        PARTS=parts,
        WITH_NORM=norm is not None,
        KEEP_K=keep_k,
        QUANTISED=kv.is_quantised,
        FACTORS=factors is not None,
        EARLY=num_tokens <= _FEW_TOKENS,
        num_warps=warps,
        **early_launch(starts_early(qkv.device)),
    )
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(out.view(num_tokens, num_heads, shape.head_dim), sizes, dim=1)
    return q, NewKV(k, v)


def silu_mul(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    *,
    gelu: bool = False,
    powers: torch.Tensor | None = None,
    factors: Factors | None = None,
) -> torch.Tensor:
    """out [tokens, size] = silu(gate) * up, for gate_up [tokens, 2 size] = [gate | up].

    `gelu`: the tanh approximation of GELU instead of SiLU. `powers` float32 [tokens, 1]: out is in
    e4m3, and these are its factors, an output. `factors`: those of gate_up."""
    size = out.shape[1]
    assert gate_up.shape == (len(out), 2 * size), (gate_up.shape, out.shape)
    assert gate_up.is_contiguous()
    assert out.is_contiguous()
    codes = out.dtype == torch.float8_e4m3fn
    assert codes == (powers is not None)
    silu_mul_kernel[(len(out), 1 if codes else triton.cdiv(size, _SILU_BLOCK))](
        gate_up,
        out,
        powers,
        *_arrays_of(factors),
        SIZE=size,
        GELU=gelu,
        CODES=codes,
        FACTORS=factors is not None,
        **silu_tile(size, codes=codes, has_factors=factors is not None),
    )
    return out


def silu_tile(size: int, *, codes: bool, has_factors: bool) -> dict[str, int]:
    """The columns that a program computes at once, and its warps."""
    if codes and has_factors:
        return _CODES_BLOCK
    block = triton.next_power_of_2(size) if codes else _SILU_BLOCK
    return {"BLOCK": block, "num_warps": 32 if block > 8192 else 8 if block > 2048 else 4}


def _arrays_of(factors: Factors | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if factors is None else (factors.powers, factors.scales)
