"""Memory access by address, vectors of 16 float32, and calls by address, for numba functions.

Explicit vectors are fast independently of the compiler's auto-vectorization, which depends on how a
loop is written. LLVM divides a vector among the registers of the CPU."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, call-arg"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16  # Numbers in a vector.

_F32 = ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_ADDRESS = types.int64

# Coefficients of 2^x for -0.5 <= x <= 0.5, highest power first. All bits except the last are exact.
_EXP2 = (0.00015461445, 0.0013400428, 0.009618057, 0.055503272, 0.24022651, 0.69314718, 1.0)
# 1.5 * 2^23. Adding this number rounds an addend to an integer, which is then in the last bits.
_MAGIC = 12582912.0
_LEAST, _MOST = -126.0, 126.0  # Range of the exponents of `exp2`.


class VectorType(types.Type):
    """numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, _VECTOR)


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _element(builder, address, index, kind):
    return builder.gep(_at(builder, address, kind), [index])


def _same(kind, value):
    return ir.Constant(kind, [value] * LANES)


def _call(builder, name, result, values, **options):
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, values, **options)


@intrinsic
def int64_at(context, address, index):
    def code(_, builder, signature, values):
        return builder.load(_element(builder, *values, _I64))

    return types.int64(_ADDRESS, types.int64), code


@intrinsic
def int32_at(context, address, index):
    def code(_, builder, signature, values):
        return builder.sext(builder.load(_element(builder, *values, _I32)), _I64)

    return types.int64(_ADDRESS, types.int64), code


@intrinsic
def float_at(context, address, index):
    def code(_, builder, signature, values):
        return builder.load(_element(builder, *values, _F32))

    return types.float32(_ADDRESS, types.int64), code


@intrinsic
def set_int64(context, address, index, value):
    def code(_, builder, signature, values):
        builder.store(values[2], _element(builder, *values[:2], _I64))

    return types.void(_ADDRESS, types.int64, types.int64), code


@intrinsic
def set_float(context, address, index, value):
    def code(_, builder, signature, values):
        builder.store(values[2], _element(builder, *values[:2], _F32))

    return types.void(_ADDRESS, types.int64, types.float32), code


@intrinsic
def take_next(context, address):
    """Increment the int64 at `address` atomically and return its previous value."""

    def code(_, builder, signature, values):
        return builder.atomic_rmw("add", _at(builder, values[0], _I64), _I64(1), "acq_rel")

    return types.int64(_ADDRESS), code


@intrinsic
def call_in_threads(context, parallel, function, data, threads):
    """Call `function` with `data` in `threads` threads, by `parallel` (GOMP_parallel)."""

    def code(_, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
        threads = builder.trunc(values[3], _I32)
        builder.call(_at(builder, values[0], kind), [*values[1:3], threads, _I32(0)])

    return types.void(_ADDRESS, _ADDRESS, _ADDRESS, types.int64), code


@intrinsic
def prefetch(context, address):
    """Prefetch the cache line at `address`."""

    def code(_, builder, signature, values):
        bytes_at = ir.IntType(8).as_pointer()
        arguments = [builder.inttoptr(values[0], bytes_at), _I32(0), _I32(3), _I32(1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)

    return types.void(_ADDRESS), code


@intrinsic
def load_float32(context, address):
    def code(_, builder, signature, values):
        return builder.load(_at(builder, values[0], _VECTOR), align=4)

    return vector(_ADDRESS), code


@intrinsic
def store_float32(context, address, value):
    def code(_, builder, signature, values):
        builder.store(values[1], _at(builder, values[0], _VECTOR), align=4)

    return types.void(_ADDRESS, vector), code


@intrinsic
def load_bfloat16(context, address):
    def code(_, builder, signature, values):
        halves = builder.load(_at(builder, values[0], _HALVES), align=2)
        words = builder.shl(builder.zext(halves, _WORDS), _same(_WORDS, 16))
        return builder.bitcast(words, _VECTOR)

    return vector(_ADDRESS), code


@intrinsic
def store_bfloat16(context, address, value):
    """Store a vector as bfloat16, rounded to nearest even."""

    def code(_, builder, signature, values):
        words = builder.bitcast(values[1], _WORDS)
        last = builder.and_(builder.lshr(words, _same(_WORDS, 16)), _same(_WORDS, 1))
        rounded = builder.add(words, builder.add(last, _same(_WORDS, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", values[1], values[1])
        rounded = builder.select(is_nan, _same(_WORDS, 0x7FC00000), rounded)
        halves = builder.trunc(builder.lshr(rounded, _same(_WORDS, 16)), _HALVES)
        builder.store(halves, _at(builder, values[0], _HALVES), align=2)

    return types.void(_ADDRESS, vector), code


@intrinsic
def splat(context, number):
    def code(_, builder, signature, values):
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), values[0], _I32(0))
        return builder.shuffle_vector(first, first, _same(_WORDS, 0))

    return vector(types.float32), code


@intrinsic
def add(context, a, b):
    return vector(vector, vector), lambda _, builder, signature, values: builder.fadd(*values)


@intrinsic
def subtract(context, a, b):
    return vector(vector, vector), lambda _, builder, signature, values: builder.fsub(*values)


@intrinsic
def multiply(context, a, b):
    return vector(vector, vector), lambda _, builder, signature, values: builder.fmul(*values)


@intrinsic
def divide(context, a, b):
    return vector(vector, vector), lambda _, builder, signature, values: builder.fdiv(*values)


@intrinsic
def multiply_add(context, a, b, c):
    """a * b + c, rounded once if the CPU supports it."""

    def code(_, builder, signature, values):
        return _call(builder, f"llvm.fmuladd.v{LANES}f32", _VECTOR, values)

    return vector(vector, vector, vector), code


@intrinsic
def larger(context, a, b):
    """The larger of a and b in each lane; a if one of them is NaN."""

    def code(_, builder, signature, values):
        a, b = values
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    return vector(vector, vector), code


@intrinsic
def total(context, a):
    def code(_, builder, signature, values):
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return _call(builder, name, _F32, [_F32(0.0), *values], fastmath=("reassoc",))

    return types.float32(vector), code


@intrinsic
def largest(context, a):
    """The largest number of a vector without NaN."""

    def code(_, builder, signature, values):
        return _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, values)

    return types.float32(vector), code


@intrinsic
def root(context, a):
    def code(_, builder, signature, values):
        return _call(builder, "llvm.sqrt.f32", _F32, values)

    return types.float32(types.float32), code


@intrinsic
def exp2(context, a):
    """2^a. 0 for numbers below -126, 2^126 for numbers above 126, NaN for NaN."""

    def code(_, builder, signature, values):
        (a,) = values
        least, most = _same(_VECTOR, _LEAST), _same(_VECTOR, _MOST)
        is_small = builder.fcmp_ordered("<", a, least)
        x = builder.select(is_small, least, a)
        x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
        shifted = builder.fadd(x, _same(_VECTOR, _MAGIC))
        x = builder.fsub(x, builder.fsub(shifted, _same(_VECTOR, _MAGIC)))
        power = _same(_VECTOR, _EXP2[0])
        for factor in _EXP2[1:]:
            values = [power, x, _same(_VECTOR, factor)]
            power = _call(builder, f"llvm.fmuladd.v{LANES}f32", _VECTOR, values)
        exponent = builder.shl(builder.bitcast(shifted, _WORDS), _same(_WORDS, 23))
        result = builder.add(builder.bitcast(power, _WORDS), exponent)
        return builder.select(is_small, _same(_VECTOR, 0.0), builder.bitcast(result, _VECTOR))

    return vector(vector), code


MEMORY = {
    "float32": (load_float32, store_float32, 4),
    "bfloat16": (load_bfloat16, store_bfloat16, 2),
}
"""By type: the functions that load and store LANES numbers, and the bytes of a number."""
