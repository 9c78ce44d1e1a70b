"""Attention of one token whose KV is copied before the previous kernel has ended, in Gluon.

The previous kernel computes q and the newest KV. The KV of earlier steps does not depend on it. So
programs copy their first tile to registers and ask for the second when they start, and wait for the
previous kernel afterwards. Two tiles in shared memory would be as fast, but `chain` needs the room.

It computes the same as `attend_items`, for bfloat16, whole contexts and plain scores."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="index, operator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from parrot.engine.kernels.attention_kernels import NO_MAXIMUM, NO_SCORE, sum_and_lse, weigh
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule
from parrot.engine.kernels.gluon_parts import (
    LET_NEXT_START,
    WAIT_FOR_PREVIOUS,
    barrier,
    run,
)

_weigh = gluon.jit(weigh.fn)
_sum_and_lse = gluon.jit(sum_and_lse.fn)

ROWS = gl.constexpr(16)  # Of a tile of the tensor core, for the query heads of a KV head.
KEYS = gl.constexpr(64)  # Of a tile.
WARPS = gl.constexpr(4)
# Of a thread. A program of `chain` has the other registers of a multiprocessor.
MAX_REGISTERS = 200
HALF = gl.constexpr(64)  # Dimensions that are multiplied at once.

# Layouts of scores and results, of the operands of their products, and of a tile in memory.
_SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SCORES.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SCORES.value, 2))
COPIED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# The same for half a tile: rows of 128 bytes, whose parts of 16 bytes are exchanged.
_EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS.value, 1], [1, 0]))  # Of half of q.


def supports(shape: AttentionShape, rule: ScoreRule) -> bool:
    """Whether the kernel computes heads of a shape with the scores of a rule."""
    return (
        shape.head_dim in (HALF.value, 2 * HALF.value)
        and shape.group <= ROWS.value
        and shape.page_size % KEYS.value == 0
        and rule.window is None
        and not rule.softcap
    )


@gluon.jit
def _allocate(D: gl.constexpr):
    """Room for a tile of keys and of values, and a barrier that tells when they are there."""
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], COPIED)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [KEYS, D], COPIED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    barrier()
    return k_smem, v_smem, full


@gluon.jit
def _ask(index, count, memory, source, HKV: gl.constexpr, PAGE: gl.constexpr):
    """Start to copy the tile of an index, if there is one.

    source  keys, values, the block table, and the first key of the program"""
    k_smem, v_smem, full = memory
    keys, values, table, kv_first = source
    D: gl.constexpr = k_smem.shape[1]
    if index < count:
        first = kv_first + index * KEYS
        page = gl.load(table + first // PAGE)
        row = (page * HKV + gl.program_id(0)) * PAGE + first % PAGE
        mbarrier.expect(full, 4 * KEYS * D)
        tma.async_copy_global_to_shared(keys, [row, 0], full, k_smem)
        tma.async_copy_global_to_shared(values, [row, 0], full, v_smem)


@gluon.jit
def _load_q(q_ptr, live, D: gl.constexpr):
    """The halves of q [ROWS, D]. q_ptr: the first query head of the program's KV head."""
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, _LOADED)), 1)
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, _LOADED)), 0)
    mask = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, _LOADED)), 1)
    halves = ()
    for first in gl.static_range(0, D, HALF):
        loaded = gl.load(q_ptr + row * D + first + column, mask=mask, other=0.0)
        halves = halves + (gl.convert_layout(loaded, _LEFT),)  # noqa: RUF005 (not in Gluon)
    return halves


@gluon.jit
def _take(index, memory):
    """The halves of the keys and of the values of a tile, in registers, when it is there."""
    k_smem, v_smem, full = memory
    HALVES: gl.constexpr = k_smem.shape[1] // HALF
    k_halves = k_smem._reinterpret(gl.bfloat16, [HALVES, KEYS, HALF], _EXCHANGED)
    v_halves = v_smem._reinterpret(gl.bfloat16, [HALVES, KEYS, HALF], _EXCHANGED)
    mbarrier.wait(full, index & 1)
    keys, values = (), ()
    for half in gl.static_range(HALVES):
        keys = keys + (k_halves.index(half).permute((1, 0)).load(_RIGHT),)  # noqa: RUF005
        values = values + (v_halves.index(half).load(_RIGHT),)  # noqa: RUF005
    barrier()
    return keys, values


@gluon.jit
def _no_tile(D: gl.constexpr):
    """In place of what `_take` returns."""
    keys, values = (), ()
    for _ in gl.static_range(0, D, HALF):
        keys = keys + (gl.zeros([HALF, KEYS], gl.bfloat16, layout=_RIGHT),)  # noqa: RUF005
        values = values + (gl.zeros([KEYS, HALF], gl.bfloat16, layout=_RIGHT),)  # noqa: RUF005
    return keys, values


@gluon.jit
def _attend(q, state, taken, first, end, scale_log2):
    """One step of the online softmax in base 2 over a tile that `_take` returned."""
    acc, maximum, total = state
    keys, values = taken
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=_SCORES)
    for half in gl.static_range(len(q)):
        scores = mma_v2(q[half], keys[half], scores)
    key = first + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, _SCORES)), 0)
    scores = gl.where(key < end, scores, NO_SCORE)
    weights, decay, maximum, total = _weigh(scores, maximum, total, scale_log2)
    left = gl.convert_layout(weights.to(gl.bfloat16), _LEFT)
    key = first + gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, _RIGHT)), 1)
    found = ()
    for half in gl.static_range(len(q)):
        v = values[half]
        if first + KEYS > end:  # Other contexts may have written NaN after the last key.
            v = gl.where(key < end, v, 0.0)
        found = found + (mma_v2(left, v, acc[half] * gl.expand_dims(decay, 1)),)  # noqa: RUF005
    return found, maximum, total


@gluon.jit
def _store(at, acc, total, mask):
    """Store the result from its halves, which are `total` times too large."""
    for half in gl.static_range(len(acc)):
        result = acc[half] / gl.expand_dims(total, 1)
        gl.store(at + half * HALF, result.to(at.dtype.element_ty), mask=mask)


@gluon.jit
def attend_early(
    q_ptr,
    keys,
    values,
    tables,
    positions,
    items,
    slot_of,
    out_ptr,
    partial_out,
    partial_lse,
    scale_log2,
    stride_table,
    G: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Program (kv head, item): `attend_items` for a step with one token.

    keys, values  the rows of a layer's pages [pages * kv_heads * PAGE, D]
    EARLY         the next kernel may start at once; else after the loop"""
    item = items + gl.program_id(1) * 8
    q_count = gl.load(item + 1)
    table_row = gl.load(item + 2)
    kv_first = gl.load(item + 3)
    kv_end = gl.load(item + 4)
    slot_first = gl.load(item + 5)
    if EARLY:
        run(LET_NEXT_START)
    if q_count == 0:  # Padding of a CUDA graph.
        run(WAIT_FOR_PREVIOUS)
        return
    memory = _allocate(D)
    source = (keys, values, tables + table_row * stride_table, kv_first)
    position = gl.load(positions)
    end = gl.minimum(kv_end, position + 1)
    count = gl.maximum(end - kv_first + KEYS - 1, 0) // KEYS
    # The tile with the newest KV waits for the previous kernel, which writes it.
    num_old = gl.maximum(gl.minimum(position, end) - kv_first, 0) // KEYS
    taken = _no_tile(D)
    _ask(0, num_old, memory, source, H // G, PAGE)
    if num_old > 0:
        taken = _take(0, memory)
        _ask(1, num_old, memory, source, H // G, PAGE)

    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SCORES))
    head = gl.program_id(0) * G + row
    live = row < G
    slot = gl.load(slot_of + gl.maximum(slot_first, 0), mask=slot_first >= 0, other=0)
    run(WAIT_FOR_PREVIOUS)
    if num_old < 2:
        _ask(num_old, count, memory, source, H // G, PAGE)
    q = _load_q(q_ptr + gl.program_id(0) * G * D, live, D)
    acc = ()
    for _ in gl.static_range(0, D, HALF):
        acc = acc + (gl.zeros([ROWS, HALF], gl.float32, layout=_SCORES),)  # noqa: RUF005
    maximum = gl.full([ROWS], NO_MAXIMUM, gl.float32, layout=gl.SliceLayout(1, _SCORES))
    state = (acc, maximum, gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, _SCORES)))
    if (num_old == 0) & (count > 0):
        taken = _take(0, memory)
    for index in range(count):
        state = _attend(q, state, taken, kv_first + index * KEYS, end, scale_log2)
        if index + 1 < count:
            taken = _take(index + 1, memory)
            _ask(index + 2, count, memory, source, H // G, PAGE)
    if not EARLY:
        run(LET_NEXT_START)

    acc, maximum, total = state
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, _SCORES)), 0)
    mask = gl.expand_dims(live, 1)
    at = gl.expand_dims(head * D, 1) + column
    safe_total, lse = _sum_and_lse(maximum, total)
    if slot_first < 0:
        _store(out_ptr + at, acc, safe_total, mask)
    else:
        _store(partial_out + slot.to(gl.int64) * H * D + at, acc, safe_total, mask)
        gl.store(partial_lse + slot * H + head, lse, mask=live)
