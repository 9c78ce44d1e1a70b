"""The kernel of `chain`: all matrix products between two attentions, for one row.

It is written in Gluon, Triton's lower level: programs ask for weights before they wait for each
other. Its programs run at the same time, one on each multiprocessor."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="index, operator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from parrot.engine.kernels import e4m3
from parrot.engine.kernels.gluon_parts import LET_NEXT_START, WAIT_FOR_PREVIOUS, barrier, run
from parrot.engine.kernels.linear.chain_tiles import (
    LINEAR_2,
    LINEAR_3,
    TILE,
    WARPS,
    allocate,
    chunk_layout,
    copy_tiles,
    multiply,
    num_chunks,
    num_early_chunks,
    num_late_chunks,
    num_rounds,
    store_codes,
    store_numbers,
    tile_inputs,
)
from parrot.engine.kernels.linear.parts import gated

_bits_of = gluon.jit(e4m3.bits_of.fn)
_exponent_of = gluon.jit(e4m3.exponent_of.fn)
_power_of = gluon.jit(e4m3.power_of.fn)
_inverse_of = gluon.jit(e4m3.inverse_of.fn)
_float8_of = gluon.jit(e4m3.float8_of.fn)
_gated = gluon.jit(gated.fn)

COPY_REGISTERS = gl.constexpr(24)  # Of a thread of the warp that copies tiles.

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

# Layouts of sums of squares, of sums [tiles, outputs], of their parts [tiles, warps, outputs], and
# of sums [tiles, outputs / 2, halves].
_SQUARES = gl.constexpr(gl.BlockedLayout([8], [32], [8], [0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0]))
_PARTS = gl.constexpr(gl.BlockedLayout([1, 8, 1], [2, 1, 16], [8, 1, 1], [2, 1, 0]))
_SPLIT = gl.constexpr(gl.BlockedLayout([1, 1, 2], [4, 8, 1], [8, 1, 1], [2, 1, 0]))


@gluon.jit
def _publish(counter):
    """Show the program's stores to all programs that wait for the counter."""
    barrier()
    gl.inline_asm_elementwise(_ADD, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for(counter, COUNT: gl.constexpr):
    arguments = [counter, gl.to_tensor(COUNT)]
    gl.inline_asm_elementwise(_WAIT, "=r,l,r", arguments, dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def _load_chunk(x_ptr, column, CHUNK: gl.constexpr, K: gl.constexpr):
    """A chunk of x. After the last column are copies of other columns.

    Their weights are zeros. Zeros here would be converted to e4m3 at compile time, which
    ptxas of CUDA 12.8 does wrong."""
    INPUTS: gl.constexpr = column.shape[0]
    place = CHUNK * INPUTS + column
    if CHUNK * INPUTS + INPUTS > K:
        place = place % K
    # Not through L1, which does not see the stores of other programs.
    return gl.load(x_ptr + place, cache_modifier=".cg")


@gluon.jit
def _prepare(
    memory,
    x_ptr,
    squares_ptr,
    eps,
    K: gl.constexpr,
    NUM: gl.constexpr,
    NORM: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Store x for the product, in e4m3 times a power of two. Returns a factor of the product.

    NORM  x is divided by its root mean square: before it is rounded to e4m3, or in the factor"""
    C: gl.constexpr = num_chunks(K, WORDS)
    LAYOUT: gl.constexpr = chunk_layout(WORDS)
    column = gl.arange(0, tile_inputs(WORDS), layout=LAYOUT)
    loaded = ()
    for chunk in gl.static_range(C):
        loaded = loaded + (_load_chunk(x_ptr, column, chunk, K),)  # noqa: RUF005 (not in Gluon)
    kind = x_ptr.dtype.element_ty
    factor = gl.to_tensor(1.0)
    if NORM:
        PARTS: gl.constexpr = 256 if NUM <= 256 else 512
        part = gl.arange(0, PARTS, layout=_SQUARES)
        squares = gl.load(squares_ptr + part, mask=part < NUM, other=0.0, cache_modifier=".cg")
        factor = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    if NORM and not WORDS:
        divided = ()
        for chunk in gl.static_range(C):
            # Rounded as separate kernels would round.
            divided = divided + ((loaded[chunk].to(gl.float32) * factor).to(kind),)  # noqa: RUF005
        loaded = divided
    if WORDS:
        for chunk in gl.static_range(C):
            store_numbers(memory, chunk, loaded[chunk].to(gl.float32))
    else:
        largest = gl.zeros([tile_inputs(WORDS)], gl.int32, layout=LAYOUT)
        for chunk in gl.static_range(C):
            largest = gl.maximum(largest, _bits_of(loaded[chunk].to(gl.float32)))
        exponent = _exponent_of(gl.max(largest, 0))
        inverse = _inverse_of(exponent)
        for chunk in gl.static_range(C):
            store_codes(memory, chunk, _float8_of(loaded[chunk].to(gl.float32) * inverse))
        factor = _power_of(exponent)
    barrier()
    return factor


@gluon.jit
def _load_scales(scales_ptr, output, inside):
    """The scales of outputs; 1 for weights without them."""
    if scales_ptr is None:
        found = gl.where(inside, 1.0, 0.0)
    else:
        found = gl.load(scales_ptr + output, mask=inside, other=0.0)
    return found


@gluon.jit
def _load_sums(parts, T: gl.constexpr):
    """The sums of the first T tiles [T, TILE]."""
    count: gl.constexpr = parts.shape[0] // T
    tiles = parts._reinterpret(gl.float32, [count, T, WARPS, TILE], LINEAR_3).index(0)
    return gl.convert_layout(gl.sum(tiles.load(_PARTS), 1), _SUMS)


@gluon.jit
def _load_halves(parts, T: gl.constexpr):
    """The sums of the first T tiles as two tensors [T, TILE / 2]."""
    halves = gl.permute(gl.reshape(_load_sums(parts, T), [T, 2, TILE // 2]), (0, 2, 1))
    first, second = gl.split(gl.convert_layout(halves, _SPLIT))
    return gl.convert_layout(first, _SUMS), gl.convert_layout(second, _SUMS)


@gluon.jit
def _add_product(parts, before, factor, gain, output, inside, rows_ptr, squares_ptr):
    """Add a product to the residual. Returns the residual, rounded.

    Stores it times the gain of the next norm, and the sum of its squares."""
    kind = rows_ptr.dtype.element_ty
    total = before + _load_sums(parts, before.shape[0]) * factor
    total = gl.where(inside, total, 0.0).to(kind).to(gl.float32)
    gl.store(rows_ptr + output, (total * gain).to(kind), mask=inside)
    gl.store(squares_ptr + gl.program_id(0), gl.sum(gl.sum(total * total, 1), 0))
    return total


@gluon.jit
def _gated_outputs(
    scales_ptr,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    T: gl.constexpr,
    INNER: gl.constexpr,
    NUM: gl.constexpr,
):
    """The results of the program's tiles from FIRST to END of gate and up [T, TILE / 2].

    Returns their places, whether there are such, and the scales of gate and of up."""
    tile = FIRST + gl.expand_dims(gl.arange(0, T, layout=gl.SliceLayout(1, _SUMS)), 1)
    half = gl.expand_dims(gl.arange(0, TILE // 2, layout=gl.SliceLayout(0, _SUMS)), 0)
    output = (gl.program_id(0) + tile * NUM) * (TILE // 2) + half
    inside = (tile < END) & (output < INNER)
    gate_scale = _load_scales(scales_ptr, output, inside)
    up_scale = _load_scales(scales_ptr, INNER + output, inside)
    return output, inside, gate_scale, up_scale


@gluon.jit
def _store_gated(parts, power, outputs, inner_ptr):
    """Store the results of `_gated_outputs` from the sums of gate and up."""
    output, inside, gate_scale, up_scale = outputs
    kind: gl.constexpr = inner_ptr.dtype.element_ty
    gate, up = _load_halves(parts, output.shape[0])
    result = _gated(gate * (gate_scale * power), up * (up_scale * power), kind)
    gl.store(inner_ptr + output, result.to(kind), mask=inside)


@gluon.jit
def _place_of_token(positions, table_rows, tables, stride_table, PAGE: gl.constexpr):
    """The position of the token, its page, and whether it has one."""
    table_row = gl.load(table_rows)
    placed = table_row >= 0
    position = gl.load(positions)
    page = gl.load(tables + table_row * stride_table + position // PAGE, mask=placed, other=0)
    return position, page, placed


@gluon.jit
def _rotate_and_store(
    first,
    second,
    cos,
    sin,
    head,
    dim,
    place,
    placed,
    q_ptr,
    k_at,
    v_at,
    H: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
):
    """Rotate the halves of heads of q and k, and store q, k and v.

    k_at, v_at  the token's page of k and of v
    place       where the numbers of `first` are in it; those of `second` are D / 2 later"""
    turned = first.to(gl.float32) * cos - second.to(gl.float32) * sin
    other = second.to(gl.float32) * cos + first.to(gl.float32) * sin
    kind = first.dtype
    is_q = placed & (head < H)
    gl.store(q_ptr + head * D + dim, turned.to(kind), mask=is_q)
    gl.store(q_ptr + head * D + D // 2 + dim, other.to(kind), mask=is_q)
    is_k = placed & (head >= H) & (head < H + HKV)
    gl.store(k_at + place, turned.to(kind), mask=is_k)
    gl.store(k_at + place + D // 2, other.to(kind), mask=is_k)
    is_v = placed & (head >= H + HKV) & (head < H + 2 * HKV)
    gl.store(v_at + place, first, mask=is_v)
    gl.store(v_at + place + D // 2, second, mask=is_v)


@gluon.jit
def _multiply_all(
    shared,
    ends,
    rows,
    scales,
    norms,
    token,
    stored,
    SHAPE: gl.constexpr,
    ROOMS: gl.constexpr,
    HAS_QKV: gl.constexpr,
    BIAS: gl.constexpr,
    WORDS: gl.constexpr,
    HALF_SCALES: gl.constexpr,
    NUM: gl.constexpr,
):
    """The products of the warps of `chain_kernel` that do not copy tiles."""
    memory, parts = shared
    after_out, after_gate_up, after_early_down, after_down, after_qkv = ends
    attended_ptr, residual_ptr, rows_ptr, squares_ptr, inner_ptr, counters = rows
    out_scales_ptr, gate_up_scales_ptr, down_scales_ptr, qkv_scales_ptr = scales
    gain_ptr, eps, next_gain_ptr, next_eps = norms
    positions, table_rows, tables, stride_table, cos_sin, qkv_bias_ptr = token
    q_ptr, k_cache, v_cache, stride_page = stored
    HIDDEN, HEADS, INNER, H, HKV, D, PAGE = SHAPE
    T_HIDDEN, T_EARLY, T_LATE, T_QKV = ROOMS
    C_HEADS: gl.constexpr = num_chunks(HEADS, WORDS)
    C_HIDDEN: gl.constexpr = num_chunks(HIDDEN, WORDS)
    C_EARLY: gl.constexpr = num_early_chunks(INNER, WORDS)
    EARLY: gl.constexpr = C_EARLY * tile_inputs(WORDS)
    C_LATE: gl.constexpr = num_late_chunks(INNER, WORDS)
    program = gl.program_id(0)
    kind = rows_ptr.dtype.element_ty

    # Sums [tiles, outputs] of out and down, and of half the outputs of the other products.
    OF_TILE: gl.constexpr = gl.SliceLayout(1, _SUMS)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(0, _SUMS)
    index = gl.expand_dims(gl.arange(0, TILE, layout=OF_OUTPUT), 0)
    half = gl.expand_dims(gl.arange(0, TILE // 2, layout=OF_OUTPUT), 0)
    tile = gl.expand_dims(gl.arange(0, T_HIDDEN, layout=OF_TILE), 1)
    output = (program + tile * NUM) * TILE + index
    inside = output < HIDDEN
    scale = _load_scales(out_scales_ptr, output, inside)
    gain = gl.load(gain_ptr + output, mask=inside, other=0.0).to(gl.float32)
    run(WAIT_FOR_PREVIOUS)
    before = gl.load(residual_ptr + output, mask=inside, other=0.0, cache_modifier=".cg")
    before = before.to(gl.float32)

    power = _prepare(memory, attended_ptr, squares_ptr, eps, HEADS, NUM, False, WORDS)
    multiply(parts, memory, 0, after_out, C_HEADS, WORDS, HALF_SCALES)
    before = _add_product(parts, before, scale * power, gain, output, inside, rows_ptr, squares_ptr)
    _publish(counters)

    ROUNDS: gl.constexpr = num_rounds(EARLY, NUM)
    END: gl.constexpr = num_rounds(INNER, NUM)
    early = _gated_outputs(gate_up_scales_ptr, 0, ROUNDS, T_EARLY, INNER, NUM)
    late = _gated_outputs(gate_up_scales_ptr, ROUNDS, END, T_LATE, INNER, NUM)
    _wait_for(counters, NUM)
    power = _prepare(memory, rows_ptr, squares_ptr, eps, HIDDEN, NUM, True, WORDS)
    after_early = gl.minimum(after_out + ROUNDS * C_HIDDEN, after_gate_up)
    if EARLY:
        multiply(parts, memory, after_out, after_early, C_HIDDEN, WORDS, HALF_SCALES)
        _store_gated(parts, power, early, inner_ptr)
        _publish(counters + 1)
    multiply(parts, memory, after_early, after_gate_up, C_HIDDEN, WORDS, HALF_SCALES)
    _store_gated(parts, power, late, inner_ptr)
    _publish(counters + 2)

    scale = _load_scales(down_scales_ptr, output, inside)
    gain = gl.load(next_gain_ptr + output, mask=inside, other=0.0).to(gl.float32)
    if EARLY:
        _wait_for(counters + 1, NUM)
        power = _prepare(memory, inner_ptr, squares_ptr, eps, EARLY, NUM, False, WORDS)
        multiply(parts, memory, after_gate_up, after_early_down, C_EARLY, WORDS, HALF_SCALES)
        before += _load_sums(parts, T_HIDDEN) * (scale * power)
    _wait_for(counters + 2, NUM)
    power = _prepare(memory, inner_ptr + EARLY, squares_ptr, eps, INNER - EARLY, NUM, False, WORDS)
    multiply(parts, memory, after_early_down, after_down, C_LATE, WORDS, HALF_SCALES)
    next_rows, next_squares = rows_ptr + HIDDEN, squares_ptr + NUM
    total = _add_product(
        parts, before, scale * power, gain, output, inside, next_rows, next_squares
    )
    gl.store(residual_ptr + output, total.to(kind), mask=inside)
    # Before the counter: attention copies KV while programs wait for it.
    run(LET_NEXT_START)
    if HAS_QKV:
        _publish(counters + 3)
        qkv_tile = program + gl.expand_dims(gl.arange(0, T_QKV, layout=OF_TILE), 1) * NUM
        head = qkv_tile // (D // TILE)
        dim = qkv_tile % (D // TILE) * (TILE // 2) + half
        in_heads = head < H + 2 * HKV
        first_scale = _load_scales(qkv_scales_ptr, head * D + dim, in_heads)
        second_scale = _load_scales(qkv_scales_ptr, head * D + D // 2 + dim, in_heads)
        position, page, placed = _place_of_token(positions, table_rows, tables, stride_table, PAGE)
        angle_at = cos_sin + position * D + dim
        cos = gl.load(angle_at, mask=placed & in_heads, other=0.0)
        sin = gl.load(angle_at + D // 2, mask=placed & in_heads, other=0.0)
        _wait_for(counters + 3, NUM)
        power = _prepare(memory, next_rows, next_squares, next_eps, HIDDEN, NUM, True, WORDS)
        multiply(parts, memory, after_down, after_qkv, C_HIDDEN, WORDS, HALF_SCALES)
        first, second = _load_halves(parts, T_QKV)
        first = first * (first_scale * power)
        second = second * (second_scale * power)
        if BIAS:
            bias_at = qkv_bias_ptr + head * D + dim
            first += gl.load(bias_at, mask=in_heads, other=0.0).to(gl.float32)
            second += gl.load(bias_at + D // 2, mask=in_heads, other=0.0).to(gl.float32)
        kv_head = (head - H) % HKV
        place = position % PAGE * D + kv_head * (PAGE * D) + dim
        page_at = page.to(gl.int64) * stride_page
        _rotate_and_store(
            first.to(kind),
            second.to(kind),
            cos,
            sin,
            head,
            dim,
            place,
            placed,
            q_ptr,
            k_cache + page_at,
            v_cache + page_at,
            H,
            HKV,
            D,
        )


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
    out_factors,
    gate_up_factors,
    down_factors,
    qkv_factors,
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
    T_EARLY: gl.constexpr,
    T_LATE: gl.constexpr,
    T_QKV: gl.constexpr,
    WORDS: gl.constexpr,
    HALF_SCALES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    AHEAD_WAITING: gl.constexpr,
    NUM: gl.constexpr,
):
    """out, gate and up, down, and qkv of the next layer, for one row.

    Its NUM programs meet after out and down. They exchange the results of gate and up in two parts,
    and multiply other tiles meanwhile.

    attended       [HEADS]
    residual       [HIDDEN], updated
    *_weight       tiles of the weights (`chain.Tiles`), in e4m3 or in words
    *_scales       float32 [outputs] of e4m3, else None; *_factors of words, else None
    rows           [2, HIDDEN]: the residual after out and down, times gain or next_gain
    squares        float32 [2, NUM], sums of squares of parts of the residual
    inner          [INNER]
    counters       int32 [4], zeros
    T_*            at least the number of tiles of a program; powers of two
    HALF_SCALES    scales of words are float16; else bfloat16
    STAGES         tiles in the ring
    AHEAD          halves of tiles that are copied at the same time
    AHEAD_WAITING  the same while programs wait for each other
    other arguments: see `row_qkv_kernel`"""
    program = gl.program_id(0)
    C_HEADS: gl.constexpr = num_chunks(HEADS, WORDS)
    C_HIDDEN: gl.constexpr = num_chunks(HIDDEN, WORDS)
    C_EARLY: gl.constexpr = num_early_chunks(INNER, WORDS)
    C_LATE: gl.constexpr = num_late_chunks(INNER, WORDS)
    QKV: gl.constexpr = (H + 2 * HKV) * D if HAS_QKV else 0
    T_MOST: gl.constexpr = max(T_HIDDEN, T_EARLY, T_LATE, T_QKV)

    memory = allocate(STAGES, max(C_HEADS, C_HIDDEN, C_EARLY, C_LATE), WORDS)
    parts = gl.allocate_shared_memory(gl.float32, [T_MOST, WARPS, TILE], LINEAR_2)

    num_hidden = (HIDDEN // TILE - program + NUM - 1) // NUM
    after_out = num_hidden * C_HEADS
    after_gate_up = after_out + (2 * INNER // TILE - program + NUM - 1) // NUM * C_HIDDEN
    after_early_down = after_gate_up + num_hidden * C_EARLY
    after_down = after_early_down + num_hidden * C_LATE
    after_qkv = after_down
    if HAS_QKV:
        after_qkv += (QKV // TILE - program + NUM - 1) // NUM * C_HIDDEN
    weights = (out_weight, gate_up_weight, down_weight, qkv_weight)
    factors = (out_factors, gate_up_factors, down_factors, qkv_factors)
    ends = (after_out, after_gate_up, after_early_down, after_down, after_qkv)
    asked = (weights, factors, ends)
    SIZES: gl.constexpr = (C_HEADS, C_HIDDEN, C_EARLY, C_LATE, D, NUM, AHEAD, AHEAD_WAITING)
    rows = (attended_ptr, residual_ptr, rows_ptr, squares_ptr, inner_ptr, counters)
    scales = (out_scales_ptr, gate_up_scales_ptr, down_scales_ptr, qkv_scales_ptr)
    norms = (gain_ptr, eps, next_gain_ptr, next_eps)
    token = (positions, table_rows, tables, stride_table, cos_sin, qkv_bias_ptr)
    stored = (q_ptr, k_cache, v_cache, stride_page)
    shape: gl.constexpr = (HIDDEN, HEADS, INNER, H, HKV, D, PAGE)
    rooms: gl.constexpr = (T_HIDDEN, T_EARLY, T_LATE, T_QKV)
    gl.warp_specialize(
        [
            (
                _multiply_all,
                (
                    (memory, parts),
                    ends,
                    rows,
                    scales,
                    norms,
                    token,
                    stored,
                    shape,
                    rooms,
                    HAS_QKV,
                    BIAS,
                    WORDS,
                    HALF_SCALES,
                    NUM,
                ),
            ),
            (copy_tiles, (memory, asked, SIZES)),
        ],
        [1],
        [COPY_REGISTERS],
    )
