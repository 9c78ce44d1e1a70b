"""Products of small bfloat16 matrices on a CPU with AVX512_BF16, for numba functions.

The CPU multiplies and adds pairs of bfloat16. So the right-hand matrix must be stored in pairs: the
two numbers of a column in two consecutive rows are adjacent."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from parrot.engine.cpu.prompt_layout import TILE_COLUMNS, TILE_ROWS
from parrot.engine.cpu.simd import LANES, vector

_PARTS = TILE_COLUMNS // LANES
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_ADDRESS = types.int64

# Inline assembly, because the types of LLVM's intrinsics differ between versions.
_ADD_PAIRS = ir.InlineAsm(
    ir.FunctionType(_VECTOR, [_VECTOR] * 3), "vdpbf16ps $3, $2, $0", "=v,0,v,v"
)
_ROUND = ir.InlineAsm(ir.FunctionType(_HALVES, [_VECTOR]), "vcvtneps2bf16 $1, $0", "=v,v")


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def store_rounded(context, address, value):
    """Store a vector as bfloat16, rounded to nearest even. Subnormal numbers become 0."""

    def code(_, builder, signature, values):
        rounded = builder.call(_ROUND, [values[1]])
        builder.store(rounded, _at(builder, values[0], _HALVES), align=2)

    return types.void(_ADDRESS, vector), code


@intrinsic
def tile_product(context, a, a_stride, b, b_stride, num_pairs, out, out_stride):
    """out [TILE_ROWS, TILE_COLUMNS] float32 = a [TILE_ROWS, 2 * num_pairs] @ b.

    Strides are in bytes: between rows of a and out, and between pairs of rows of b."""

    def code(_, builder, signature, values):
        _tile_product(builder, *values)

    return types.void(*[_ADDRESS] * 7), code


def _tile_product(builder, a, a_stride, b, b_stride, num_pairs, out, out_stride):
    before, loop = builder.block, builder.append_basic_block("pairs")
    done = builder.append_basic_block("done")
    rows = [builder.add(a, builder.mul(a_stride, _I64(row))) for row in range(TILE_ROWS)]
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(_I64)
    sums = [[builder.phi(_VECTOR) for _ in range(_PARTS)] for _ in rows]
    right = _right(builder, builder.add(b, builder.mul(pair, b_stride)))
    new = []
    for row, of_row in zip(rows, sums, strict=True):
        left = _splat(builder, _at(builder, builder.add(row, builder.mul(pair, _I64(4))), _F32))
        parts = zip(of_row, right, strict=True)
        new.append([builder.call(_ADD_PAIRS, [one, left, part]) for one, part in parts])
    following = builder.add(pair, _I64(1))
    pair.add_incoming(_I64(0), before)
    pair.add_incoming(following, loop)
    for of_row, new_of_row in zip(sums, new, strict=True):
        for one, new_one in zip(of_row, new_of_row, strict=True):
            one.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
            one.add_incoming(new_one, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, done)
    builder.position_at_end(done)
    for number, of_row in enumerate(new):
        place = builder.add(out, builder.mul(out_stride, _I64(number)))
        for part, one in enumerate(of_row):
            to = builder.add(place, _I64(4 * LANES * part))
            builder.store(one, _at(builder, to, _VECTOR), align=4)


def _right(builder, address):
    """Load a pair of rows of the right-hand matrix."""
    places = [builder.add(address, _I64(4 * LANES * part)) for part in range(_PARTS)]
    return [builder.load(_at(builder, place, _VECTOR), align=4) for place in places]


def _splat(builder, pointer):
    """A vector whose elements are all the pair at `pointer`."""
    value = builder.load(pointer, align=2)
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * LANES))
