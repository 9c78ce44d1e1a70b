"""Products of four-bit weights on warp groups, on the device."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.linear.products import UndividedRows
from parrot.engine.kernels.linear.warp_group_tiles import WarpGroupProduct
from parrot.engine.kernels.linear.warp_groups import warp_group_linear
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.words_linear import words_of
from parrot.engine.models.words_weights import WordsWeight
from tests.gpu.test_words import assert_close, matrix
from tests.support.kernel_cases import relative_error

pytestmark = pytest.mark.gpu
ROWS = [1, 7, 8, 17, 33, 64, 65, 200]


def words_and_numbers(whole: CodedMatrix) -> tuple[Words, torch.Tensor]:
    words = words_of(whole)
    assert words is not None
    return words, whole.numbers().double()


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


@pytest.mark.parametrize(("kind", "with_bias"), [(torch.float16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1008, 2176)])
@pytest.mark.parametrize("rows", ROWS)
def test_parts(rows: int, outputs: int, inputs: int, with_bias: bool, kind: torch.dtype) -> None:
    words, numbers = words_and_numbers(matrix(outputs, inputs, 128, kind))
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    bias = torch.randn(outputs, device="cuda").bfloat16() if with_bias else None
    expected = x.double() @ numbers.T
    if bias is not None:
        expected += bias.double()
    best = WarpGroupProduct(rows, outputs, words.num_blocks).num_splits
    for splits in {1, 3, best}:
        parts = warp_group_linear(x, words, nan(splits, rows, outputs), bias=bias)
        assert_close(parts.double().sum(0), expected, inputs)
    whole = warp_group_linear(x, words, nan(rows, outputs, dtype=x.dtype), bias=bias)
    assert_close(whole, expected, inputs)
    shifted = warp_group_linear(x, replace(words, shift=3), nan(rows, outputs))
    without_bias = expected if bias is None else expected - bias.double()
    assert_close(8 * shifted, without_bias, inputs)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(14336, 4096), (4864, 896), (504, 2176)])
@pytest.mark.parametrize("rows", ROWS)
def test_gated(rows: int, outputs: int, inputs: int, with_bias: bool) -> None:
    words, numbers = words_and_numbers(matrix(2 * outputs, inputs, 128))
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    bias = torch.randn(2 * outputs, device="cuda").bfloat16() if with_bias else None
    found = warp_group_linear(x, words, nan(rows, outputs, dtype=x.dtype), bias=bias, silu=True)
    both = x.double() @ numbers.T
    if bias is not None:
        both += bias.double()
    gate, up = both.split(outputs, dim=1)
    assert relative_error(found, (F.silu(gate) * up).cpu()) < 0.01


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_wider_rows(rows: int) -> None:
    """Rows with a stride, and rows after them that must not be read."""
    words, numbers = words_and_numbers(matrix(512, 1024, 128))
    wide = nan(rows + 70, 2048, dtype=torch.bfloat16)
    x = wide[:rows, :1024].normal_()
    out = nan(rows + 70, 512, dtype=torch.bfloat16)
    warp_group_linear(x, words, out[:rows])
    assert_close(out[:rows], x.double() @ numbers.T, 1024)
    assert bool(out[rows:].isnan().all())


@pytest.mark.parametrize("rows", [1, 5, 64, 100])
def test_a_product_has_parts(rows: int) -> None:
    words, numbers = words_and_numbers(matrix(6144, 4096, 128))
    weight = WordsWeight.of(words, torch.randn(words.outputs, device="cuda").bfloat16())
    assert weight.bias is not None
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    assert not weight.can_rotate(AttentionShape(32, 8, 128, 64), x)
    parts, factors = weight.unscaled(x)
    assert (parts.dim(), factors) == (3, None)
    assert_close(parts.double().sum(0), x.double() @ numbers.T + weight.bias.double(), 4096)


@pytest.mark.parametrize("num_parts", [1, 8, 128])
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_rows_before_the_division_of_their_norm(rows: int, num_parts: int) -> None:
    words, numbers = words_and_numbers(matrix(1024, 4096, 128))
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    squares = torch.rand(rows, num_parts, device="cuda") * 4096
    factor = (squares.double().sum(1, keepdim=True) / 4096 + 1e-5).rsqrt()
    undivided = UndividedRows(x, squares, 1e-5)
    parts = warp_group_linear(undivided, words, nan(2, rows, 1024))
    assert_close(parts.double().sum(0), x.double() * factor @ numbers.T, 4096)
