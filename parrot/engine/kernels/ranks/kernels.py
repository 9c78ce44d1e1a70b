"""Kernels in which ranks read and write each other's memory. `exchanges` launches them.

Programs with the same number synchronize across ranks: each program publishes the number of its
turn, and waits until the other ranks' programs have reached the turn.

- `over`, int64 at the start of a rank's memory, ends all waiting if it is not 0.
- `asked`, int64 in CPU memory, lets the CPU abort: a waiting program that reads 1 sets `over`. It
  reads `asked` only in every EVERY-th poll, because these reads would fill PCIe.
- `addresses` has the address of each rank's memory, followed by the address of `asked`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _memory_of(addresses, rank):
    """The start of a rank's memory."""
    return tl.multiple_of(tl.load(addresses + rank), 16)


@triton.jit
def _has_arrived(flag, over, turn):
    """Whether the other program has reached the turn, or waiting is over."""
    # Atomics, because all threads must get the same result.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return (seen >= turn) | (tl.atomic_add(over, 0, sem="relaxed", scope="sys") != 0)


@triton.jit
def _end_if_aborted(over, asked, polls, EVERY: tl.constexpr):
    if polls % EVERY == 0:
        tl.store(over, 1, mask=tl.load(asked, volatile=True) != 0)


@triton.jit
def _signal_and_wait(
    addresses,
    turns,
    place,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGS: tl.constexpr,
    EVERY: tl.constexpr,
):
    """Return once the programs with this number have reached this turn on all ranks.

    All earlier writes of these programs and of their previous kernels are then visible. At `place`
    a rank's memory has int64 [SIZE, FLAGS]: the current turns of the other ranks' programs."""
    # Turns only increase, so no program can miss a turn of another program.
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    for other in tl.static_range(SIZE):
        if other != RANK:
            flags = (_memory_of(addresses, other) + place).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + RANK * FLAGS + program, turn, sem="release", scope="sys")
    own = _memory_of(addresses, RANK)
    over = own.to(tl.pointer_type(tl.int64))
    asked = _memory_of(addresses, SIZE).to(tl.pointer_type(tl.int64))
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag = (own + place).to(tl.pointer_type(tl.int64)) + other * FLAGS + program
            polls = 0
            while not _has_arrived(flag, over, turn):
                polls += 1
                _end_if_aborted(over, asked, polls, EVERY)
    tl.store(turns + program, turn)


@triton.jit
def _normed(wide, weight, eps, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """rms_norm(wide) * weight, rounded as separate steps would round."""
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    return (wide * scale).to(KIND).to(tl.float32) * weight


@triton.jit
def sum_and_norm_kernel(
    addresses,
    turns,
    residual_ptr,
    weight_ptr,
    out_ptr,
    flags_place,
    place,
    eps,
    num_rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EVERY: tl.constexpr,
    FLAGS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Program (several rows): residual += the sum of all ranks' parts at `place`, in rank order;
    out = rms_norm(residual) * weight. Without ADD, residual = the sum."""
    kind: tl.constexpr = residual_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _signal_and_wait(addresses, turns, flags_place, RANK, SIZE, FLAGS, EVERY)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * WIDTH + column
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for rank in tl.static_range(SIZE):
            rows = (_memory_of(addresses, rank) + place).to(tl.pointer_type(kind))
            rows = tl.multiple_of(rows, 16)  # Allows vectorized loads.
            # Bypass L1, which does not see the writes of other devices.
            part = tl.load(rows + offset, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        if ADD:
            total += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        value = total.to(kind)
        tl.store(residual_ptr + offset, value, mask=inside)
        # Rounded as stored, because the next layer reads the rounded value.
        normed = _normed(value.to(tl.float32), weight, eps, WIDTH, kind)
        tl.store(out_ptr + offset, normed.to(kind), mask=inside)


@triton.jit
def _low(word, KIND: tl.constexpr):
    """The first number in a word of 32 bits, in float32."""
    if KIND.primitive_bitwidth == 32:
        number = word.to(KIND, bitcast=True)
    else:
        number = word.to(tl.int16).to(KIND, bitcast=True)
    return number.to(tl.float32)


@triton.jit
def _high(word, KIND: tl.constexpr):
    """The second number in a word of 32 bits, in float32; 0 for 32-bit types."""
    if KIND.primitive_bitwidth == 32:
        number = tl.zeros_like(word).to(tl.float32)
    else:
        number = (word >> 16).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _word(low, high, KIND: tl.constexpr):
    if KIND.primitive_bitwidth == 32:
        word = low.to(KIND).to(tl.int32, bitcast=True)
    else:
        first = low.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (high.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16) | first
    return word


@triton.jit
def _poll(at, inside, over, turn):
    """The words of a message, and whether a word has not arrived."""
    came = tl.load(at, mask=inside, other=0, volatile=True)
    is_old = inside & ((came >> 32).to(tl.int32) != turn) & (tl.load(over, volatile=True) == 0)
    return came.to(tl.int32), tl.max(is_old.to(tl.int32), 0)


@triton.jit
def _receive(at, inside, over, asked, turn, EVERY: tl.constexpr):
    """Wait for a message and return its words. Each word is stored with the number of its turn."""
    came, is_old = _poll(at, inside, over, turn)
    polls = 0
    while is_old > 0:
        came, is_old = _poll(at, inside, over, turn)
        polls += 1
        _end_if_aborted(over, asked, polls, EVERY)
    return came


@triton.jit
def sum_few_and_norm_kernel(
    addresses,
    turns,
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    place,
    eps,
    num_rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EVERY: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`sum_and_norm_kernel` for few rows. Program (row).

    It takes one message, because each rank sends its part without a request. All pointers are to
    32-bit words with numbers of type KIND. This rank's part is the sum of [SPLITS, rows, WORDS] at
    `parts_ptr`, rounded. Each rank's inbox at `place` is int64 [2, SIZE, ROWS, WORDS]: a word, and
    above it the low 32 bits of the turn. DEPENDENT: the previous kernel may still run."""
    # The two halves of the inbox alternate: another rank may still read the previous turn's half.
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    own = _memory_of(addresses, RANK)
    over = own.to(tl.pointer_type(tl.int64))
    asked = _memory_of(addresses, SIZE).to(tl.pointer_type(tl.int64))
    weight = tl.load(weight_ptr + word, mask=inside, other=0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    next_turn = tl.load(turns + row) + 1
    turn = next_turn.to(tl.int32)  # It wraps around, after less than a day of decoding.
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts_ptr + (split * num_rows + row) * WORDS + word
        part = tl.load(at, mask=inside, other=0)
        low += _low(part, KIND)
        high += _high(part, KIND)
    part = _word(low, high, KIND)
    message = (turn.to(tl.int64) << 32) | (part.to(tl.int64) & 0xFFFFFFFF)
    start = place + (turn & 1) * (SIZE * ROWS * WORDS * 8)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            inbox = (_memory_of(addresses, rank) + start).to(tl.pointer_type(tl.int64))
            to = tl.multiple_of(inbox, 16) + (RANK * ROWS + row) * WORDS + word
            tl.store(to, message, mask=inside, cache_modifier=".wt")
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    residual_at = residual_ptr + row * WORDS + word
    before = part
    if ADD:
        before = tl.load(residual_at, mask=inside, other=0)
    inbox = tl.multiple_of((own + start).to(tl.pointer_type(tl.int64)), 16)
    for rank in tl.static_range(SIZE):
        came = part
        if rank != RANK:
            at = inbox + (rank * ROWS + row) * WORDS + word
            came = _receive(at, inside, over, asked, turn, EVERY)
        low += _low(came, KIND)
        high += _high(came, KIND)
    if ADD:
        low += _low(before, KIND)
        high += _high(before, KIND)
    total = _word(low, high, KIND)
    tl.store(residual_at, total, mask=inside)
    low, high = _low(total, KIND), _high(total, KIND)
    numbers: tl.constexpr = WORDS * (32 // KIND.primitive_bitwidth)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / numbers + eps)
    low = (low * scale).to(KIND).to(tl.float32) * _low(weight, KIND)
    high = (high * scale).to(KIND).to(tl.float32) * _high(weight, KIND)
    tl.store(out_ptr + row * WORDS + word, _word(low, high, KIND), mask=inside)
    tl.store(turns + row, next_turn)


@triton.jit
def exchange_kernel(
    addresses,
    turns,
    x_ptr,
    out_ptr,
    flags_place,
    place,
    inbox,
    count,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EVERY: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONLY_FIRST: tl.constexpr,
):
    """One program: gather x int32 [rows, width] (`count` numbers) of all ranks to out
    [rows, SIZE * width]. ONLY_FIRST: copy rank 0's x to out [rows, width].

    Each rank writes its x to the inboxes of all ranks at `place`, of `inbox` bytes each."""
    # Two inboxes alternate: another rank may still read the previous turn's inbox.
    index = tl.arange(0, BLOCK)
    start = place + tl.load(turns) % 2 * inbox
    if (not ONLY_FIRST) or RANK == 0:
        for first in range(0, count, BLOCK):
            at = first + index
            value = tl.load(x_ptr + at, mask=at < count, other=0)
            for rank in tl.static_range(SIZE):
                to = (_memory_of(addresses, rank) + start).to(tl.pointer_type(tl.int32))
                tl.store(to + RANK * count + at, value, mask=at < count)
        tl.debug_barrier()  # All threads must have written before a thread sends the signal.
    _signal_and_wait(addresses, turns, flags_place, RANK, SIZE, FLAGS, EVERY)
    own = (_memory_of(addresses, RANK) + start).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(1 if ONLY_FIRST else SIZE):
        for first in range(0, count, BLOCK):
            at = first + index
            came = own + rank * count + at
            value = tl.load(came, mask=at < count, other=0, cache_modifier=".cg")
            to = at
            if not ONLY_FIRST:
                to = at // width * (SIZE * width) + rank * width + at % width
            tl.store(out_ptr + to, value, mask=at < count)
