"""The kernel of `chain`: all matrix products between two attentions, for one row.

It is written in Gluon, Triton's lower level: programs ask for weights before they wait for each
other. Its programs run at the same time, one on each multiprocessor."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="index, operator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from parrot.engine.kernels import e4m3
from parrot.engine.kernels.linear.parts import gated

# A tile of weights is 16 outputs and 2048 inputs. Each of 8 warps multiplies two slices of 128
# inputs.
TILE = gl.constexpr(16)
INPUTS = gl.constexpr(2048)
SLICE = gl.constexpr(128)
WARPS = gl.constexpr(8)
_SLICES = gl.constexpr(16)
_COLUMNS = gl.constexpr(8)  # Of the tensor core's results. All columns are equal.

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # The second name is Triton 3.6's.
_bits_of = gluon.jit(e4m3.bits_of.fn)
_exponent_of = gluon.jit(e4m3.exponent_of.fn)
_power_of = gluon.jit(e4m3.power_of.fn)
_inverse_of = gluon.jit(e4m3.inverse_of.fn)
_float8_of = gluon.jit(e4m3.float8_of.fn)
_gated = gluon.jit(gated.fn)

# One thread of a program adds 1 to a counter, or waits until it has a value.
_ADD = gl.constexpr("""{
.reg .pred other;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.ne.u32 other, thread, 0;
@other bra END;
red.release.gpu.global.add.u32 [$1], 1;
END:
mov.u32 $0, 0;
}""")
_WAIT = gl.constexpr("""{
.reg .pred other, less;
.reg .b32 thread, value;
mov.u32 thread, %tid.x;
setp.ne.u32 other, thread, 0;
@other bra END;
AGAIN:
ld.acquire.gpu.global.u32 value, [$1];
setp.lt.u32 less, value, $2;
@less bra AGAIN;
END:
mov.u32 $0, 0;
}""")
_WAIT_FOR_PREVIOUS = gl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
_LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, 0;")

# Layouts. The tensor core's results have dimensions [warps, outputs, columns].
_RESULTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])
)
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _RESULTS.value, 4))
_ROWS = gl.constexpr(gl.DotOperandLayout(1, _RESULTS.value, 4))
_LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINEAR_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINEAR_3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# x, in chunks of as many numbers as a tile has inputs.
_CHUNKS = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
# Sums [tiles, outputs], their parts [tiles, warps, outputs], and sums [tiles, outputs / 2, halves].
_SUMS = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0]))
_PARTS = gl.constexpr(gl.BlockedLayout([1, 8, 1], [2, 1, 16], [8, 1, 1], [2, 1, 0]))
_SPLIT = gl.constexpr(gl.BlockedLayout([1, 1, 2], [4, 8, 1], [8, 1, 1], [2, 1, 0]))
# Rows of 128 bytes whose parts of 16 bytes are exchanged, so that no bank of shared memory has a
# part of two rows of eight.
_EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
COPIED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5))


@gluon.constexpr_function
def _chunks(size):
    """Chunks of x with this number of inputs."""
    return -(-size // INPUTS.value)


@gluon.jit
def _run(ASSEMBLY: gl.constexpr):
    """An instruction without operands."""
    arguments = [gl.to_tensor(0)]
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", arguments, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _publish(counter):
    """Show the program's stores to all programs that wait for the counter."""
    _barrier()
    gl.inline_asm_elementwise(_ADD, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for(counter, COUNT: gl.constexpr):
    arguments = [counter, gl.to_tensor(COUNT)]
    gl.inline_asm_elementwise(_WAIT, "=r,l,r", arguments, dtype=gl.int32, is_pure=False, pack=1)
    _barrier()


@gluon.jit
def _copy(ring, full, turn, weight, chunk, group, output):
    """Start to copy a tile to the ring. `group`, `output`: its place, see `chain._tiles`."""
    STAGES: gl.constexpr = ring.shape[0]
    slot = turn % STAGES
    mbarrier.expect(full.index(slot), TILE * INPUTS)
    place = [chunk * _SLICES, group, 0, output, 0]
    tma.async_copy_global_to_shared(weight, place, full.index(slot), ring.index(slot))


@gluon.jit
def _ask(
    ring,
    full,
    turn,
    weights,
    ends,
    C_HEADS: gl.constexpr,
    C_HIDDEN: gl.constexpr,
    C_INNER: gl.constexpr,
    D: gl.constexpr,
    NUM: gl.constexpr,
):
    """Ask for the tile of a turn, if there is one. `ends`: the first turn after each product."""
    program = gl.program_id(0)
    if turn < ends[0]:
        _copy(ring, full, turn, weights[0], turn % C_HEADS, program + turn // C_HEADS * NUM, 0)
    elif turn < ends[1]:
        index = turn - ends[0]
        tile = program + index // C_HIDDEN * NUM
        _copy(ring, full, turn, weights[1], index % C_HIDDEN, 0, tile * (TILE // 2))
    elif turn < ends[2]:
        index = turn - ends[1]
        _copy(ring, full, turn, weights[2], index % C_INNER, program + index // C_INNER * NUM, 0)
    elif turn < ends[3]:
        index = turn - ends[2]
        tile = program + index // C_HIDDEN * NUM
        OF_HEAD: gl.constexpr = D // TILE
        output = tile % OF_HEAD * (TILE // 2)
        _copy(ring, full, turn, weights[3], index % C_HIDDEN, tile // OF_HEAD, output)


@gluon.jit
def _load_x(x_smem, chunk, HALF: gl.constexpr):
    """Half of a chunk of x [warps, 128, columns] in float16."""
    row = x_smem.index(2 * chunk + HALF).load(gl.SliceLayout(2, _ROWS)).to(gl.float16)
    columns = gl.zeros([WARPS, SLICE, _COLUMNS], gl.float16, layout=_ROWS)
    found, _ = gl.broadcast(gl.expand_dims(row, 2), columns)
    return found


@gluon.jit
def _multiply(
    ring,
    full,
    parts,
    x_smem,
    first,
    end,
    weights,
    ends,
    C: gl.constexpr,
    C_HEADS: gl.constexpr,
    C_HIDDEN: gl.constexpr,
    C_INNER: gl.constexpr,
    D: gl.constexpr,
    NUM: gl.constexpr,
):
    """Multiply the tiles of the turns from `first` to `end` with x. An output has C tiles.

    The results are parts of sums [tiles, warps, outputs]. A tile that is read is replaced in the
    ring by the copy of a later one."""
    STAGES: gl.constexpr = ring.shape[0]
    tiles = ring._reinterpret(gl.float8e4nv, [2 * STAGES, WARPS, TILE, SLICE], _EXCHANGED)
    result = gl.zeros([WARPS, TILE, _COLUMNS], gl.float32, layout=_RESULTS)
    for turn in range(first, end):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), turn // STAGES & 1)
        weight = tiles.index(2 * slot).load(_WEIGHTS)
        other = tiles.index(2 * slot + 1).load(_WEIGHTS)
        _barrier()
        _ask(ring, full, turn + STAGES, weights, ends, C_HEADS, C_HIDDEN, C_INNER, D, NUM)
        chunk = (turn - first) % C
        result = mma_v2(weight.to(gl.float16), _load_x(x_smem, chunk, 0), result)
        result = mma_v2(other.to(gl.float16), _load_x(x_smem, chunk, 1), result)
        if chunk == C - 1:
            parts.index((turn - first) // C).store(gl.max(result, 2))
            result = gl.zeros([WARPS, TILE, _COLUMNS], gl.float32, layout=_RESULTS)
    _barrier()


@gluon.jit
def _load_chunk(x_ptr, column, CHUNK: gl.constexpr, K: gl.constexpr):
    """A chunk of x. After the last column are copies of other columns.

    Their weights are zeros. Zeros here would be converted to e4m3 at compile time, which
    ptxas of CUDA 12.8 does wrong."""
    place = CHUNK * INPUTS + column
    if CHUNK * INPUTS + INPUTS > K:
        place = place % K
    # Not through L1, which does not see the stores of other programs.
    return gl.load(x_ptr + place, cache_modifier=".cg")


@gluon.jit
def _prepare(
    x_smem,
    x_ptr,
    squares_ptr,
    eps,
    K: gl.constexpr,
    NUM: gl.constexpr,
    NORM: gl.constexpr,
):
    """Round x to e4m3 for the product. Returns its power of two.

    NORM  x is divided by its root mean square first"""
    C: gl.constexpr = _chunks(K)
    column = gl.arange(0, INPUTS, layout=_CHUNKS)
    loaded = ()
    for chunk in gl.static_range(C):
        loaded = loaded + (_load_chunk(x_ptr, column, chunk, K),)  # noqa: RUF005 (not in Gluon)
    kind = x_ptr.dtype.element_ty
    if NORM:
        PARTS: gl.constexpr = 256 if NUM <= 256 else 512
        part = gl.arange(0, PARTS, layout=_CHUNKS)
        squares = gl.load(squares_ptr + part, mask=part < NUM, other=0.0, cache_modifier=".cg")
        factor = gl.rsqrt(gl.sum(squares, 0) / K + eps)
        divided = ()
        for chunk in gl.static_range(C):
            # Rounded as separate kernels would round.
            x = (loaded[chunk].to(gl.float32) * factor).to(kind)
            divided = divided + (x,)  # noqa: RUF005
        loaded = divided
    largest = gl.zeros([INPUTS], gl.int32, layout=_CHUNKS)
    for chunk in gl.static_range(C):
        largest = gl.maximum(largest, _bits_of(loaded[chunk].to(gl.float32)))
    exponent = _exponent_of(gl.max(largest, 0))
    inverse = _inverse_of(exponent)
    chunks = x_smem._reinterpret(gl.float8e4nv, [x_smem.shape[0] // 2, INPUTS], _LINEAR)
    for chunk in gl.static_range(C):
        chunks.index(chunk).store(_float8_of(loaded[chunk].to(gl.float32) * inverse))
    _barrier()
    return _power_of(exponent)


@gluon.jit
def _load_sums(parts, T: gl.constexpr):
    """The sums of the first T tiles [T, TILE]."""
    count: gl.constexpr = parts.shape[0] // T
    tiles = parts._reinterpret(gl.float32, [count, T, WARPS, TILE], _LINEAR_3).index(0)
    return gl.convert_layout(gl.sum(tiles.load(_PARTS), 1), _SUMS)


@gluon.jit
def _load_halves(parts, T: gl.constexpr):
    """The sums of the first T tiles as two tensors [T, TILE / 2]."""
    halves = gl.permute(gl.reshape(_load_sums(parts, T), [T, 2, TILE // 2]), (0, 2, 1))
    first, second = gl.split(gl.convert_layout(halves, _SPLIT))
    return gl.convert_layout(first, _SUMS), gl.convert_layout(second, _SUMS)


@gluon.jit
def chain_kernel(
    attended_ptr,
    residual_ptr,
    out_weight,
    out_scales_ptr,
    gate_up_weight,
    gate_up_scales_ptr,
    down_weight,
    down_scales_ptr,
    qkv_weight,
    qkv_scales_ptr,
    qkv_bias_ptr,
    gain_ptr,
    next_gain_ptr,
    rows_ptr,
    squares_ptr,
    inner_ptr,
    q_ptr,
    positions,
    table_rows,
    tables,
    cos_sin,
    k_cache,
    v_cache,
    counters,
    eps,
    next_eps,
    stride_page,
    stride_table,
    HIDDEN: gl.constexpr,
    HEADS: gl.constexpr,
    INNER: gl.constexpr,
    H: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    HAS_QKV: gl.constexpr,
    BIAS: gl.constexpr,
    T_HIDDEN: gl.constexpr,
    T_INNER: gl.constexpr,
    T_QKV: gl.constexpr,
    X_CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    NUM: gl.constexpr,
):
    """out, gate and up, down, and qkv of the next layer, for one row.

    Its NUM programs meet after each product.

    attended       [HEADS]
    residual       [HIDDEN], updated
    *_weight       tiles of the weights (`chain._tiles`); *_scales float32 [outputs]
    rows           [2, HIDDEN]: the residual after out and down, times gain or next_gain
    squares        float32 [2, NUM], sums of squares of parts of the residual
    inner          [INNER]
    counters       int32 [3], zeros
    T_*            at least the number of tiles of a program; powers of two
    other arguments: see `row_qkv_kernel`"""
    program = gl.program_id(0)
    C_HEADS: gl.constexpr = _chunks(HEADS)
    C_HIDDEN: gl.constexpr = _chunks(HIDDEN)
    C_INNER: gl.constexpr = _chunks(INNER)
    QKV: gl.constexpr = (H + 2 * HKV) * D if HAS_QKV else 0
    T_MOST: gl.constexpr = max(T_HIDDEN, T_INNER, T_QKV)
    kind = rows_ptr.dtype.element_ty

    ring = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES, _SLICES, 1, 2, TILE // 2, SLICE], COPIED
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [2 * X_CHUNKS, WARPS, SLICE], _LINEAR_2)
    parts = gl.allocate_shared_memory(gl.float32, [T_MOST, WARPS, TILE], _LINEAR_2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    _barrier()

    after_out = (HIDDEN // TILE - program + NUM - 1) // NUM * C_HEADS
    after_gate_up = after_out + (2 * INNER // TILE - program + NUM - 1) // NUM * C_HIDDEN
    after_down = after_gate_up + (HIDDEN // TILE - program + NUM - 1) // NUM * C_INNER
    after_qkv = after_down
    if HAS_QKV:
        after_qkv += (QKV // TILE - program + NUM - 1) // NUM * C_HIDDEN
    weights = (out_weight, gate_up_weight, down_weight, qkv_weight)
    ends = (after_out, after_gate_up, after_down, after_qkv)
    for turn in range(STAGES):
        _ask(ring, full, turn, weights, ends, C_HEADS, C_HIDDEN, C_INNER, D, NUM)

    # Sums [tiles, outputs] of out and down, and of half the outputs of the other products.
    OF_TILE: gl.constexpr = gl.SliceLayout(1, _SUMS)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(0, _SUMS)
    index = gl.expand_dims(gl.arange(0, TILE, layout=OF_OUTPUT), 0)
    half = gl.expand_dims(gl.arange(0, TILE // 2, layout=OF_OUTPUT), 0)
    tile = gl.expand_dims(gl.arange(0, T_HIDDEN, layout=OF_TILE), 1)
    output = (program + tile * NUM) * TILE + index
    inside = output < HIDDEN
    scale = gl.load(out_scales_ptr + output, mask=inside, other=0.0)
    gain = gl.load(gain_ptr + output, mask=inside, other=0.0).to(gl.float32)
    _run(_WAIT_FOR_PREVIOUS)
    before = gl.load(residual_ptr + output, mask=inside, other=0.0, cache_modifier=".cg")
    before = before.to(gl.float32)

    power = _prepare(x_smem, attended_ptr, squares_ptr, eps, HEADS, NUM, False)
    _multiply(
        ring, full, parts, x_smem, 0, after_out, weights, ends,
        C_HEADS, C_HEADS, C_HIDDEN, C_INNER, D, NUM,
    )  # fmt: skip
    result = _load_sums(parts, T_HIDDEN) * (scale * power)
    before = gl.where(inside, before + result, 0.0).to(kind).to(gl.float32)
    gl.store(rows_ptr + output, (before * gain).to(kind), mask=inside)
    gl.store(squares_ptr + program, gl.sum(gl.sum(before * before, 1), 0))
    _publish(counters)

    inner_tile = gl.expand_dims(gl.arange(0, T_INNER, layout=OF_TILE), 1)
    inner = (program + inner_tile * NUM) * (TILE // 2) + half
    in_inner = inner < INNER
    gate_scale = gl.load(gate_up_scales_ptr + inner, mask=in_inner, other=0.0)
    up_scale = gl.load(gate_up_scales_ptr + INNER + inner, mask=in_inner, other=0.0)
    _wait_for(counters, NUM)
    power = _prepare(x_smem, rows_ptr, squares_ptr, eps, HIDDEN, NUM, True)
    _multiply(
        ring, full, parts, x_smem, after_out, after_gate_up, weights, ends,
        C_HIDDEN, C_HEADS, C_HIDDEN, C_INNER, D, NUM,
    )  # fmt: skip
    gate, up = _load_halves(parts, T_INNER)
    result = _gated(gate * (gate_scale * power), up * (up_scale * power), kind)
    gl.store(inner_ptr + inner, result.to(kind), mask=in_inner)
    _publish(counters + 1)

    scale = gl.load(down_scales_ptr + output, mask=inside, other=0.0)
    gain = gl.load(next_gain_ptr + output, mask=inside, other=0.0).to(gl.float32)
    _wait_for(counters + 1, NUM)
    power = _prepare(x_smem, inner_ptr, squares_ptr, eps, INNER, NUM, False)
    _multiply(
        ring, full, parts, x_smem, after_gate_up, after_down, weights, ends,
        C_INNER, C_HEADS, C_HIDDEN, C_INNER, D, NUM,
    )  # fmt: skip
    result = _load_sums(parts, T_HIDDEN) * (scale * power)
    total = gl.where(inside, before + result, 0.0).to(kind)
    gl.store(residual_ptr + output, total, mask=inside)
    total = total.to(gl.float32)
    gl.store(rows_ptr + HIDDEN + output, (total * gain).to(kind), mask=inside)
    gl.store(squares_ptr + NUM + program, gl.sum(gl.sum(total * total, 1), 0))
    if not HAS_QKV:
        _run(_LET_NEXT_START)
    else:
        _publish(counters + 2)
        qkv_tile = program + gl.expand_dims(gl.arange(0, T_QKV, layout=OF_TILE), 1) * NUM
        head = qkv_tile // (D // TILE)
        dim = qkv_tile % (D // TILE) * (TILE // 2) + half
        in_heads = head < H + 2 * HKV
        first_scale = gl.load(qkv_scales_ptr + head * D + dim, mask=in_heads, other=0.0)
        second_scale = gl.load(qkv_scales_ptr + head * D + D // 2 + dim, mask=in_heads, other=0.0)
        table_row = gl.load(table_rows)
        placed = table_row >= 0
        position = gl.load(positions)
        angle_at = cos_sin + position * D + dim
        cos = gl.load(angle_at, mask=placed & in_heads, other=0.0)
        sin = gl.load(angle_at + D // 2, mask=placed & in_heads, other=0.0)
        page = gl.load(tables + table_row * stride_table + position // PAGE, mask=placed, other=0)
        _wait_for(counters + 2, NUM)
        _run(_LET_NEXT_START)
        power = _prepare(x_smem, rows_ptr + HIDDEN, squares_ptr + NUM, next_eps, HIDDEN, NUM, True)
        _multiply(
            ring, full, parts, x_smem, after_down, after_qkv, weights, ends,
            C_HIDDEN, C_HEADS, C_HIDDEN, C_INNER, D, NUM,
        )  # fmt: skip
        first, second = _load_halves(parts, T_QKV)
        first = first * (first_scale * power)
        second = second * (second_scale * power)
        if BIAS:
            bias_at = qkv_bias_ptr + head * D + dim
            first += gl.load(bias_at, mask=in_heads, other=0.0).to(gl.float32)
            second += gl.load(bias_at + D // 2, mask=in_heads, other=0.0).to(gl.float32)
        first = first.to(kind)
        second = second.to(kind)
        turned = first.to(gl.float32) * cos - second.to(gl.float32) * sin
        other = second.to(gl.float32) * cos + first.to(gl.float32) * sin
        is_q = placed & (head < H)
        gl.store(q_ptr + head * D + dim, turned.to(kind), mask=is_q)
        gl.store(q_ptr + head * D + D // 2 + dim, other.to(kind), mask=is_q)
        kv_head = (head - H) % HKV
        place = page.to(gl.int64) * stride_page + position % PAGE * D + kv_head * (PAGE * D) + dim
        is_k = placed & (head >= H) & (head < H + HKV)
        gl.store(k_cache + place, turned.to(kind), mask=is_k)
        gl.store(k_cache + place + D // 2, other.to(kind), mask=is_k)
        is_v = placed & in_heads & (head >= H + HKV)
        gl.store(v_cache + place, first, mask=is_v)
        gl.store(v_cache + place + D // 2, second, mask=is_v)
