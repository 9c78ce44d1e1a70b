"""Tiles of weights in a ring in shared memory, and their products with a row, in Gluon.

For `chain_kernels`. Weights are codes in e4m3 [outputs, inputs], or words of four bits in groups
of 128 (see `words_kernels`). With e4m3, x is in e4m3.

With words, x is in whole numbers of 15 bits, with a power of two for each slice of 128 inputs. The
tensor core multiplies codes by the upper and by the lower byte of x, and its sums are exact. So
codes are not converted, and eight codes need one shift and two masks.

A word has four codes in two bytes. Word j of a slice has the codes of inputs j, j + 32, j + 64 and
j + 96. So the low halves of a slice's bytes are the codes of inputs 0, 64, 1, 65 and so on. The
high halves are the codes of inputs 32, 96, 33, 97 and so on."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="index, operator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from parrot.engine.kernels import e4m3
from parrot.engine.kernels.gluon_parts import barrier
from parrot.engine.kernels.linear import words_kernels

# A tile of weights is 16 outputs, and 2048 inputs in e4m3 or 4096 in words. Each of 8 warps
# multiplies two slices of 128 inputs, or four.
TILE = gl.constexpr(16)
WARPS = gl.constexpr(8)
SLICE = gl.constexpr(128)
WIDTH = gl.constexpr(32)  # Words of an output in a slice.
TILE_BYTES = gl.constexpr(32768)
FACTOR_BYTES = gl.constexpr(2048)  # Of a tile of words.
# Of the tensor core's results. All columns are equal. With words, all pairs of columns are: one
# column for the upper bytes of x, and one for the lower bytes.
_COLUMNS = gl.constexpr(8)
_PAIRS = gl.constexpr(4)

_bits_of = gluon.jit(e4m3.bits_of.fn)
_power_of = gluon.jit(e4m3.power_of.fn)
_inverse_of = gluon.jit(e4m3.inverse_of.fn)
_scale_of = gluon.jit(words_kernels.scale_of.fn)

# 1.5 * 2^23: a sum with it is rounded to a whole number, which are its last bits.
_ROUNDING = gl.constexpr(12582912.0)
_ROUNDING_BITS = gl.constexpr(0x4B400000)

# The codes in the low and in the high halves of bytes.
_LOW_CODES = gl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_HIGH_CODES = gl.constexpr("""{
.reg .b32 codes;
shr.b32 codes, $1, 4;
and.b32 $0, codes, 0x0F0F0F0F;
}""")

# Layouts. The tensor core's results have dimensions [warps, outputs, columns].
_RESULTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])
)
# Numbers of 8 bits: e4m3, or the bytes of words.
_CODES = gl.constexpr(gl.DotOperandLayout(0, _RESULTS.value, 4))
_X_OF_CODES = gl.constexpr(gl.DotOperandLayout(1, _RESULTS.value, 4))
# x of words [warps, bytes, pairs, columns of a pair].
_X_OF_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 16, 0, 0], [0, 32, 0, 0]],
        [[0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [8, 64, 4, 2],
    )
)
# Sums of pairs of columns [warps, outputs, pairs].
_PAIR_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 8, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [8, 16, 4],
    )
)
# A chunk of x. With words, a thread has inputs j to j + 7, and those 64 after them, so that their
# bytes are consecutive.
_CHUNK_OF_CODES = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
_CHUNK_OF_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [4], [64]],
        [[8], [16], [32], [128], [256]],
        [[512], [1024], [2048]],
        [],
        [4096],
    )
)
LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LINEAR_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINEAR_3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_LINEAR_4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
# Rows of a tile whose parts of 16 bytes are exchanged, so that no bank of shared memory has a part
# of two rows of eight. A row has 128 bytes, or the 64 of 32 words.
_EXCHANGED_CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
_EXCHANGED_WORDS = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [2, 1, 0]))
COPIED_CODES = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5)
)
COPIED_WORDS = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=5)
)
COPIED_FACTORS = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
)


@gluon.constexpr_function
def tile_inputs(words):
    """Inputs of a tile, and of a chunk of x. A byte has two codes of four bits."""
    return TILE_BYTES.value // TILE.value * (2 if words else 1)


@gluon.constexpr_function
def chunk_layout(words):
    """The layout of a chunk of x in registers."""
    return _CHUNK_OF_WORDS.value if words else _CHUNK_OF_CODES.value


@gluon.constexpr_function
def num_chunks(size, words):
    """Chunks of x with this number of inputs."""
    return -(-size // tile_inputs(words))


@gluon.constexpr_function
def num_early_chunks(inner, words):
    """Chunks of the results of gate and up that down multiplies first.

    Programs compute the late results while they exchange the early ones. They multiply the early
    ones while they exchange the late ones. So they wait for neither."""
    return num_chunks(inner, words) * 3 // 4


@gluon.constexpr_function
def num_late_chunks(inner, words):
    """The other chunks of the results of gate and up."""
    return num_chunks(inner, words) - num_early_chunks(inner, words)


@gluon.constexpr_function
def num_rounds(results, num):
    """Tiles of gate and up of each of `num` programs that the first `results` results need."""
    return -(-results // (TILE.value // 2 * num))


@gluon.jit
def allocate(STAGES: gl.constexpr, X_CHUNKS: gl.constexpr, WORDS: gl.constexpr):
    """A ring of tiles, barriers of full and of empty places, and x in chunks of a tile's inputs.

    With words, also a ring of their factors, and room for two numbers of each slice of x."""
    HALF: gl.constexpr = TILE // 2
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if WORDS:
        ring = gl.allocate_shared_memory(
            gl.int16, [2 * STAGES, 16, 1, 2, HALF, WIDTH], COPIED_WORDS
        )
        x = gl.allocate_shared_memory(gl.int8, [8 * X_CHUNKS, 2, WARPS, 2 * WIDTH], LINEAR_3)
        factors = gl.allocate_shared_memory(gl.int32, [STAGES, 32, 1, 2, HALF], COPIED_FACTORS)
        of_slices = gl.allocate_shared_memory(gl.float32, [8 * X_CHUNKS, WARPS], LINEAR)
        memory = (ring, full, empty, x, factors, of_slices)
    else:
        ring = gl.allocate_shared_memory(
            gl.float8e4nv, [2 * STAGES, 8, 1, 2, HALF, SLICE], COPIED_CODES
        )
        x = gl.allocate_shared_memory(gl.float8e4nv, [2 * X_CHUNKS, WARPS, SLICE], LINEAR_2)
        memory = (ring, full, empty, x)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(2 * slot), count=1)
        mbarrier.init(full.index(2 * slot + 1), count=1)
        mbarrier.init(empty.index(slot), count=1)
    barrier()
    return memory


@gluon.jit
def _copy(memory, turn, weight, factors, chunk, group, output, ahead):
    """Copy a tile to the ring in two halves. `group`, `output`: its place, see `chain.Tiles`.

    At most `ahead` halves are on their way at the same time."""
    ring, full = memory[0], memory[1]
    HALVES: gl.constexpr = ring.shape[0]
    SLICES: gl.constexpr = ring.shape[1]
    for half in gl.static_range(2):
        index = 2 * turn + half
        earlier = index - ahead
        if earlier >= 0:
            mbarrier.wait(full.index(earlier % HALVES), earlier // HALVES & 1)
        place = index % HALVES
        at = full.index(place)
        if factors is None or half == 1:
            mbarrier.expect(at, TILE_BYTES // 2)
        else:
            mbarrier.expect(at, TILE_BYTES // 2 + FACTOR_BYTES)
            coordinates = [2 * chunk * SLICES, group, 0, output]
            tma.async_copy_global_to_shared(factors, coordinates, at, memory[4].index(place // 2))
        coordinates = [(2 * chunk + half) * SLICES, group, 0, output, 0]
        tma.async_copy_global_to_shared(weight, coordinates, at, ring.index(place))


@gluon.jit
def _ahead_of(index, memory, AHEAD: gl.constexpr, AHEAD_WAITING: gl.constexpr):
    """The most halves on their way while a product's tile is copied.

    The first tiles fill the ring while programs wait for each other."""
    STAGES: gl.constexpr = memory[0].shape[0] // 2
    ahead = gl.to_tensor(AHEAD)
    if index < STAGES:
        ahead = gl.to_tensor(AHEAD_WAITING)
    return ahead


@gluon.jit
def _copy_turn(memory, asked, turn, SIZES: gl.constexpr):
    """Copy the tile of a turn.

    asked  weights, their factors, and the first turn after each product
    SIZES  tiles of an output of HEADS and HIDDEN inputs, and of the early and the late part of
           INNER inputs; D, NUM, AHEAD and AHEAD_WAITING of `chain_kernel`"""
    weights, factors, ends = asked
    C_HEADS, C_HIDDEN, C_EARLY, C_LATE, D, NUM, AHEAD, AHEAD_WAITING = SIZES
    program = gl.program_id(0)
    HALF: gl.constexpr = TILE // 2
    if turn < ends[0]:
        chunk, tile = turn % C_HEADS, program + turn // C_HEADS * NUM
        _copy(memory, turn, weights[0], factors[0], chunk, tile, 0, AHEAD)
    elif turn < ends[1]:
        index = turn - ends[0]
        ahead = _ahead_of(index, memory, AHEAD, AHEAD_WAITING)
        chunk, tile = index % C_HIDDEN, program + index // C_HIDDEN * NUM
        _copy(memory, turn, weights[1], factors[1], chunk, 0, tile * HALF, ahead)
    elif turn < ends[2]:
        CHUNKS: gl.constexpr = max(C_EARLY, 1)  # Without early chunks, the turn is later.
        index = turn - ends[1]
        chunk, tile = index % CHUNKS, program + index // CHUNKS * NUM
        _copy(memory, turn, weights[2], factors[2], chunk, tile, 0, AHEAD)
    elif turn < ends[3]:
        index = turn - ends[2]
        chunk, tile = C_EARLY + index % C_LATE, program + index // C_LATE * NUM
        _copy(memory, turn, weights[2], factors[2], chunk, tile, 0, AHEAD)
    else:
        index = turn - ends[3]
        ahead = _ahead_of(index, memory, AHEAD, AHEAD_WAITING)
        chunk, tile = index % C_HIDDEN, program + index // C_HIDDEN * NUM
        OF_HEAD: gl.constexpr = D // TILE
        output = tile % OF_HEAD * HALF
        _copy(memory, turn, weights[3], factors[3], chunk, tile // OF_HEAD, output, ahead)


@gluon.jit
def store_codes(memory, chunk: gl.constexpr, codes):
    """Store a chunk of x in e4m3."""
    x_smem = memory[3]
    INPUTS: gl.constexpr = codes.shape[0]
    chunks = x_smem._reinterpret(gl.float8e4nv, [x_smem.numel // INPUTS, INPUTS], LINEAR)
    chunks.index(chunk).store(codes)


@gluon.jit
def store_numbers(memory, chunk: gl.constexpr, x):
    """Store a chunk of x, float32, for words. Also store the sum of each slice, and its power.

    A number changes by at most 2^-14 of the largest one of its slice."""
    x_smem = memory[3]
    INPUTS: gl.constexpr = x.shape[0]
    SLICES: gl.constexpr = INPUTS // SLICE
    PARTS: gl.constexpr = SLICES // WARPS
    CHUNKS: gl.constexpr = x_smem.numel // (2 * INPUTS)
    x = gl.reshape(x, [SLICES, SLICE])
    # The largest number becomes 2^13 to 2^14, unless it is below 2^-100.
    exponent = gl.maximum(gl.max(_bits_of(x), 1) >> 23, 27) - 13
    power = _power_of(exponent)
    shifted = x * gl.expand_dims(_inverse_of(exponent), 1) + _ROUNDING
    whole = shifted.to(gl.int32, bitcast=True) - _ROUNDING_BITS
    upper = (whole + 128) >> 8
    lower = whole - (upper << 8)
    both = gl.join(upper.to(gl.int8), lower.to(gl.int8))
    both = gl.reshape(both, [PARTS, WARPS, 2, 2, WIDTH, 2])
    both = gl.permute(both, (0, 3, 5, 1, 4, 2))
    both = gl.reshape(both, [2 * PARTS, 2, WARPS, 2 * WIDTH])
    SHAPE: gl.constexpr = [CHUNKS, 2 * PARTS, 2, WARPS, 2 * WIDTH]
    x_smem._reinterpret(gl.int8, SHAPE, _LINEAR_4).index(chunk).store(both)
    rows = memory[5]._reinterpret(gl.float32, [2 * CHUNKS, SLICES], LINEAR)
    rows.index(2 * chunk).store(gl.sum(shifted - _ROUNDING, 1) * power)
    rows.index(2 * chunk + 1).store(power)


@gluon.jit
def _load_x(x_smem, index):
    """A part of x [warps, inputs, columns]."""
    row = x_smem.index(index).load(gl.SliceLayout(2, _X_OF_CODES))
    SHAPE: gl.constexpr = [row.shape[0], row.shape[1], _COLUMNS]
    found, _ = gl.broadcast(gl.expand_dims(row, 2), gl.zeros(SHAPE, row.dtype, layout=_X_OF_CODES))
    return found


@gluon.jit
def _load_half(memory, place, WORDS: gl.constexpr):
    """Half a tile [warps, outputs, inputs or words] in registers.

    Each of two slices of words is followed by its factors."""
    ring = memory[0]
    HALVES: gl.constexpr = ring.shape[0]
    if WORDS:
        tiles = ring._reinterpret(gl.int8, [2 * HALVES, WARPS, TILE, 2 * WIDTH], _EXCHANGED_WORDS)
        factors = memory[4]._reinterpret(gl.int32, [2 * HALVES, WARPS, TILE], LINEAR_2)
        found = ()
        for part in gl.static_range(2):
            words = tiles.index(2 * place + part).load(_CODES)
            factor = factors.index(2 * place + part).load(gl.SliceLayout(2, _PAIR_SUMS))
            found = found + (words, factor)  # noqa: RUF005 (not in Gluon)
    else:
        tiles = ring._reinterpret(gl.float8e4nv, [HALVES, WARPS, TILE, SLICE], _EXCHANGED_CODES)
        found = (tiles.index(place).load(_CODES),)
    return found


@gluon.jit
def _multiply_codes(words, x_smem, index, ASSEMBLY: gl.constexpr, sums):
    """Add the product of the codes in one half of a slice's bytes and their inputs.

    x [2, warps, bytes] has their upper and their lower bytes. Layouts repeat both for all pairs of
    columns, so that no number moves to another thread."""
    codes = gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [words], dtype=gl.int8, is_pure=True, pack=4
    )
    pair = x_smem.index(index).permute((1, 2, 0)).load(gl.SliceLayout(2, _X_OF_WORDS))
    SHAPE: gl.constexpr = [WARPS, 2 * WIDTH, _PAIRS, 2]
    x, _ = gl.broadcast(gl.expand_dims(pair, 2), gl.zeros(SHAPE, gl.int8, layout=_X_OF_WORDS))
    x = gl.convert_layout(gl.reshape(x, [WARPS, 2 * WIDTH, _COLUMNS]), _X_OF_CODES)
    return mma_v2(codes, x, sums)


@gluon.jit
def _multiply_slice(words, factor, memory, chunk, part, HALF_SCALES: gl.constexpr):
    """The product of a slice of words and its inputs [warps, outputs, pairs of columns]."""
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _PAIR_SUMS))
    x_smem, of_slices = memory[3], memory[5]
    sums = gl.zeros([WARPS, TILE, _COLUMNS], gl.int32, layout=_RESULTS)
    first = 8 * chunk + 2 * part
    sums = _multiply_codes(words, x_smem, first, _LOW_CODES, sums)
    sums = _multiply_codes(words, x_smem, first + 1, _HIGH_CODES, sums)
    upper, lower = gl.split(gl.reshape(sums, [WARPS, TILE, _PAIRS, 2]))
    whole = gl.convert_layout((upper << 8) + lower, _PAIR_SUMS).to(gl.float32)
    zero = (factor & -65536).to(gl.float32, bitcast=True) + 128.0  # -zero.
    total = gl.expand_dims(of_slices.index(8 * chunk + part).load(OF_WARP), 1)
    power = of_slices.index(8 * chunk + 4 + part).load(OF_WARP)
    power = gl.expand_dims(gl.expand_dims(power, 1), 2)
    sums = whole * power + gl.expand_dims(zero * total, 2)
    return sums * gl.expand_dims(_scale_of(factor, HALF_SCALES), 2)


@gluon.jit
def _multiply_tile(result, loaded, memory, chunk, WORDS: gl.constexpr, HALF_SCALES: gl.constexpr):
    """Add the products of a tile and a chunk of x to two sums.

    An instruction of the tensor core waits for the one before that adds to the same sum."""
    sums = ()
    if WORDS:
        for index in gl.static_range(2):
            total = result[index]
            for part in gl.static_range(2 * index, 2 * index + 2):
                words, factor = loaded[2 * part], loaded[2 * part + 1]
                total += _multiply_slice(words, factor, memory, chunk, part, HALF_SCALES)
            sums = sums + (total,)  # noqa: RUF005 (not in Gluon)
    else:
        first = _load_x(memory[3], 2 * chunk)
        second = _load_x(memory[3], 2 * chunk + 1)
        sums = (
            mma_v2(loaded[0].to(gl.float16), first.to(gl.float16), result[0]),
            mma_v2(loaded[1].to(gl.float16), second.to(gl.float16), result[1]),
        )
    return sums


@gluon.jit
def multiply(
    parts,
    memory,
    first,
    end,
    C: gl.constexpr,
    WORDS: gl.constexpr,
    HALF_SCALES: gl.constexpr,
):
    """Multiply the tiles of the turns from `first` to `end` with x. An output has C tiles.

    The results are parts of sums [tiles, warps, outputs].

    HALF_SCALES  scales of words are float16; else bfloat16"""
    ring, full, empty = memory[0], memory[1], memory[2]
    STAGES: gl.constexpr = ring.shape[0] // 2
    if WORDS:
        zeros = gl.zeros([WARPS, TILE, _PAIRS], gl.float32, layout=_PAIR_SUMS)
    else:
        zeros = gl.zeros([WARPS, TILE, _COLUMNS], gl.float32, layout=_RESULTS)
    result = (zeros, zeros)
    for turn in range(first, end):
        slot = turn % STAGES
        mbarrier.wait(full.index(2 * slot), turn // STAGES & 1)
        loaded = _load_half(memory, 2 * slot, WORDS)
        mbarrier.wait(full.index(2 * slot + 1), turn // STAGES & 1)
        loaded = loaded + _load_half(memory, 2 * slot + 1, WORDS)
        mbarrier.arrive(empty.index(slot))
        chunk = (turn - first) % C
        result = _multiply_tile(result, loaded, memory, chunk, WORDS, HALF_SCALES)
        if chunk == C - 1:
            parts.index((turn - first) // C).store(gl.max(result[0] + result[1], 2))
            result = (zeros, zeros)
    barrier()


@gluon.jit
def copy_tiles(memory, asked, SIZES: gl.constexpr):
    """The work of a warp besides those that multiply: copy the tiles of all turns to the ring."""
    ring, empty = memory[0], memory[2]
    STAGES: gl.constexpr = ring.shape[0] // 2
    for turn in range(asked[2][4]):
        mbarrier.wait(empty.index(turn % STAGES), (turn // STAGES & 1) ^ 1)
        _copy_turn(memory, asked, turn, SIZES)
