"""The fused kernels on the device, in bfloat16, against float64 with the same inputs."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.attention.quantised import dequantise, quantise
from parrot.engine.kernels.attention_shape import AttentionShape, HeadNorm
from parrot.engine.kernels.fused import (
    add_rms_norm,
    rope_and_store,
    silu_mul,
)
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.products import (
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_linear,
    few_rows_qkv,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from tests.support.kernel_cases import relative_error, rms_norm_reference, rope_reference

pytestmark = pytest.mark.gpu


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize("size", [576, 1024, 4096, 5120])
@pytest.mark.parametrize("tokens", [1, 37, 2048])
@pytest.mark.parametrize("add", [True, False])
def test_add_rms_norm(size: int, tokens: int, add: bool) -> None:
    torch.manual_seed(size + tokens)
    x, residual, weight = normal(tokens, size), normal(tokens, size), normal(size)
    total = x + residual if add else x.clone()
    out = torch.full_like(x, float("nan"))
    add_rms_norm(x, residual, weight, 1e-5, out, add=add)
    assert torch.equal(residual, total)
    expected = rms_norm_reference(total.cpu(), weight.cpu(), 1e-5)
    assert relative_error(out, expected) < 5e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (40, 40, 128)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_store(heads: int, kv_heads: int, dim: int, with_norm: bool) -> None:
    torch.manual_seed(heads)
    page, tokens = 64, 130
    shape = AttentionShape(heads, kv_heads, dim, page)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    before = qkv.cpu().double().view(tokens, -1, dim)
    positions = torch.randperm(500)[:tokens].to(torch.int32)
    table_rows = torch.arange(tokens, dtype=torch.int32) % 3
    tables = torch.randperm(30).view(3, 10).to(torch.int32)
    angles = torch.outer(torch.arange(512.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    caches = [torch.full((30, kv_heads, page, dim), float("nan")) for _ in range(2)]
    k_cache, v_cache = (cache.to(torch.bfloat16).cuda() for cache in caches)
    norm = HeadNorm(normal(dim), normal(dim), 1e-6) if with_norm else None
    kv = KVView(k_cache, v_cache, tables.cuda(), positions.cuda())
    q, new = rope_and_store(qkv, kv, table_rows.cuda(), cos_sin.cuda(), shape, norm, keep_k=True)

    q_in, k_in, v_in = before.split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q_in = rms_norm_reference(q_in, norm.q_weight.cpu(), norm.eps)
        k_in = rms_norm_reference(k_in, norm.k_weight.cpu(), norm.eps)
    assert relative_error(q, rope_reference(q_in, positions, cos_sin)) < 5e-3
    assert relative_error(new.k, rope_reference(k_in, positions, cos_sin)) < 5e-3
    assert torch.equal(new.v.cpu().double(), v_in)
    pages = tables[table_rows.long(), positions.long() // page].long()
    slots = positions.long() % page
    assert (
        relative_error(k_cache.cpu()[pages, :, slots], rope_reference(k_in, positions, cos_sin))
        < 5e-3
    )
    assert torch.equal(v_cache.cpu()[pages, :, slots].double(), v_in)
    assert int((~torch.isnan(k_cache)).sum()) == tokens * kv_heads * dim


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("keep_k", [False, True])
def test_a_quantised_cache_gets_the_same_bits_as_from_torch(
    heads: int, kv_heads: int, dim: int, keep_k: bool
) -> None:
    page, tokens = 64, 130
    shape = AttentionShape(heads, kv_heads, dim, page, 1)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    qkv *= torch.logspace(-12, 12, tokens, device="cuda")[:, None].to(torch.bfloat16)
    qkv[5, heads * dim + 7] = float("nan")
    qkv[9, -3] = float("inf")
    positions = torch.randperm(500)[:tokens].to(torch.int32).cuda()
    table_rows = (torch.arange(tokens, dtype=torch.int32) % 3).cuda()
    tables = torch.randperm(30).view(3, 10).to(torch.int32).cuda()
    cos_sin = torch.rand(512, dim, device="cuda")
    plain = torch.full((2, 30, kv_heads, page, dim), 7.0, dtype=torch.bfloat16, device="cuda")
    codes, exponents = quantise(plain)
    views = [KVView(*plain, tables, positions), KVView(*codes, tables, positions, *exponents)]
    (q, new), (same_q, kept) = (
        rope_and_store(qkv.clone(), view, table_rows, cos_sin, shape, keep_k=keep_k)
        for view in views
    )
    assert torch.equal(q.nan_to_num(), same_q.nan_to_num())
    expected = quantise(plain)
    assert torch.equal(exponents, expected[1])
    finite = exponents < 255
    assert int((~finite).sum()) == 2
    assert torch.equal(codes[finite], expected[0][finite])
    if keep_k:
        for ours, theirs in zip((new.k, new.v), (kept.k, kept.v), strict=True):
            expected_numbers = dequantise(*quantise(ours), torch.bfloat16)
            assert torch.equal(theirs.nan_to_num(), expected_numbers.nan_to_num())


@pytest.mark.parametrize("size", [1536, 3072, 14336])
@pytest.mark.parametrize("tokens", [1, 64])
def test_silu_mul(size: int, tokens: int) -> None:
    torch.manual_seed(size)
    gate_up = normal(tokens, 2 * size)
    out = torch.full((tokens, size), float("nan"), dtype=torch.bfloat16, device="cuda")
    silu_mul(gate_up, out)
    gate, up = gate_up.cpu().double().split(size, dim=1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < 5e-3


def fewest_equal_rows(num_weights: int, num_rows: int) -> int:
    """The smallest number of rows for which a product has the same order of summation as for
    `num_rows`."""
    if num_weights < 1 << 20:  # Here, one and two rows have the same order.
        return 1 if num_rows <= 2 else 3
    return min(num_rows, 2)


@pytest.mark.parametrize(("num_out", "size"), [(576, 576), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 31, 33, FEW_ROWS])
def test_few_rows_linear(num_out: int, size: int, silu: bool, num_rows: int) -> None:
    torch.manual_seed(size)
    x, weight = normal(num_rows, size), normal(2 * num_out if silu else num_out, size)
    out = torch.full((num_rows, num_out), float("nan"), dtype=torch.bfloat16, device="cuda")
    few_rows_linear(x, weight, out, silu=silu)
    expected = (x.double() @ weight.double().T).cpu()
    if silu:
        gate, up = expected.split(num_out, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    assert relative_error(out, expected) < 1e-2
    again = few_rows_linear(x, weight, torch.full_like(out, float("nan")), silu=silu)
    assert torch.equal(again, out)
    few = fewest_equal_rows(num_out * size, num_rows)
    if few < num_rows:  # A row's result does not depend on the other rows.
        fewer = few_rows_linear(x[:few], weight, torch.empty_like(out[:few]), silu=silu)
        assert torch.equal(fewer, out[:few])


@pytest.mark.parametrize(("inner", "size"), [(576, 576), (4096, 4096), (13824, 5120)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 31, 33, FEW_ROWS])
def test_products_that_add_and_norm(inner: int, size: int, num_rows: int) -> None:
    """The first product adds its output to the residual stream. The second product reads the
    normalized sum. Both run 20 times in a row, so that each kernel starts before the previous one
    ends."""
    torch.manual_seed(inner)
    x, weight, residual = normal(num_rows, inner), normal(size, inner), normal(num_rows, size)
    gain, second = normal(size), normal(5120, size)
    weight *= inner**-0.5
    second *= size**-0.5
    out = torch.full((num_rows, 5120), float("nan"), dtype=torch.bfloat16, device="cuda")

    def run(rows: int) -> tuple[torch.Tensor, UndividedRows]:
        total = residual[:rows].clone()
        return total, few_rows_add_and_norm(x[:rows], weight, total, gain, 1e-5)

    total, normed = run(num_rows)
    expected = (residual.double() + x.double() @ weight.double().T).cpu()
    assert relative_error(total, expected) < 5e-3
    few_rows_linear(normed, second, out)
    expected = rms_norm_reference(total.cpu(), gain.cpu(), 1e-5) @ second.double().T.cpu()
    assert relative_error(out, expected) < 5e-3
    for rows in (fewest_equal_rows(inner * size, num_rows), num_rows):
        for _ in range(20):
            again = few_rows_linear(run(rows)[1], second, torch.full_like(out[:rows], float("nan")))
        assert torch.equal(again, out[:rows])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"), [(32, 8, 128, 4096), (9, 3, 64, 576), (40, 40, 128, 5120)]
)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 16, 32, FEW_ROWS])
def test_few_rows_qkv(heads: int, kv_heads: int, dim: int, size: int, num_rows: int) -> None:
    """The kernel gives the result of the product, the rotation and the write in sequence."""
    torch.manual_seed(heads)
    shape = AttentionShape(heads, kv_heads, dim, 64)
    num_out = (heads + 2 * kv_heads) * dim
    x, weight = normal(num_rows, size), normal(num_out, size) * size**-0.5
    squares = torch.rand(num_rows, 80, device="cuda") * size / 40
    read = UndividedRows(x, squares, 1e-5)
    positions = torch.randint(500, (num_rows,), dtype=torch.int32, device="cuda")
    table_rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    tables = torch.randperm(10 * num_rows, device="cuda").view(num_rows, 10).to(torch.int32)
    angles = torch.outer(torch.arange(512.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()
    pool = (10 * num_rows, kv_heads, 64, dim)
    nan = float("nan")
    ours, theirs = (
        KVView(
            *(torch.full(pool, nan, dtype=x.dtype, device="cuda") for _ in "kv"), tables, positions
        )
        for _ in range(2)
    )
    qkv = few_rows_linear(read, weight, x.new_empty(num_rows, num_out))
    expected, _ = rope_and_store(qkv, theirs, table_rows, cos_sin, shape)
    for _ in range(2):
        q = few_rows_qkv(read, weight, ours, table_rows, cos_sin, shape)
        assert relative_error(q, expected.cpu().double()) < 1e-3
        assert torch.equal(ours.k.isnan(), theirs.k.isnan())
        assert relative_error(ours.k.nan_to_num(), theirs.k.nan_to_num().cpu().double()) < 1e-3
        assert torch.equal(ours.v.nan_to_num(7.0), theirs.v.nan_to_num(7.0))
