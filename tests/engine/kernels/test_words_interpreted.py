"""Products with coded weights in Triton's interpreter, against float64 products of their
numbers."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F

from parrot.engine.kernels import fused_kernels
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.linear import words_kernels
from parrot.engine.kernels.linear.products import Rows, UndividedRows
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.kernels.linear.words import (
    words_linear,
    words_numbers,
)
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.kernels.linear.words_tiles import WordsProduct
from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.fused_weights import Weight
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.packed import code_bytes
from parrot.engine.models.words_linear import matrix_of, words_of
from parrot.engine.models.words_weights import WordsWeight, words_product
from tests.support.assembly import computed, halves, pair_of
from tests.support.kernel_cases import relative_error, rms_norm_reference
from tests.support.rotation import Rotation

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or "Interpreted" not in type(fused_kernels.silu_mul_kernel).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)


def matrix(
    outputs: int,
    inputs: int,
    generator: torch.Generator,
    *,
    group: int = 32,
    kind: torch.dtype = torch.float16,
) -> CodedMatrix:
    shape = outputs, inputs // group
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(shape, generator=generator) + 0.5) * inputs**-0.5
    zeros = torch.randint(17, shape, generator=generator)
    return CodedMatrix.with_zeros(codes, scales.to(kind), zeros)


def other_matrix(
    bits: int,
    outputs: int,
    inputs: int,
    generator: torch.Generator,
    *,
    group: int = 32,
    has_least: bool = True,
) -> CodedMatrix:
    """A matrix of 4-bit or signed 8-bit codes, with any offsets or none."""
    limits = (0, 16) if bits == 4 else (-128, 128)
    kind = torch.uint8 if bits == 4 else torch.int8
    codes = torch.randint(*limits, (outputs, inputs), generator=generator).to(kind)
    shape = outputs, inputs // group
    scales = (torch.rand(shape, generator=generator) + 0.5) * inputs**-0.5 / 2**bits
    least = torch.randn(shape, generator=generator) * inputs**-0.5
    least = least.half().float() if has_least else torch.zeros(shape)
    return CodedMatrix(codes, scales.half().float(), least)


# Each tuple is (bits, group size, has offsets). In order: Q8_0, Q6_K, Q4_1, and a product of Q6_K
# and Q4_K.
OTHERS = [(8, 32, False), (8, 16, False), (4, 32, True), (8, 16, True)]


@pytest.mark.parametrize(
    ("bits", "group", "has_least", "inputs"),
    [
        *((bits, group, has_least, 96) for bits, group, has_least in OTHERS),
        (8, 64, True, 192),
        (8, 128, False, 256),
        (4, 128, True, 384),
        (4, 16, True, 80),
    ],
)
def test_the_layout_is_exact_for_other_codes(
    bits: int, group: int, has_least: bool, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(group)
    whole = other_matrix(bits, 70, inputs, generator, group=group, has_least=has_least)
    words = words_of(whole)
    assert words is not None
    assert words.has_least == has_least
    assert torch.equal(matrix_of(words).numbers(), whole.numbers())
    assert torch.equal(words_numbers(words, torch.float32), whole.numbers())
    padded = -(-inputs // words.block) * words.block
    assert words.num_bytes == 70 * padded * code_bytes(CodeFormat(bits, group))


@pytest.mark.parametrize("has_least", [False, True])
@pytest.mark.parametrize(("bits", "unit"), [(4, 1.0003), (8, 1.0003), (8, 1.0003 * 2**-10)])
def test_scales_that_need_more_than_16_bits_are_rounded(
    bits: int, unit: float, has_least: bool
) -> None:
    """The last case has small scales, which would be subnormal numbers in float16."""
    generator = torch.Generator().manual_seed(bits)
    whole = other_matrix(bits, 40, 64, generator, has_least=has_least)
    whole = CodedMatrix(whole.codes, whole.scales * unit, whole.least * unit)
    words = words_of(whole)
    assert words is not None
    assert words.shift == 10
    numbers = whole.numbers()
    most = whole.scales.abs() * (15 if bits == 4 else 128) + whole.least.abs()
    error = (words_numbers(words, torch.float32) - numbers).abs()
    assert float(error.max()) > 0
    assert bool((error <= 2**-11 * most.repeat_interleave(32, 1)).all())
    assert torch.equal(matrix_of(words).numbers(), words_numbers(words, torch.float32))
    x = torch.randn(3, 64, generator=generator)
    out = words_linear(x, words, torch.full((3, 40), float("nan")))
    assert relative_error(out, x.double() @ matrix_of(words).numbers().double().T) < 1e-5


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "inputs"), [(32, 96), (32, 128), (64, 192), (128, 256), (256, 512), (384, 384)]
)
def test_the_layout_is_exact(group: int, inputs: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(group)
    whole = matrix(70, inputs, generator, group=group, kind=kind)
    whole.scales[3] = whole.least[3] = 0
    words = words_of(whole)
    assert words is not None
    assert torch.equal(matrix_of(words).numbers(), whole.numbers())
    assert torch.equal(words_numbers(words, torch.float32), whole.numbers())
    assert words.num_bytes <= 70 * (-(-inputs // 128) * 128) * (0.5 + 4 / min(group, 128))


def test_matrices_that_the_layout_does_not_support() -> None:
    whole = matrix(8, 128, torch.Generator().manual_seed(0))
    for factor in (1e-12, 1e9, float("nan")):
        scales, least = whole.scales * factor, whole.least * factor
        assert words_of(CodedMatrix(whole.codes, scales, least)) is None, factor
    assert words_of(matrix(8, 48, torch.Generator().manual_seed(0), group=24)) is None


@pytest.mark.parametrize(
    ("num_rows", "num_out", "size", "group", "silu", "with_bias"),
    [
        *((rows, 40, 256, 128, rows % 2 == 1, True) for rows in (1, 2, 17, 33, FEW_ROWS)),
        *((rows, 21, 480, 32, rows % 2 == 0, False) for rows in (1, 2, 17, FEW_ROWS)),
        (5, 64, 128, 64, True, False),
        (3, 4200, 128, 128, True, True),  # Wide tiles.
        (FEW_ROWS + 9, 70, 256, 64, False, True),
    ],
)
def test_products(
    num_rows: int, num_out: int, size: int, group: int, silu: bool, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = matrix(2 * num_out if silu else num_out, size, generator, group=group)
    words = words_of(whole)
    assert words is not None
    x = torch.randn(num_rows, size, generator=generator)
    bias = torch.randn(words.outputs, generator=generator) if with_bias else None
    out = torch.full((num_rows, num_out), float("nan"))
    words_linear(x, words, out, bias=bias, silu=silu)
    expected = x.double() @ whole.numbers().double().T
    if bias is not None:
        expected += bias.double()
    if silu:
        gate, up = expected.split(num_out, dim=1)
        expected = F.silu(gate) * up
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(("bits", "group", "has_least"), OTHERS)
@pytest.mark.parametrize(("num_rows", "num_out", "size"), [(3, 21, 96), (33, 40, 128)])
def test_products_of_other_codes(
    bits: int, group: int, has_least: bool, num_rows: int, num_out: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = other_matrix(bits, 2 * num_out, size, generator, group=group, has_least=has_least)
    words, x = words_of(whole), torch.randn(num_rows, size, generator=generator)
    assert words is not None
    bias = torch.randn(2 * num_out, generator=generator)
    gate, up = (x.double() @ whole.numbers().double().T + bias.double()).split(num_out, dim=1)
    found = words_linear(
        x, words, torch.full((num_rows, num_out), float("nan")), bias=bias, silu=True
    )
    assert relative_error(found, F.silu(gate) * up) < 1e-5
    assert relative_error(words_product(x, words, bias), torch.cat((gate, up), 1)) < 1e-5


def test_many_rows_use_the_dequantised_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = matrix(48, 96, generator)
    words, x = words_of(whole), torch.randn(600, 96, generator=generator)
    assert words is not None
    expected = x.double() @ whole.numbers().double().T
    assert relative_error(words_product(x, words, None), expected) < 1e-5
    assert words_product(x[:0], words, None).shape == (0, 48)


def test_parts_of_a_product() -> None:
    generator = torch.Generator().manual_seed(1)
    whole, x = matrix(64, 512, generator), torch.randn(5, 512, generator=generator)
    words, parts = words_of(whole), torch.full((2, 5, 64), float("nan"))
    assert words is not None
    words_linear(x, words, parts)
    expected = x[:, :256].double() @ whole.numbers()[:, :256].double().T
    assert relative_error(parts[0], expected) < 1e-5
    assert relative_error(parts.sum(0), x.double() @ whole.numbers().double().T) < 1e-5


@pytest.mark.parametrize(
    ("num_rows", "packed", "inner"),
    [
        *((rows, (True, True, True), 896) for rows in (1, 20, FEW_ROWS, FEW_ROWS + 1)),
        *((rows, (False, True, True), 896) for rows in (1, FEW_ROWS + 1)),
        *((rows, (True, False, False), 896) for rows in (1, 20)),
        *((rows, (True, True, True), 8192) for rows in (1, 20)),
    ],
)
def test_a_layer_of_products(num_rows: int, packed: tuple[bool, ...], inner: int) -> None:
    """Some layers also have plain matrices. A product with 8192 inputs is split."""
    generator = torch.Generator().manual_seed(num_rows)
    hidden, gain = 96, torch.rand(96, generator=generator) + 0.5
    shapes = (2 * inner, hidden), (hidden, inner), (42, hidden)
    matrices = [matrix(*shape, generator) for shape in shapes]
    weights: list[Weight | WordsWeight] = []
    for whole, is_packed in zip(matrices, packed, strict=True):
        words = words_of(whole)
        assert words is not None
        weight = WordsWeight.of(words, None) if is_packed else Weight(whole.numbers(), None)
        weights.append(weight)
    gate_up, down, following = weights
    x, residual = torch.randn(2, num_rows, hidden, generator=generator)
    before = residual.double()
    middle = gate_up.gated(x, for_e4m3=down.reads_e4m3)
    normed = down.add_and_norm(middle, residual, RMSNorm(gain, 1e-5), for_e4m3=False)
    assert isinstance(normed, UndividedRows) == (
        num_rows <= FEW_ROWS and not (packed[1] and inner == 8192)
    )
    last = following(normed)

    numbers = [whole.numbers().double() for whole in matrices]
    gate, up = (x.double() @ numbers[0].T).split(inner, dim=1)
    total = before + (F.silu(gate) * up) @ numbers[1].T
    assert relative_error(residual, total) < 1e-5
    expected = rms_norm_reference(total.float(), gain, 1e-5) @ numbers[2].T
    assert relative_error(last, expected) < 1e-5


@pytest.mark.parametrize(
    ("num_rows", "undivided", "other"),
    [
        *((num_rows, undivided, None) for num_rows in (1, 5, 50) for undivided in (False, True)),
        *((5, False, other) for other in OTHERS[1:3]),
    ],
)
def test_qkv(num_rows: int, undivided: bool, other: tuple[int, int, bool] | None) -> None:
    heads, kv_heads, dim, size = 3, 1, 64, 160
    shape = AttentionShape(heads, kv_heads, dim, 16)
    generator = torch.Generator().manual_seed(num_rows)
    whole = matrix((heads + 2 * kv_heads) * dim, size, generator)
    if other is not None:
        bits, group, has_least = other
        whole = other_matrix(bits, *whole.codes.shape, generator, group=group, has_least=has_least)
    words = words_of(whole)
    assert words is not None
    weight = WordsWeight.of(words, torch.randn(words.outputs, generator=generator))
    x = torch.randn(num_rows, size, generator=generator)
    squares = torch.rand(num_rows, 3, generator=generator) + 0.1
    read: Rows = UndividedRows(x, squares, 1e-5) if undivided else x
    rotation = Rotation(shape, num_rows, generator)
    assert weight.can_rotate(shape, read)
    q = weight.rotated(read, rotation.where)
    if undivided:
        x = x * (squares.sum(1, keepdim=True) / size + 1e-5).rsqrt()
    assert weight.bias is not None
    qkv = x.double() @ whole.numbers().double().T + weight.bias.double()
    rotation.check(q, qkv)


def test_products_with_few_programs_are_split() -> None:
    assert WordsProduct(8, 4096, 112).num_splits == 4
    assert WordsProduct(8, 4096, 32).num_splits == 1, "a program has few blocks"
    assert WordsProduct(8, 28672, 112).num_splits == 1, "there are enough programs"
    assert WordsProduct(8, 4096, 113).num_splits == 1, "the parts would differ in size"
    assert WordsProduct(16, 4096, 112).num_splits == 8
    assert WordsProduct(64, 4096, 112).num_splits == 7
    assert WordsProduct(64, 4096, 32).num_splits == 4
    assert WordsProduct(64, 28672, 32).num_splits == 1
    assert WordsProduct(8, 4096, 224, block=64).num_splits == 4, "as long as 112 blocks of 128"
    assert WordsProduct(8, 4096, 64, block=64).num_splits == 1


@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_fit_a_multiprocessor(splits: int) -> None:
    for num_rows in (1, 8, 9, 16, 17, 32, 33, FEW_ROWS, 300):
        for num_out in (64, 1024, 4096, 6144, 28672, 128256):
            for inputs in (128, 64, 32):
                blocks = 4096 // inputs
                tile = WordsProduct(num_rows, num_out, blocks, splits, inputs).tile()
                # Words, scales and x in bfloat16.
                block = tile["BN"] * (64 + 32) + tile["BM"] * 2 * inputs
                step = block * tile["SLICES"]
                assert step * tile["STAGES"] <= 227 * 1024, (num_rows, num_out, tile)


def test_large_steps_dequantise_sooner_if_groups_are_small() -> None:
    def most_rows(num_out: int, group: int, *, has_least: bool = False) -> int:
        words = torch.zeros(4, num_out, 32, dtype=torch.int16)
        factors = torch.zeros(512 // group, num_out, dtype=torch.int32)
        return Words(words, factors, 512, 4, True, has_least).most_rows

    assert most_rows(28672, 128) == 256
    assert most_rows(4096, 128) == most_rows(28672, 32) == 128
    assert most_rows(28672, 128, has_least=True) == 128
    assert most_rows(65536, 32) == 256, "heads"
    assert most_rows(65536, 32, has_least=True) == 128


def test_products_of_small_blocks_have_more_warps_or_stages() -> None:
    def found(num_out: int, key: str) -> list[int]:
        return [WordsProduct(8, num_out, 4096 // x, block=x).tile()[key] for x in (128, 64, 32)]

    assert found(4096, "SLICES") == [4, 8, 4], "a multiprocessor has one program"
    assert found(6144, "SLICES") == [2, 4, 4]
    assert found(28672, "SLICES") == [4, 4, 4], "many programs occupy a GPU"
    assert found(28672, "STAGES") == [3, 3, 6]


@pytest.mark.parametrize("part", range(4))
def test_the_instructions_that_unpack_words(part: int) -> None:
    """All codes and zeros."""
    codes, zeros = torch.arange(16)[:, None].expand(16, 17), torch.arange(17).expand(16, 17)
    word = codes << (4 * part) | (0xFFFF & ~(15 << (4 * part)))
    zero = (-128.0 - zeros).bfloat16().view(torch.int16).long()
    registers = {"$1": pair_of(word, word), "$2": pair_of(zero, zero)}
    found = halves(computed(words_kernels.PARTS[part].value, registers), torch.bfloat16)
    for half in found:
        assert torch.equal(half, (codes - zeros).double())


@pytest.mark.parametrize("part", range(2))
def test_the_instructions_that_unpack_signed_codes(part: int) -> None:
    codes = torch.arange(-128, 128)
    for others in (0, 0xFFFF):
        word = (codes & 0xFF) << (8 * part) | (others & ~(0xFF << (8 * part)))
        source = words_kernels._SIGNED_PARTS[part].value
        found = halves(computed(source, {"$1": pair_of(word, word)}), torch.bfloat16)
        for half in found:
            assert torch.equal(half, codes.double())
