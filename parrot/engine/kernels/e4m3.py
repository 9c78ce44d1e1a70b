"""Device functions for e4m3 codes with a power of two per row (`attention.quantised`).

A row is divided by the smallest power of two that brings its largest number to 448 or below."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)  # Of float32.
_LEAST_EXPONENT = tl.constexpr(87)
_NOT_FINITE = tl.constexpr(255)


@triton.jit
def bits_of(x):
    """The bits of |x| for x in float32. They have the order of the numbers, with NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(largest):
    """The exponent, plus 127, of a row whose largest number has the bits `largest`.

    It is the smallest exponent that brings the number to 448 or below."""
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, _LEAST_EXPONENT)
    return tl.where(largest >= INFINITY_BITS, _NOT_FINITE, exponent)


@triton.jit
def power_of(exponent):
    """2 ** (exponent - 127); infinity for a row that is not finite."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(exponent):
    """2 ** (127 - exponent); 0 for a row that is not finite."""
    return (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x):
    """uint8 codes of float32 numbers up to 448, rounded to nearest.

    Triton's own conversion rounds towards zero in the interpreter."""
    bits = bits_of(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Near 2^14, float32's last bit has the value of e4m3's subnormal step. So the addition rounds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)
    code = tl.where(bits > INFINITY_BITS, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float32_of(codes):
    """The numbers of int32 codes, in float32."""
    # Moving the bits to float32's fields leaves e4m3's exponent bias. A factor of 2 ** 120 corrects
    # it, also for subnormal numbers.
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def float8_of(x):
    """e4m3 numbers of float32 numbers up to 448, rounded to nearest by the hardware."""
    return x.to(tl.float8e4nv, fp_downcast_rounding="rtne")


@triton.jit
def coded(row):
    """A row in e4m3, and its power of two."""
    wide = row.to(tl.float32)
    exponent = exponent_of(tl.max(bits_of(wide), 0))
    return float8_of(wide * inverse_of(exponent)), power_of(exponent)
