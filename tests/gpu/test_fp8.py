"""Products with weights in e4m3 on the device, against float32 products of the same numbers."""

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F

from parrot.engine.kernels.linear.products import coded_rows, few_rows_linear
from parrot.engine.kernels.linear.tiles import FEW_E4M3_ROWS, FEW_ROWS
from parrot.engine.kernels.row_codes import CodedRows
from parrot.engine.models.fp8 import Fp8Matrix, fp8_product, row_codes
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.fused_weights import rows_of
from parrot.engine.models.layers import RMSNorm
from tests.support.e4m3_cases import product, random_matrix

pytestmark = pytest.mark.gpu
ROUNDING = 2**-8  # The rounding error of bfloat16.


def blocks(outputs: int, inputs: int) -> Fp8Matrix:
    """Random weights with a scale for each block of 128 x 128."""
    factors = torch.rand(outputs // 128, inputs // 128, device="cuda") + 0.5
    return Fp8Matrix(random_matrix(outputs, inputs).codes, factors * inputs**-0.5 / 100)


def error_of(expected: torch.Tensor, inputs: int) -> torch.Tensor:
    """The largest error of a product."""
    # Hopper sums products of e4m3 with 14 bits, so the error grows with the number of inputs.
    largest = expected.abs().amax(1, keepdim=True)
    return ROUNDING * expected.abs() + 2**-20 * (inputs + 4096) * largest


def assert_within(found: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    ratio = (found.double() - expected).abs() / error
    assert bool((ratio <= 1).all()), ratio.max()


def assert_close(found: torch.Tensor, expected: torch.Tensor, inputs: int) -> None:
    assert_within(found, expected, error_of(expected, inputs))


@pytest.mark.parametrize("make", [random_matrix, blocks])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1024, 2048)])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64, 65, 128, 129, 300])
def test_products(
    outputs: int, inputs: int, rows: int, make: Callable[[int, int], Fp8Matrix]
) -> None:
    weight = make(outputs, inputs)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    expected = product(x, weight)
    assert_close(fp8_product(*row_codes(x), weight, None, x.dtype), expected, inputs)
    if rows <= (FEW_ROWS if make is blocks else FEW_E4M3_ROWS):
        out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=x.dtype)
        read = coded_rows(x, weight.codes, weight.scales)
        few_rows_linear(read, weight.codes, out, scales=weight.scales)
        assert_close(out, expected, inputs)


@pytest.mark.parametrize("make", [random_matrix, blocks])
@pytest.mark.parametrize("rows", [1, 4, 20, 64, 100, 300])
def test_a_layer_of_products(rows: int, make: Callable[[int, int], Fp8Matrix]) -> None:
    hidden, inner = 4096, 14336
    gate_up, down = make(2 * inner, hidden), make(hidden, inner)
    x, residual = torch.randn(2, rows, hidden, device="cuda").bfloat16()
    gain, before = torch.rand(hidden, device="cuda").bfloat16() + 0.5, residual.double()
    middle = Fp8Weight.of(gate_up, None).gated(x, for_e4m3=True)
    norm = RMSNorm(gain, 1e-5)
    Fp8Weight.of(down, None).add_and_norm(middle, residual, norm, for_e4m3=True)
    gate, up = product(x, gate_up).split(inner, dim=1)
    expected = F.silu(gate) * up
    if isinstance(middle, CodedRows):
        numbers = middle.codes.double() * middle.powers.double()
        largest = expected.abs().amax(1, keepdim=True)
        assert bool(((numbers - expected).abs() <= expected.abs() / 12 + largest / 64).all())
        assert_close(residual, before + numbers @ down.numbers().double().T, inner)
        return
    out = rows_of(middle)
    # The slope of silu is at most 1.1.
    error = 1.1 * up.abs() * error_of(gate, hidden) + F.silu(gate).abs() * error_of(up, hidden)
    assert_within(out, expected, error + ROUNDING * expected.abs())
    assert_close(residual, before + product(out, down), inner)


def test_codes_of_rows_equal_those_of_a_cpu() -> None:
    x = torch.randn(64, 3000) * torch.exp2(torch.randint(-30, 30, (64, 3000)).float())
    codes, powers = row_codes(x.bfloat16().cuda())
    expected, expected_powers = row_codes(x.bfloat16())
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(powers.cpu(), expected_powers)
