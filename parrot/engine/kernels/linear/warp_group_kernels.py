"""Products of weights in words on the warp-group instructions of Hopper GPUs, in Gluon.

`warp_groups` launches the kernel. One warp of a program copies words and x to a ring in shared
memory. Four groups of four warps have 64 outputs each. They unpack codes in registers, from which
the tensor core reads them. So 256 outputs share a copy of x, which with 64 rows has as many bytes
as their words."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from parrot.engine.kernels.gluon_parts import LET_NEXT_START, WAIT_FOR_PREVIOUS, barrier, run
from parrot.engine.kernels.linear import warp_group_tiles, words_kernels
from parrot.engine.kernels.linear.chain_tiles import COPIED_FACTORS, COPIED_WORDS, LINEAR, WIDTH
from parrot.engine.kernels.linear.parts import gated

GROUPS = gl.constexpr(4)
SIZE = gl.constexpr(64)  # Outputs of a warp group.
OUTPUTS = gl.constexpr(warp_group_tiles.OUTPUTS)  # Of a program.
BLOCK = gl.constexpr(warp_group_tiles.BLOCK)  # Inputs.
COPY_REGISTERS = gl.constexpr(24)  # Of a thread of the warp that copies.
REGISTERS = gl.constexpr(112)  # Of a thread that multiplies.

COPIED_X = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# The words of an output are 64 bytes. See `chain_tiles`.
_EXCHANGED_WORDS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
_SQUARES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))  # [rows, parts]

_PART_0, _PART_1, _PART_2, _PART_3 = (gl.constexpr(part.value) for part in words_kernels.PARTS)

_scale_of = gluon.jit(words_kernels.scale_of.fn)
_gated = gluon.jit(gated.fn)


@gluon.jit
def _copy_words(memory, index, asked, BYTES: gl.constexpr):
    """Copy the words and factors of a block to the ring. The barrier waits for BYTES with x."""
    ring, factor_ring, _, full, _ = memory
    first, _, tile, _, words, factors, _ = asked
    TILES: gl.constexpr = ring.shape[2]
    slot = index % ring.shape[0]
    at = full.index(slot)
    mbarrier.expect(at, BYTES)
    coordinates = [first + index, tile * TILES, 0, 0, 0]
    tma.async_copy_global_to_shared(words, coordinates, at, ring.index(slot))
    coordinates = [first + index, tile * TILES, 0, 0]
    tma.async_copy_global_to_shared(factors, coordinates, at, factor_ring.index(slot))


@gluon.jit
def _copy_x(memory, index, asked):
    """Copy a block of x to the ring."""
    _, _, x_ring, full, _ = memory
    first, _, _, member, _, _, x = asked
    slot = index % x_ring.shape[0]
    coordinates = [member, (first + index) * BLOCK]
    tma.async_copy_global_to_shared(x, coordinates, full.index(slot), x_ring.index(slot))


@gluon.jit
def _copy(memory, asked):
    """The work of the warp that copies."""
    x_ring, empty = memory[2], memory[4]
    count = asked[1]
    STAGES: gl.constexpr = x_ring.shape[0]
    BYTES: gl.constexpr = OUTPUTS * (2 * WIDTH + 4) + 2 * x_ring.shape[1] * BLOCK
    # No more than one block of words: x would wait behind them.
    if count > 0:
        _copy_words(memory, 0, asked, BYTES)
    run(LET_NEXT_START)
    run(WAIT_FOR_PREVIOUS)
    if count > 0:
        _copy_x(memory, 0, asked)
    for index in range(1, count):
        mbarrier.wait(empty.index(index % STAGES), (index // STAGES & 1) ^ 1)
        _copy_words(memory, index, asked, BYTES)
        _copy_x(memory, index, asked)


@gluon.jit
def _numbers(words, zero, ASSEMBLY: gl.constexpr):
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r", [words, zero], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _side_by_side(first, second):
    """[outputs, n] and [outputs, n] as [outputs, 2 n]."""
    both = gl.permute(gl.join(first, second), (0, 2, 1))
    return gl.reshape(both, [first.shape[0], 2 * first.shape[1]])


@gluon.jit
def _unpacked(words, factor, OPERAND: gl.constexpr):
    """Codes [outputs, inputs] minus their zeros, for words [outputs, words].

    factor  int32 [outputs]"""
    zero = (factor & -65536).to(gl.float32, bitcast=True).to(gl.bfloat16)  # -128 - zero.
    zero, _ = gl.broadcast(gl.expand_dims(zero, 1), words)
    first = _side_by_side(_numbers(words, zero, _PART_0), _numbers(words, zero, _PART_1))
    second = _side_by_side(_numbers(words, zero, _PART_2), _numbers(words, zero, _PART_3))
    return gl.convert_layout(_side_by_side(first, second), OPERAND)  # Renames registers.


@gluon.jit
def _product(memory, count, GROUP: gl.constexpr, SUMS: gl.constexpr, HALF: gl.constexpr):
    """The product of a warp group, float32 [SIZE, rows]."""
    ring, factor_ring, x_ring, full, empty = memory
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    tiles = ring._reinterpret(gl.int16, [STAGES * GROUPS, SIZE, WIDTH], _EXCHANGED_WORDS)
    tile_factors = factor_ring._reinterpret(gl.int32, [STAGES * GROUPS, SIZE], LINEAR)
    zeros = gl.zeros([SIZE, ROWS], gl.float32, layout=SUMS)
    result = zeros
    for index in range(count):
        slot = index % STAGES
        mbarrier.wait(full.index(slot), index // STAGES & 1)
        place = slot * GROUPS + GROUP
        words = tiles.index(place).load(OPERAND)
        factor = tile_factors.index(place).load(gl.SliceLayout(1, OPERAND))
        scale = _scale_of(tile_factors.index(place).load(gl.SliceLayout(1, SUMS)), HALF)
        codes = _unpacked(words, factor, OPERAND)
        x = x_ring.index(slot).permute((1, 0))
        sums = warpgroup_mma(codes, x, zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(slot))
        result += sums * gl.expand_dims(scale, 1)
    return result


@gluon.jit
def _store_norm_factors(
    factors, squares_ptr, eps, member, num_rows, K: gl.constexpr, PARTS: gl.constexpr
):
    """Store the factors that divide rows by their root mean square."""
    ROWS: gl.constexpr = factors.shape[0]
    COLUMNS: gl.constexpr = 1 << (PARTS - 1).bit_length()
    row = gl.expand_dims(member + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SQUARES)), 1)
    part = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _SQUARES)), 0)
    live = (row < num_rows) & (part < PARTS)
    squares = gl.load(squares_ptr + row * PARTS + part, mask=live, other=0.0)
    factors.store(gl.rsqrt(gl.sum(squares, 1) / K + eps))


@gluon.jit
def _gate_and_up(values):
    """Divide values [SIZE, rows] into those of gate and of up."""
    ROWS: gl.constexpr = values.shape[1]
    tiles = gl.reshape(values, [SIZE // 16, 2, 8, ROWS])
    return gl.split(gl.permute(tiles, (0, 2, 3, 1)))


@gluon.jit
def _multiply(
    memory,
    count,
    stored,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    HALF: gl.constexpr,
    SHIFT: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The work of a warp group."""
    tile, member, num_rows, norm_factors, squares_ptr, eps, bias_ptr, out_ptr = stored
    ROWS: gl.constexpr = memory[2].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    if PARTS > 0:
        # Before the product, and not in registers, which it needs.
        run(WAIT_FOR_PREVIOUS)
        own_factors = norm_factors.index(GROUP)
        _store_norm_factors(own_factors, squares_ptr, eps, member, num_rows, K, PARTS)
    result = _product(memory, count, GROUP, SUMS, HALF)
    if PARTS > 0:
        result *= gl.expand_dims(own_factors.load(gl.SliceLayout(0, SUMS)), 0)
    if SHIFT > 0:
        result *= 1.0 / (1 << SHIFT)
    kind = out_ptr.dtype.element_ty
    index = gl.arange(0, SIZE, layout=gl.SliceLayout(1, SUMS))
    row = member + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), 0)
    split = gl.program_id(1)
    if SILU:
        output = tile * (OUTPUTS // 2) + GROUP * (SIZE // 2) + index // 16 * 8 + index % 8
        row_of_weight = output + index // 8 % 2 * N
    else:
        output = tile * OUTPUTS + GROUP * SIZE + index
        row_of_weight = output
    if bias_ptr is not None:
        has_bias = (output < N) & (split == 0)
        bias = gl.load(bias_ptr + row_of_weight, mask=has_bias, other=0.0).to(gl.float32)
        result += gl.expand_dims(bias, 1)
    output = gl.expand_dims(output, 1)
    place = gl.where((output < N) & (row < num_rows), row * N + output, -1)
    if SILU:
        gate, up = _gate_and_up(result)
        place, _ = _gate_and_up(place)
        result = _gated(gate, up, kind)
    out_at = out_ptr + split.to(gl.int64) * num_rows * N + place
    gl.store(out_at, result.to(kind), mask=place >= 0)


@gluon.jit(do_not_specialize=["num_rows", "split_blocks"])  # One variant for all of them.
def warp_group_kernel(
    x,
    words,
    factors,
    squares_ptr,
    bias_ptr,
    out_ptr,
    eps,
    num_rows,
    split_blocks,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCKS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    SHIFT: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Program (tile of OUTPUTS rows of weights, split, ROWS rows): out = x weight^T + bias.

    A split has `split_blocks` of the BLOCKS blocks of inputs, and its own out. The first one adds
    the bias.

    x        descriptor of bfloat16 [num_rows, K]
    words    descriptor, see `warp_groups.words_tiles`; so are factors
    out      [splits, num_rows, N]
    SILU     a tile has 8 rows of gate, 8 of up, and so on; out = silu(gate) * up
    HALF     scales are float16; else bfloat16
    SHIFT    factors are 2^SHIFT times too large
    PARTS    divide x by its root mean square; squares [num_rows, PARTS]; 0: do not
    STAGES   blocks in the ring"""
    ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, 1, OUTPUTS // 16, 2, 8, WIDTH], COPIED_WORDS
    )
    factor_ring = gl.allocate_shared_memory(
        gl.int32, [STAGES, 1, OUTPUTS // 16, 2, 8], COPIED_FACTORS
    )
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK], COPIED_X)
    norm_factors = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], LINEAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    barrier()
    tile = gl.program_id(0)
    first = gl.program_id(1) * split_blocks
    count = gl.minimum(split_blocks, BLOCKS - first)
    member = gl.program_id(2) * ROWS
    memory = (ring, factor_ring, x_ring, full, empty)
    asked = (first, count, tile, member, words, factors, x)
    stored = (tile, member, num_rows, norm_factors, squares_ptr, eps, bias_ptr, out_ptr)
    gl.warp_specialize(
        [
            (_multiply, (memory, count, stored, 0, N, K, HALF, SHIFT, SILU, PARTS)),
            (_multiply, (memory, count, stored, 1, N, K, HALF, SHIFT, SILU, PARTS)),
            (_multiply, (memory, count, stored, 2, N, K, HALF, SHIFT, SILU, PARTS)),
            (_multiply, (memory, count, stored, 3, N, K, HALF, SHIFT, SILU, PARTS)),
            (_copy, (memory, asked)),
        ],
        [4, 4, 4, 1],
        [REGISTERS, REGISTERS, REGISTERS, COPY_REGISTERS],
    )
