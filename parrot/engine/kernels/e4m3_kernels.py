"""Numbers in e4m3 with a power of two for each row, as `attention.quantised` defines them, in
kernels."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_LEAST_EXPONENT = tl.constexpr(87)
_NOT_FINITE = tl.constexpr(255)

_FLOAT16_OF_PAIRS: tl.constexpr = tl.constexpr("""
{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}
""")


@triton.jit
def bits_of(x):
    """The bits of |x|, x in float32: they are ordered as the numbers are, and NaN comes last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(largest):
    """The exponent, plus 127, by which a row is divided whose largest number has these bits: the
    least that brings it to 448 or below."""
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, _LEAST_EXPONENT)
    return tl.where(largest >= _INFINITY, _NOT_FINITE, exponent)


@triton.jit
def power_of(exponent):
    """2 to the exponent - 127; infinity for a row that is not finite."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(exponent):
    """2 to the 127 - exponent; 0 for a row that is not finite."""
    return (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x):
    """uint8 codes, to the nearest, of numbers in float32 up to 448. (The interpreter's conversion
    rounds towards zero.)"""
    bits = bits_of(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of numbers from 2^14 on is that of the subnormal ones.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)
    code = tl.where(bits > _INFINITY, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float32_of(codes):
    """The numbers of int32 codes: e4m3's exponent has fewer bits, so they are too small by a
    constant factor at first, also where they are subnormal."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def numbers_of_pairs(pairs, IN_FLOAT32: tl.constexpr):
    """The even and the odd numbers of int16 pairs of codes, in float16 or float32.

    Both are exact. Pairs, since the matrix unit's operands can be transposed on their way to
    registers in units of two bytes only; four numbers take three instructions."""
    if IN_FLOAT32:
        wide = pairs.to(tl.int32)
        even = float32_of(wide)
        odd = float32_of(wide >> 8)
    else:
        even, odd = tl.inline_asm_elementwise(
            _FLOAT16_OF_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def numbers_of(codes, IN_FLOAT32: tl.constexpr):
    """The numbers of uint8 codes, in float16 or float32."""
    if IN_FLOAT32:
        numbers = float32_of(codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return numbers
