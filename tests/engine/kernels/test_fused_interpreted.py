"""The fused kernels in Triton's interpreter, against plain float64."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.attention.quantised import dequantise, quantise
from parrot.engine.kernels import fused_kernels
from parrot.engine.kernels.attention_shape import AttentionShape, HeadNorm
from parrot.engine.kernels.fused import (
    add_parts,
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
    num_splits,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS, Product
from parrot.engine.kernels.row_codes import Factors
from tests.support.kernel_cases import relative_error, rms_norm_reference, rope_reference
from tests.support.rotation import Rotation

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or "Interpreted" not in type(fused_kernels.silu_mul_kernel).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)


def factors_for(num_rows: int, num_out: int, generator: torch.Generator) -> Factors:
    powers = torch.exp2(torch.randint(-9, 9, (num_rows, 1), generator=generator).float())
    return Factors(powers, torch.rand(num_out, generator=generator) + 0.5)


@pytest.mark.parametrize("kernel", ["add_rms_norm", "silu_mul", "rope_and_store"])
def test_factors_are_applied_first(kernel: str) -> None:
    """A kernel after a product without its factors gives the same bits as after a whole product."""
    generator = torch.Generator().manual_seed(3)
    shape = AttentionShape(5, 1, 32, 16)
    num_rows, num_out = 5, 7 * 32 if kernel == "rope_and_store" else 200
    factors = factors_for(num_rows, num_out, generator)
    product = torch.randn(num_rows, num_out, generator=generator)
    whole = product * (factors.powers * factors.scales)
    residual = torch.randn(num_rows, num_out, generator=generator)
    gain = torch.rand(num_out, generator=generator)
    results = []
    for x, given in ((product, factors), (whole, None)):
        if kernel == "add_rms_norm":
            total, out = residual.clone(), torch.full_like(residual, float("nan"))
            add_rms_norm(x, total, gain, 1e-5, out, factors=given)
            results.append([total, out])
        elif kernel == "silu_mul":
            out = torch.full((num_rows, num_out // 2), float("nan"))
            results.append([silu_mul(x, out, factors=given)])
        else:
            rotation = Rotation(shape, num_rows, torch.Generator().manual_seed(4))
            q, _ = rope_and_store(x.clone(), *rotation.where, factors=given)
            kv = rotation.where[0]
            results.append([q, kv.k.nan_to_num(), kv.v.nan_to_num()])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


FEW_ROWS_SHAPES = [(8, 64), (21, 1500), (16, 2048)]  # Each pair is (outputs, inputs).


@pytest.mark.parametrize("size", [64, 576, 1000])
@pytest.mark.parametrize("add", [True, False])
def test_add_rms_norm(size: int, add: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    wide, residual, weight = (
        torch.randn(n, generator=generator) for n in ((5, size + 8), (5, size), (size,))
    )
    x = wide[:, :size]
    total = x + residual if add else x.clone()
    out = torch.full((5, size), float("nan"))
    if not add:
        residual.fill_(float("nan"))
    assert add_rms_norm(x, residual, weight, 1e-5, out, add=add) is out
    assert torch.equal(residual, total)
    assert relative_error(out, rms_norm_reference(total, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("size", [64, 512, 1500])
@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_add_parts(num_parts: int, size: int) -> None:
    parts, residual = torch.randn(num_parts, 3, size), torch.randn(3, size)
    weight = torch.randn(size)
    total = parts.double().sum(0) + residual.double()
    rows, squares = add_parts(parts, residual, weight)
    assert relative_error(residual, total) < 1e-6
    divided = rows.double() * (squares.double().sum(1, keepdim=True) / size + 1e-5).rsqrt()
    assert relative_error(divided, rms_norm_reference(total, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("keep_k", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_rope_of_parts(num_parts: int, quantised: bool, keep_k: bool) -> None:
    page, heads, kv_heads, dim = 16, 3, 1, 64
    shape = AttentionShape(heads, kv_heads, dim, page)
    parts = torch.randn(num_parts, 5, (heads + 2 * kv_heads) * dim)
    positions = torch.tensor([0, 15, 16, 40, 3], dtype=torch.int32)
    table_rows = torch.tensor([0, 0, 1, 1, -1], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 0, 0], [2, 5, 3, 0]], dtype=torch.int32)
    cos_sin = torch.rand(64, dim)
    found = []
    for qkv in (parts, parts.sum(0)):
        pages = torch.full((2, 7, kv_heads, page, dim), 7.0)
        caches = quantise(pages) if quantised else (pages,)
        (k, v), exponents = caches[0], [each for cache in caches[1:] for each in cache]
        kv = KVView(k, v, tables, positions, *exponents)
        given = {"dtype": torch.float32} if qkv.dim() == 3 else {}
        q, new = rope_and_store(qkv, kv, table_rows, cos_sin, shape, keep_k=keep_k, **given)
        found.append([q[:4], k, v, *exponents, *((new.k[:4], new.v[:4]) if keep_k else ())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 64), (8, 8, 32)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("keep_k", [False, True])
def test_rope_and_store(heads: int, kv_heads: int, dim: int, with_norm: bool, keep_k: bool) -> None:
    page, tokens = 16, 5
    shape = AttentionShape(heads, kv_heads, dim, page)
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator)
    positions = torch.tensor([0, 15, 16, 40, 3], dtype=torch.int32)
    table_rows = torch.tensor([0, 0, 1, 1, -1], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 0, 0], [2, 5, 3, 0]], dtype=torch.int32)
    angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    k_cache, v_cache = (torch.full((7, kv_heads, page, dim), float("nan")) for _ in range(2))
    weights = [torch.randn(dim, generator=generator) for _ in range(2)]
    norm = HeadNorm(weights[0], weights[1], 1e-6) if with_norm else None
    before = qkv.clone()
    kv = KVView(k_cache, v_cache, tables, positions)
    q, new = rope_and_store(qkv, kv, table_rows, cos_sin, shape, norm, keep_k=keep_k)

    parts = before.view(tokens, -1, dim).double()
    q_in, k_in, v_in = parts.split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q_in = rms_norm_reference(q_in, norm.q_weight, norm.eps)
        k_in = rms_norm_reference(k_in, norm.k_weight, norm.eps)
    live = slice(0, 4)
    expected_q, expected_k = (
        rope_reference(t[live], positions[live], cos_sin) for t in (q_in, k_in)
    )
    assert relative_error(q[live], expected_q) < 1e-6
    assert torch.equal(qkv[4], before[4])  # Token 4 is skipped.
    assert torch.equal(new.v, v_in.float())
    if keep_k:
        assert relative_error(new.k[live], expected_k) < 1e-6
    else:
        assert torch.equal(new.k, before.view(tokens, -1, dim)[:, heads : heads + kv_heads])
    for token in range(4):
        position = int(positions[token])
        place = int(tables[table_rows[token], position // page]), position % page
        assert relative_error(k_cache[place[0], :, place[1]], expected_k[token]) < 1e-6
        assert torch.equal(v_cache[place[0], :, place[1]], v_in[token].float())
    written = ~torch.isnan(k_cache)
    assert int(written.sum()) == 4 * kv_heads * dim
    assert torch.equal(written, ~torch.isnan(v_cache))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (8, 8, 32)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("keep_k", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_a_quantised_cache_gets_the_same_bits_as_from_torch(
    heads: int, kv_heads: int, dim: int, with_norm: bool, keep_k: bool
) -> None:
    page, tokens = 16, 6
    shape = AttentionShape(heads, kv_heads, dim, page, 1)
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator)
    qkv *= torch.logspace(-12, 12, tokens)[:, None, None]  # Each token has a different scale.
    qkv[3, -1] = 0.0
    qkv[5, heads, 7] = float("nan")
    qkv[5, -1, 3] = float("inf")
    positions = torch.tensor([0, 15, 16, 40, 3, 41], dtype=torch.int32)
    table_rows = torch.tensor([0, 0, 1, 1, -1, 1], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 0, 0], [2, 5, 3, 0]], dtype=torch.int32)
    cos_sin = torch.rand(64, dim, generator=generator)
    norm = HeadNorm(*torch.randn(2, dim, generator=generator), 1e-6) if with_norm else None
    plain = torch.full((2, 7, kv_heads, page, dim), 7.0)
    codes, exponents = quantise(plain)
    views = [
        KVView(*plain, tables, positions),
        KVView(*codes, tables, positions, *exponents),
    ]
    (q, new), (same_q, kept) = (
        rope_and_store(
            qkv.flatten(1).clone(), view, table_rows, cos_sin, shape, norm, keep_k=keep_k
        )
        for view in views
    )
    assert torch.equal(q.nan_to_num(), same_q.nan_to_num())
    expected = quantise(plain)
    assert torch.equal(exponents, expected[1])
    finite = exponents < 255
    assert torch.equal(codes[finite], expected[0][finite])
    assert int((~finite).sum()) == 2
    assert not dequantise(codes, exponents, torch.float32)[~finite].isfinite().all(-1).any()
    if keep_k:
        for ours, theirs in zip((new.k, new.v), (kept.k, kept.v), strict=True):
            rows = [0, 1, 2, 3]
            assert torch.equal(theirs[rows], dequantise(*quantise(ours[rows]), torch.float32))


@pytest.mark.parametrize("size", [64, 1500])
@pytest.mark.parametrize("gelu", [False, True])
def test_silu_mul(size: int, gelu: bool) -> None:
    gate_up = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(0)) * 4
    out = torch.full((3, size), float("nan"))
    assert silu_mul(gate_up, out, gelu=gelu) is out
    gate, up = gate_up.double().split(size, dim=1)
    gelu_tanh = torch.nn.functional.gelu(gate, approximate="tanh")
    assert relative_error(out, (gelu_tanh if gelu else torch.nn.functional.silu(gate)) * up) < 1e-6


@pytest.mark.parametrize(
    ("num_rows", "num_out", "size", "silu", "with_bias"),
    [
        *((rows, *FEW_ROWS_SHAPES[0], rows % 2 == 1, True) for rows in (1, 2, 17, 33, FEW_ROWS)),
        *((rows, *FEW_ROWS_SHAPES[1], rows % 2 == 0, False) for rows in (1, 2, 17, 33, FEW_ROWS)),
        *((rows, *FEW_ROWS_SHAPES[2], rows > 16, rows % 2 == 1) for rows in (1, 17, FEW_ROWS)),
        (2, 4100, 140, False, True),  # Wide tiles.
        (17, 4100, 40, True, False),
        (FEW_ROWS, 4100, 40, False, False),
        (FEW_ROWS, 4100, 40, True, True),
    ],
)
def test_few_rows_linear(
    num_rows: int, num_out: int, size: int, silu: bool, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    outputs = 2 * num_out if silu else num_out
    x, weight, bias = (
        torch.randn(n, generator=generator) for n in ((num_rows, size), (outputs, size), (outputs,))
    )
    weight *= size**-0.5
    out = torch.full((num_rows, num_out), float("nan"))
    bias_or_none = bias if with_bias else None
    assert few_rows_linear(x, weight, out, bias=bias_or_none, silu=silu) is out
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    if silu:
        gate, up = expected.split(num_out, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_parts_of_a_product_sum_up_to_the_product(num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 4096), torch.randn(64, 4096)
    parts = torch.full((2, num_rows, 64), float("nan"))
    few_rows_linear(x, weight, parts)
    torch.testing.assert_close(parts[0], x[:, :2048] @ weight[:, :2048].T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(parts.sum(0), x @ weight.T, atol=1e-3, rtol=1e-4)


def test_products_of_few_programs_are_split() -> None:
    def splits(num_rows: int, num_out: int, size: int) -> int:
        x = torch.empty((num_rows, size), device="meta", dtype=torch.bfloat16)
        return num_splits(len(x), torch.empty((num_out, size), device="meta", dtype=torch.bfloat16))

    assert splits(8, 4096, 7168) == 2
    assert splits(8, 8192, 7168) == 1, "there are enough programs"
    assert splits(8, 4096, 7168 + 128) == 1, "the parts would differ in size"
    assert splits(1, 4096, 7168) == 1, "programs have whole rows of weights"


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "is_row"),
    [
        (1, 14336, 4096, True),
        (1, 64, 16384, True),
        (1, 64, 16385, False),
        (2, 1024, 4096, True),
        (2, 2048, 4096, False),  # Here the matrix unit is faster.
        (2, 64, 4096, True),
        (2, 64, 4097, False),  # The weights would not fit the registers.
        (3, 64, 64, False),
    ],
)
def test_few_and_short_rows_do_not_use_the_matrix_unit(
    rows: int, outputs: int, inputs: int, is_row: bool
) -> None:
    assert Product(rows, outputs, inputs, torch.bfloat16).is_row is is_row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("silu", [False, True])
def test_tiles_fit_a_multiprocessor(dtype: torch.dtype, silu: bool) -> None:
    for num_rows in (1, 16, 17, 32, 33, FEW_ROWS):
        for num_out in (64, 1024, 4095, 4096, 5120, 6144, 8193, 150_000):
            tile = Product(num_rows, num_out, 8192, dtype, silu).matrix_tile()
            heights = tile["BM"] + tile["BN"] * (2 if silu else 1)
            moved = heights * tile["BK"] * dtype.itemsize * tile["STAGES"]
            assert moved <= 227 * 1024, (num_rows, num_out, tile)


@pytest.mark.parametrize(
    ("num_rows", "inner", "size", "silu", "with_bias"),
    [
        (1, 64, 40, False, True),
        (2, 100, 576, True, False),
        (2, 100, 576, False, True),
        (17, 64, 200, True, True),
        (FEW_ROWS, 2048, 64, False, False),
        (3, 40, 4100, True, True),
    ],
)
def test_products_that_add_and_norm(
    num_rows: int, inner: int, size: int, silu: bool, with_bias: bool
) -> None:
    """The first product adds its output to the residual stream. The second product reads the
    normalized sum."""
    generator = torch.Generator().manual_seed(size)
    sizes = ((num_rows, inner), (size, inner), (num_rows, size), (size,), (size,))
    x, weight, residual, gain, bias = (torch.randn(n, generator=generator) for n in sizes)
    bias_or_none = bias if with_bias else None
    expected = residual.double() + x.double() @ weight.double().T
    if with_bias:
        expected += bias.double()
    normed = few_rows_add_and_norm(x, weight, residual, gain, 1e-5, bias=bias_or_none)
    assert relative_error(residual, expected) < 1e-5

    second = torch.randn(42, size, generator=generator) * size**-0.5
    out = torch.full((num_rows, 21 if silu else 42), float("nan"))
    few_rows_linear(normed, second, out, silu=silu)
    expected = rms_norm_reference(expected, gain, 1e-5) @ second.double().T
    if silu:
        gate, up = expected.split(21, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "num_rows", "undivided"),
    [
        *((3, 1, 64, rows, rows % 2 == 0) for rows in (1, 2, 5, 20, 50)),
        *((2, 2, 16, rows, rows % 2 == 1) for rows in (1, 5, 20, 50)),
        (30, 2, 128, 20, True),  # Wide tiles.
        (30, 2, 128, 50, False),
    ],
)
def test_few_rows_qkv(heads: int, kv_heads: int, dim: int, num_rows: int, undivided: bool) -> None:
    """The kernel gives the result of the product, the rotation and the write in sequence."""
    page, size = 16, 40
    shape = AttentionShape(heads, kv_heads, dim, page)
    generator = torch.Generator().manual_seed(heads)
    num_out = (heads + 2 * kv_heads) * dim
    sizes = ((num_rows, size), (num_out, size), (num_out,))
    x, weight, bias = (torch.randn(n, generator=generator) for n in sizes)
    squares = torch.rand(num_rows, 3, generator=generator) + 0.1
    positions = torch.randint(40, (num_rows,), generator=generator).to(torch.int32)
    table_rows = (torch.arange(num_rows) % 4).to(torch.int32)
    table_rows[-1] = -1 if num_rows > 1 else 2  # Padding.
    tables = torch.randperm(12, generator=generator).view(4, 3).to(torch.int32)
    angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    read = UndividedRows(x, squares, 1e-5) if undivided else x

    caches = [torch.full((13, kv_heads, page, dim), float("nan")) for _ in range(4)]
    kv = KVView(caches[0], caches[1], tables, positions)
    q = few_rows_qkv(read, weight, kv, table_rows, cos_sin, shape, bias=bias)
    qkv = few_rows_linear(read, weight, torch.empty(num_rows, num_out), bias=bias)
    kv = KVView(caches[2], caches[3], tables, positions)
    expected, _ = rope_and_store(qkv, kv, table_rows, cos_sin, shape)
    live = table_rows >= 0
    assert relative_error(q[live], expected[live].double()) < 1e-6
    for ours, theirs in ((caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert int((~ours.isnan()).sum()) > 0
        assert relative_error(ours.nan_to_num(), theirs.nan_to_num().double()) < 1e-6
