"""Products with weights in e4m3, in Triton's interpreter, against float64 products of the same
numbers."""

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F

from parrot.engine.kernels import fused_kernels
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import silu_mul
from parrot.engine.kernels.linear.products import (
    Rows,
    UndividedRows,
    coded_rows,
    few_rows_linear,
    few_rows_qkv,
)
from parrot.engine.kernels.linear.tiles import FEW_E4M3_ROWS, FEW_ROWS, Product
from parrot.engine.kernels.row_codes import CodedRows, Factors
from parrot.engine.kernels.row_codes import row_codes as row_codes_on_device
from parrot.engine.models.fp8 import Fp8Matrix, fp8_product, row_codes
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.fused_weights import Weight, rows_of
from parrot.engine.models.layers import RMSNorm
from tests.support.kernel_cases import relative_error, rms_norm_reference
from tests.support.rotation import Rotation

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or "Interpreted" not in type(fused_kernels.silu_mul_kernel).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 with a power of two per row, in float64."""
    codes, powers = row_codes(x)
    return codes.double() * powers.double()


def matrix(outputs: int, inputs: int, generator: torch.Generator) -> Fp8Matrix:
    """Random weights whose scales are not powers of two."""
    found = Fp8Matrix.of(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
    return Fp8Matrix(found.codes, found.scales * (torch.rand(outputs, generator=generator) + 0.5))


def blocks(outputs: int, inputs: int, generator: torch.Generator) -> Fp8Matrix:
    """Random weights with a scale for each block of 128 x 128."""
    found = matrix(outputs, inputs, generator)
    factors = torch.rand(outputs // 128, inputs // 128, generator=generator) + 0.5
    return Fp8Matrix(found.codes, factors * inputs**-0.5 / 100)


def test_rows_are_rounded_to_the_same_bits_as_in_torch() -> None:
    x = torch.randn(40, 300) * torch.exp2(torch.randint(-40, 40, (40, 300)).float())
    x[3] = 0
    x[4, :] = x[4].clamp(-1e-30, 1e-30)
    found = row_codes_on_device(x)
    expected, expected_powers = row_codes(x)
    assert torch.equal(found.codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(found.powers, expected_powers)


@pytest.mark.parametrize(
    ("num_rows", "num_out", "size", "silu", "with_bias"),
    [
        *((rows, 8, 64, rows % 2 == 1, True) for rows in (1, 2, 17, 33, FEW_ROWS)),
        *((rows, 21, 1500, rows % 2 == 0, False) for rows in (1, 2, 17, FEW_ROWS)),
        (17, 4100, 40, False, True),  # Wide tiles.
        (FEW_ROWS, 4100, 40, False, False),
        *((FEW_E4M3_ROWS, 21, 300, silu, silu) for silu in (False, True)),
        (3, 4100, 300, True, True),
    ],
)
def test_products(num_rows: int, num_out: int, size: int, silu: bool, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    weight = matrix(2 * num_out if silu else num_out, size, generator)
    x = torch.randn(num_rows, size, generator=generator)
    bias = torch.randn(len(weight.codes), generator=generator) if with_bias else None
    out = torch.full((num_rows, num_out), float("nan"))
    read = coded_rows(x, weight.codes, weight.scales, silu=silu)
    few_rows_linear(read, weight.codes, out, bias=bias, scales=weight.scales, silu=silu)
    whole = numbers_of(x) @ weight.numbers().double().T
    if bias is not None:
        whole += bias.double()
    expected = whole
    if silu:
        gate, up = whole.split(num_out, dim=1)
        expected = F.silu(gate) * up
    assert relative_error(out, expected) < 1e-5
    many = fp8_product(*row_codes(x), weight, bias, x.dtype)
    assert relative_error(many, whole) < 1e-5, "few and many rows compute the same function"


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("num_rows", "num_out"), [(1, 128), (3, 256), (17, 128), (FEW_ROWS, 256)])
def test_products_with_factors_of_blocks(num_rows: int, num_out: int, silu: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    size = 384
    weight = blocks(2 * num_out if silu else num_out, size, generator)
    x = torch.randn(num_rows, size, generator=generator)
    out = torch.full((num_rows, num_out), float("nan"))
    read = coded_rows(x, weight.codes, weight.scales, silu=silu)
    few_rows_linear(read, weight.codes, out, scales=weight.scales, silu=silu)
    whole = numbers_of(x) @ weight.numbers().double().T
    many = fp8_product(*row_codes(x), weight, None, x.dtype)
    assert relative_error(many, whole) < 1e-5, "few and many rows compute the same function"
    if silu:
        gate, up = whole.split(num_out, dim=1)
        whole = F.silu(gate) * up
    assert relative_error(out, whole) < 1e-5


@pytest.mark.parametrize("silu", [False, True])
def test_a_single_row_may_be_in_e4m3_already(silu: bool) -> None:
    """For such a row, the kernel does not round again. The output is the same as for a plain
    row."""
    generator = torch.Generator().manual_seed(2)
    weight, x = matrix(64, 96, generator), 1000 * torch.randn(1, 96, generator=generator)
    found, expected = torch.full((2, 1, 32 if silu else 64), float("nan"))
    for out, row in ((found, row_codes_on_device(x)), (expected, x)):
        few_rows_linear(row, weight.codes, out, scales=weight.scales, silu=silu)
    assert torch.equal(found, expected)


def test_rows_are_rounded_in_blocks_if_they_have_factors() -> None:
    """A program computes the blocks of a row one after the other. The last block is not full."""
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(3, 2 * 5000, generator=generator)
    both[1, 4321] = 1000.0
    factors = Factors(torch.tensor([[2.0], [0.5], [1.0]]), torch.rand(10_000, generator=generator))
    found, expected = CodedRows.empty(both, 5000), CodedRows.empty(both, 5000)
    silu_mul(both, found.codes, powers=found.powers, factors=factors)
    scaled = both * (factors.powers * factors.scales)
    silu_mul(scaled, expected.codes, powers=expected.powers)
    assert torch.equal(found.powers, expected.powers)
    assert torch.equal(found.codes.float(), expected.codes.float())


@pytest.mark.parametrize("num_rows", [1, 5])
def test_parts_of_a_product_use_the_powers_of_whole_rows(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = matrix(64, 4096, generator), torch.randn(num_rows, 4096, generator=generator)
    x[:, 3000] *= 100
    parts = torch.full((2, num_rows, 64), float("nan"))
    few_rows_linear(row_codes_on_device(x), weight.codes, parts, scales=weight.scales)
    expected = numbers_of(x)[:, :2048] @ weight.numbers().double()[:, :2048].T
    assert relative_error(parts[0], expected) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 2, 20, FEW_ROWS + 1, FEW_E4M3_ROWS + 1])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("make", [matrix, blocks])
def test_a_layer_of_products(num_rows: int, is_last: bool, make: Callable[..., Fp8Matrix]) -> None:
    """The kernels between products round the rows to e4m3."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden, inner = 128 if make is blocks else 96, 1024
    assert Product(20, hidden, inner, torch.float8_e4m3fn).num_splits == 2
    gate_up, down = make(2 * inner, hidden, generator), make(hidden, inner, generator)
    following = make(128, hidden, generator)
    x, residual = torch.randn(2, num_rows, hidden, generator=generator)
    gain, before = torch.rand(hidden, generator=generator) + 0.5, residual.double()

    middle = Fp8Weight.of(gate_up, None).gated(x, for_e4m3=True)
    norm = RMSNorm(gain, 1e-5)
    weight = Fp8Weight.of(down, None)
    normed = weight.add_and_norm(middle, residual, norm, for_e4m3=not is_last)
    is_row = num_rows == 1 and make is matrix
    assert isinstance(normed, UndividedRows) == is_row
    assert isinstance(normed, CodedRows) == (not is_last and not is_row)
    last = Fp8Weight.of(following, None)(normed)

    gate, up = (numbers_of(x) @ gate_up.numbers().double().T).split(inner, dim=1)
    hidden_rows = _numbers(middle)
    assert relative_error(hidden_rows, numbers_of((F.silu(gate) * up).float())) < 0.01
    total = before + hidden_rows @ down.numbers().double().T
    assert relative_error(residual, total) < 1e-5
    expected = rms_norm_reference(residual, gain, 1e-5)
    rounded = numbers_of(expected.float())
    assert relative_error(last, rounded @ following.numbers().double().T) < 0.01


@pytest.mark.parametrize("num_rows", [1, 20, FEW_ROWS + 1, FEW_E4M3_ROWS + 1])
@pytest.mark.parametrize("in_e4m3", [(False, True, True), (True, False, True), (True, True, False)])
def test_layers_with_weights_of_both_types(num_rows: int, in_e4m3: tuple[bool, bool, bool]) -> None:
    """Checkpoints in e4m3 may also have matrices of other types."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden, inner = 96, 200
    shapes = (2 * inner, hidden), (hidden, inner), (42, hidden)
    numbers = [matrix(*shape, generator).numbers() for shape in shapes]
    gate_up, down, following = (
        Fp8Weight.of(Fp8Matrix.of(one), None) if is_rounded else Weight(one, None)
        for one, is_rounded in zip(numbers, in_e4m3, strict=True)
    )
    x, residual = torch.randn(2, num_rows, hidden, generator=generator)
    gain, before = torch.rand(hidden, generator=generator) + 0.5, residual.double()
    middle = gate_up.gated(x, for_e4m3=down.reads_e4m3)
    norm = RMSNorm(gain, 1e-5)
    normed = down.add_and_norm(middle, residual, norm, for_e4m3=following.reads_e4m3)
    last = following(normed)

    gate, up = (x.double() @ numbers[0].double().T).split(inner, dim=1)
    total = before + (F.silu(gate) * up) @ numbers[1].double().T
    expected = rms_norm_reference(total.float(), gain, 1e-5) @ numbers[2].double().T
    error = (last - expected).norm() / expected.norm()
    assert float(error) < 0.08, "the error exceeds the rounding of weights and rows"


def _numbers(x: Rows) -> torch.Tensor:
    """The numbers that the next product reads, in float64."""
    if isinstance(x, CodedRows):
        return x.codes.double() * x.powers.double()
    return numbers_of(rows_of(x))


@pytest.mark.parametrize(
    ("num_rows", "undivided", "make"),
    [
        *((1, undivided, matrix) for undivided in (False, True)),
        *((rows, False, make) for rows in (1, 2, 5, 50) for make in (matrix, blocks)),
    ],
)
def test_qkv(num_rows: int, undivided: bool, make: Callable[..., Fp8Matrix]) -> None:
    heads, kv_heads, dim = 4, 1, 64
    size = 256 if make is blocks else 40
    shape = AttentionShape(heads, kv_heads, dim, 16)
    generator = torch.Generator().manual_seed(num_rows)
    weight = make((heads + 2 * kv_heads) * dim, size, generator)
    x = torch.randn(num_rows, size, generator=generator)
    squares = torch.rand(num_rows, 3, generator=generator) + 0.1
    read: Rows = x
    if undivided:
        read = UndividedRows(x, squares, 1e-5)
    elif num_rows > 1 or make is blocks:
        read = row_codes_on_device(x)
    rotation = Rotation(shape, num_rows, generator)
    q = few_rows_qkv(read, weight.codes, *rotation.where, scales=weight.scales)
    if undivided:
        x = x * (squares.sum(1, keepdim=True) / size + 1e-5).rsqrt()
    qkv = numbers_of(x) @ weight.numbers().double().T
    rotation.check(q, qkv)


@pytest.mark.parametrize("silu", [False, True])
def test_tiles_fit_a_multiprocessor(silu: bool) -> None:
    for num_rows in (1, 16, 17, 32, 33, FEW_ROWS, FEW_E4M3_ROWS):
        for num_out in (64, 1024, 4095, 4096, 5120, 6144, 8193, 150_000):
            product = Product(num_rows, num_out, 8192, torch.float8_e4m3fn, silu)
            tile = product.matrix_tile()
            row_bytes = tile["BN"] * (2 if silu else 1) + tile["BM"]
            moved = row_bytes * tile["BK"] * tile["STAGES"] + tile["BM"] * tile["BK"]
            assert moved <= 227 * 1024, (num_rows, num_out, tile)


def test_products_with_few_programs_are_split() -> None:
    def splits(num_rows: int, num_out: int, size: int) -> int:
        return Product(num_rows, num_out, size, torch.float8_e4m3fn).num_splits

    assert splits(8, 4096, 14336) == 2
    assert splits(8, 6208, 14336) == 1, "there are enough programs"
    assert splits(8, 4096, 4096 + 128) == 1, "the parts would differ in size"
    assert splits(1, 4096, 14336) == 1, "programs have whole rows of weights"
