"""Tiles of weights in a ring in shared memory, and their products with a row, in Gluon.

For `chain_kernels`. Weights are codes in e4m3 [outputs, inputs], or words of four bits in groups
of 128 (see `words_kernels`). With e4m3, x is in e4m3.

With words, x is in float16. A code is not converted: with a constant, its bits are those of the
float16 number 256 + code or 16 + code. A product with x is then too large by 256 or 16 times the
sum of x, which is subtracted from the sums of a group. So eight codes need two shifts and no
addition. (128 + code, in bfloat16, needs three shifts. 1024 + code, in float16, needs one, but the
tensor core's sums are less exact.)"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="index, operator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
_COLUMNS = gl.constexpr(8)  # Of the tensor core's results. All columns are equal.

_scale_of = gluon.jit(words_kernels.scale_of.fn)

# 256 + code or 16 + code in float16, for the codes of a part of two words.
_NUMBERS = """{{
.reg .b32 codes;
{shift}.b32 codes, $1, {places};
lop3.b32 $0, codes, {mask}, {base}, 0xEA;
}}"""
_PLUS_256 = {"mask": "0x003C003C", "base": "0x5C005C00"}
_PLUS_16 = {"mask": "0x03C003C0", "base": "0x4C004C00"}
_NUMBERS_0 = gl.constexpr(_NUMBERS.format(shift="shl", places=2, **_PLUS_256))
_NUMBERS_1 = gl.constexpr(_NUMBERS.format(shift="shl", places=2, **_PLUS_16))
_NUMBERS_2 = gl.constexpr(_NUMBERS.format(shift="shr", places=6, **_PLUS_256))
_NUMBERS_3 = gl.constexpr(_NUMBERS.format(shift="shr", places=6, **_PLUS_16))

# Layouts. The tensor core's results have dimensions [warps, outputs, columns].
_RESULTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])
)
_CODES = gl.constexpr(gl.DotOperandLayout(0, _RESULTS.value, 4))
_X_OF_CODES = gl.constexpr(gl.DotOperandLayout(1, _RESULTS.value, 4))
_WORDS = gl.constexpr(gl.DotOperandLayout(0, _RESULTS.value, 2))
_X_OF_WORDS = gl.constexpr(gl.DotOperandLayout(1, _RESULTS.value, 2))
_LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINEAR_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINEAR_4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
# Rows of a tile whose parts of 16 bytes are exchanged, so that no bank of shared memory has a part
# of two rows of eight. A row has 128 bytes, or the 64 of 32 words.
_EXCHANGED_CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
_EXCHANGED_WORDS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
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

    With words, also a ring of their factors, and room for two sums of each slice of x."""
    HALF: gl.constexpr = TILE // 2
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if WORDS:
        ring = gl.allocate_shared_memory(
            gl.int16, [2 * STAGES, 16, 1, 2, HALF, WIDTH], COPIED_WORDS
        )
        x = gl.allocate_shared_memory(gl.float16, [16 * X_CHUNKS, WARPS, WIDTH], _LINEAR_2)
        factors = gl.allocate_shared_memory(gl.int32, [STAGES, 32, 1, 2, HALF], COPIED_FACTORS)
        sums = gl.allocate_shared_memory(gl.float32, [8 * X_CHUNKS, WARPS], _LINEAR)
        memory = (ring, full, empty, x, factors, sums)
    else:
        ring = gl.allocate_shared_memory(
            gl.float8e4nv, [2 * STAGES, 8, 1, 2, HALF, SLICE], COPIED_CODES
        )
        x = gl.allocate_shared_memory(gl.float8e4nv, [2 * X_CHUNKS, WARPS, SLICE], _LINEAR_2)
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
    chunks = x_smem._reinterpret(gl.float8e4nv, [x_smem.numel // INPUTS, INPUTS], _LINEAR)
    chunks.index(chunk).store(codes)


@gluon.jit
def store_numbers(memory, chunk: gl.constexpr, x):
    """Store a chunk of x, float32, for words. Part p of a slice has inputs 32 p to 32 p + 31.

    A slice has two sums: of x, and of the surplus that products have if zeros are -128."""
    x_smem = memory[3]
    INPUTS: gl.constexpr = x.shape[0]
    SLICES: gl.constexpr = INPUTS // SLICE
    CHUNKS: gl.constexpr = x_smem.numel // INPUTS
    stored = x.to(gl.float16)
    slices = gl.permute(gl.reshape(stored, [SLICES // WARPS, WARPS, 4, WIDTH]), (0, 2, 1, 3))
    SHAPE: gl.constexpr = [CHUNKS, SLICES // WARPS, 4, WARPS, WIDTH]
    x_smem._reinterpret(gl.float16, SHAPE, _LINEAR_4).index(chunk).store(slices)
    stored = stored.to(gl.float32)
    place = gl.arange(0, INPUTS, layout=x.type.layout)
    surplus = gl.where(place // WIDTH % 2 == 0, 256 - 128, 16 - 128)
    total = gl.sum(gl.reshape(stored, [SLICES, SLICE]), 1)
    excess = gl.sum(gl.reshape(stored * surplus, [SLICES, SLICE]), 1)
    rows = memory[5]._reinterpret(gl.float32, [2 * CHUNKS, SLICES], _LINEAR)
    rows.index(2 * chunk).store(total)
    rows.index(2 * chunk + 1).store(excess)


@gluon.jit
def _load_x(x_smem, index, LAYOUT: gl.constexpr):
    """A part of x [warps, inputs, columns]."""
    row = x_smem.index(index).load(gl.SliceLayout(2, LAYOUT))
    SHAPE: gl.constexpr = [row.shape[0], row.shape[1], _COLUMNS]
    found, _ = gl.broadcast(gl.expand_dims(row, 2), gl.zeros(SHAPE, row.dtype, layout=LAYOUT))
    return found


@gluon.jit
def _load_half(memory, place, WORDS: gl.constexpr):
    """Half a tile [warps, outputs, inputs or words] in registers.

    Each of two slices of words is followed by its factors."""
    ring = memory[0]
    HALVES: gl.constexpr = ring.shape[0]
    if WORDS:
        tiles = ring._reinterpret(gl.int16, [2 * HALVES, WARPS, TILE, WIDTH], _EXCHANGED_WORDS)
        factors = memory[4]._reinterpret(gl.int32, [2 * HALVES, WARPS, TILE], _LINEAR_2)
        found = ()
        for part in gl.static_range(2):
            words = tiles.index(2 * place + part).load(_WORDS)
            factor = factors.index(2 * place + part).load(gl.SliceLayout(2, _RESULTS))
            found = found + (words, factor)  # noqa: RUF005 (not in Gluon)
    else:
        tiles = ring._reinterpret(gl.float8e4nv, [HALVES, WARPS, TILE, SLICE], _EXCHANGED_CODES)
        found = (tiles.index(place).load(_CODES),)
    return found


@gluon.jit
def _multiply_part(words, x_smem, index, ASSEMBLY: gl.constexpr, sums):
    """Add the product of a part of a slice's words and its inputs."""
    numbers = gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2
    )
    return mma_v2(numbers, _load_x(x_smem, index, _X_OF_WORDS), sums)


@gluon.jit
def _multiply_slice(words, factor, memory, chunk, part, HALF_SCALES: gl.constexpr):
    """The product of a slice of words and its inputs."""
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _RESULTS))
    x_smem, x_sums = memory[3], memory[5]
    sums = gl.zeros([WARPS, TILE, _COLUMNS], gl.float32, layout=_RESULTS)
    first = 16 * chunk + 4 * part
    sums = _multiply_part(words, x_smem, first, _NUMBERS_0, sums)
    sums = _multiply_part(words, x_smem, first + 1, _NUMBERS_1, sums)
    sums = _multiply_part(words, x_smem, first + 2, _NUMBERS_2, sums)
    sums = _multiply_part(words, x_smem, first + 3, _NUMBERS_3, sums)
    zero = (factor & -65536).to(gl.float32, bitcast=True)  # -128 - zero.
    total = gl.expand_dims(x_sums.index(8 * chunk + part).load(OF_WARP), 1)
    excess = gl.expand_dims(x_sums.index(8 * chunk + 4 + part).load(OF_WARP), 1)
    sums += gl.expand_dims(zero * total - excess, 2)
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
        first = _load_x(memory[3], 2 * chunk, _X_OF_CODES)
        second = _load_x(memory[3], 2 * chunk + 1, _X_OF_CODES)
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
