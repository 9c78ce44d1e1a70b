"""Products with weights in codes on the tensor core. `words` launches them.

Weights are int16 words [blocks, outputs, 32]. A word holds four codes of 4 bits, or two signed
codes of 8 bits. Word j of a block has inputs j, j + 32 and so on, the first in its lowest bits. A
group of 32 inputs or more that divides a block has one factor in int32 `factors` [groups, outputs].
Groups of 16 inputs have blocks of 16 words. One load of 4 bytes is fetched ahead, as the words are.

A factor has a scale in its lower half, as float16 or bfloat16. A number is (code - zero) * scale.
The upper half of codes of 4 bits has -128 - zero in bfloat16. Codes of 8 bits have no zero. With
LEAST a number is code * scale + least, and the upper half has `least` in the type of the scale.
Factors may be 2^SHIFT times those of the matrix, so that float16 holds small ones.

Copies to shared memory are the limit of products of few rows. A copy of 64 bytes takes as long as
one of 128. So the words of neighbouring outputs are neighbours, and x is read in whole groups.

A product multiplies whole numbers of up to 8 bits, which are exact in bfloat16, and then the sum
of a group by its scale. With LEAST it adds `least` times the sum of x, which the tensor core
computes as well: so the sums have the layout of the products."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.linear.parts import (
    add_to_residual,
    gated,
    head_and_outputs,
    places,
    rotate_and_store,
)

# Two words become two numbers in bfloat16: 128 + code has the code in its last four bits.
_ASSEMBLY = """
    {{
    .reg .b32 codes, one;
    shr.b32 codes, $1, {shift};
    lop3.b32 codes, codes, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 $0, codes, one, $2;
    }}
"""
PARTS = tuple(tl.constexpr(_ASSEMBLY.format(shift=4 * part)) for part in range(4))
_PART_0, _PART_1, _PART_2, _PART_3 = PARTS
# The seven low bits of a signed code are those of 128 + code. The sign makes -256 of -128.
_SIGNED_ASSEMBLY = """
    {{
    .reg .b32 codes, signs, one;
    shr.b32 codes, $1, {shift};
    lop3.b32 signs, codes, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 codes, codes, 0x007F007F, 0x43004300, 0xEA;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 $0, codes, one, signs;
    }}
"""
_SIGNED_PARTS = tuple(tl.constexpr(_SIGNED_ASSEMBLY.format(shift=8 * part)) for part in range(2))
_SIGNED_0, _SIGNED_1 = _SIGNED_PARTS


@triton.jit
def _assembled(words, zero, SOURCE: tl.constexpr):
    return tl.inline_asm_elementwise(
        SOURCE, "=r,r,r", [words, zero.to(tl.bfloat16)], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _signed(words, P: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The signed codes of eight bits that are part P of words."""
    if ASSEMBLY:
        numbers = tl.inline_asm_elementwise(
            _SIGNED_0 if P == 0 else _SIGNED_1, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        numbers = ((words << (8 - 8 * P)) >> 8).to(tl.float32).to(KIND)
    return numbers


@triton.jit
def _part(
    words,
    factor,
    P: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LEAST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """The codes of part P of words [..., BN, words], minus the zeros of factors [..., BN]."""
    if LEAST:
        zero = tl.expand_dims(tl.full(factor.shape, -128.0, tl.float32), -1)
    else:
        zero = tl.expand_dims((factor & -65536).to(tl.float32, bitcast=True), -1)  # -128 - zero.
    if BITS == 8:
        numbers = _signed(words, P, KIND, ASSEMBLY)
    elif ASSEMBLY:
        if P == 0:
            numbers = _assembled(words, zero, _PART_0)
        elif P == 1:
            numbers = _assembled(words, zero, _PART_1)
        elif P == 2:
            numbers = _assembled(words, zero, _PART_2)
        else:
            numbers = _assembled(words, zero, _PART_3)
    else:
        codes = ((words >> (4 * P)) & 15).to(tl.float32)
        numbers = (codes + (zero + 128.0)).to(KIND)
    return numbers


@triton.jit
def scale_of(factor, HALF: tl.constexpr):
    """The scales of factors, float32. HALF: they are float16."""
    if HALF:
        scale = factor.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = (factor << 16).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _least_of(factor, HALF: tl.constexpr):
    """The numbers of code 0, float32. HALF: they are float16."""
    return scale_of(factor >> 16, HALF)


@triton.jit
def _load_words(at, inside, WHOLE: tl.constexpr):
    """Words of weights, which are read once. Their cache lines are evicted first."""
    if WHOLE:
        words = tl.load(at, eviction_policy="evict_first")
    else:
        mask = tl.expand_dims(inside, -1)
        words = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    return words


@triton.jit
def _load_factors(at, inside, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0)


@triton.jit
def _codes(
    words,
    factor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    LEAST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """The codes of group G of words [..., words] minus the zeros of factors [...], as
    [..., GROUP].

    Joining the parts and exchanging dimensions only renames registers."""
    FIRST: tl.constexpr = G * GROUP // words.shape[-1]
    codes = _part(words, factor, FIRST, KIND, BITS, LEAST, ASSEMBLY)
    if GROUP == 64:
        second = _part(words, factor, FIRST + 1, KIND, BITS, LEAST, ASSEMBLY)
        codes = _side_by_side(codes, second)
    elif GROUP == 128:
        third = _part(words, factor, 2, KIND, BITS, LEAST, ASSEMBLY)
        codes = _side_by_side(codes, _part(words, factor, 1, KIND, BITS, LEAST, ASSEMBLY))
        rest = _side_by_side(third, _part(words, factor, 3, KIND, BITS, LEAST, ASSEMBLY))
        codes = _side_by_side(codes, rest)
    return codes


@triton.jit
def _side_by_side(first, second):
    """[..., n] and [..., n] as [..., 2 n]."""
    both = tl.join(first, second)
    if len(first.shape) == 2:
        both = tl.reshape(tl.permute(both, (0, 2, 1)), [first.shape[0], 2 * first.shape[1]])
    else:
        shape: tl.constexpr = [first.shape[0], first.shape[1], 2 * first.shape[2]]
        both = tl.reshape(tl.permute(both, (0, 1, 3, 2)), shape)
    return both


@triton.jit
def _products(
    words_ptr,
    factors_ptr,
    row,
    x_row_at,
    inside,
    live,
    first_block,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """BN rows of ROWS rows of weights times BM rows of x, over BLOCKS blocks. float32 [BN, BM]."""
    result = tl.zeros([BN, BM], dtype=tl.float32)
    WIDTH: tl.constexpr = min(GROUP, 32)
    BLOCK: tl.constexpr = 16 // BITS * WIDTH
    word = tl.arange(0, WIDTH)
    place = tl.arange(0, GROUP)
    kind = x_row_at.dtype.element_ty
    for index in tl.range(0, BLOCKS, num_stages=STAGES):
        block = first_block + index
        words_at = words_ptr + (block.to(tl.int64) * ROWS + row)[:, None] * WIDTH + word[None, :]
        words = _load_words(words_at, inside, WHOLE)
        for group in tl.static_range(BLOCK // GROUP):
            factor_at = factors_ptr + (block * (BLOCK // GROUP) + group) * ROWS + row
            factor = _load_factors(factor_at, inside, WHOLE)
            column = block * BLOCK + group * GROUP + place
            is_input = live[:, None]
            if K % BLOCK != 0:
                is_input = is_input & (column < K)[None, :]
            x = tl.trans(tl.load(x_row_at + column[None, :], mask=is_input, other=0.0))
            codes = _codes(words, factor, group, GROUP, kind, BITS, LEAST, ASSEMBLY)
            sums = tl.dot(codes, x, input_precision="ieee")
            result += sums * scale_of(factor, HALF)[:, None]
            if LEAST:
                ones = tl.full([BN, GROUP], 1.0, kind)
                sums = tl.dot(ones, x, input_precision="ieee")
                result += sums * _least_of(factor, HALF)[:, None]
    return result


@triton.jit
def _sliced_products(
    words_ptr,
    factors_ptr,
    row,
    x_row_at,
    inside,
    live,
    first_block,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """`_products`, in which each warp has every SLICES-th block.

    A block takes a warp half a microsecond, mostly of latency. So few rows of weights need many
    warps."""
    result = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
    WIDTH: tl.constexpr = min(GROUP, 32)
    BLOCK: tl.constexpr = 16 // BITS * WIDTH
    word = tl.arange(0, WIDTH)
    place = tl.arange(0, GROUP)
    piece = tl.arange(0, SLICES)
    kind = x_row_at.dtype.element_ty
    for index in tl.range(0, BLOCKS, SLICES, num_stages=STAGES):
        block = first_block + index + piece
        exists = inside[None, :]
        if BLOCKS % SLICES != 0:
            exists = exists & (index + piece < BLOCKS)[:, None]
        even: tl.constexpr = WHOLE & (BLOCKS % SLICES == 0)
        tile_row = block.to(tl.int64)[:, None] * ROWS + row[None, :]
        words = _load_words(words_ptr + tile_row[:, :, None] * WIDTH + word, exists, even)
        for group in tl.static_range(BLOCK // GROUP):
            first_factor = (block * (BLOCK // GROUP) + group) * ROWS
            factor_at = factors_ptr + first_factor[:, None] + row[None, :]
            factor = _load_factors(factor_at, exists, even)
            column = block[:, None] * BLOCK + group * GROUP + place[None, :]
            is_input = live[None, :, None]
            if K % BLOCK != 0 or BLOCKS % SLICES != 0:
                is_input = is_input & (column < K)[:, None, :]
            x = tl.load(x_row_at[None, :, :] + column[:, None, :], mask=is_input, other=0.0)
            x = tl.permute(x, (0, 2, 1))
            codes = _codes(words, factor, group, GROUP, kind, BITS, LEAST, ASSEMBLY)
            sums = tl.dot(codes, x, input_precision="ieee")
            result += sums * tl.expand_dims(scale_of(factor, HALF), -1)
            if LEAST:
                ones = tl.full([SLICES, BN, GROUP], 1.0, kind)
                sums = tl.dot(ones, x, input_precision="ieee")
                result += sums * tl.expand_dims(_least_of(factor, HALF), -1)
    return tl.sum(result, 0)


@triton.jit
def _load_squares(squares_ptr, member, live, PARTS: tl.constexpr):
    part = tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
    is_part = live[:, None] & (part < PARTS)
    return tl.load(squares_ptr + member[:, None] * PARTS + part, mask=is_part, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # One variant for all numbers of rows.
def words_linear_kernel(
    x_ptr,
    words_ptr,
    factors_ptr,
    bias_ptr,
    out_ptr,
    squares_ptr,
    residual_ptr,
    gain_ptr,
    squares_out_ptr,
    eps,
    num_rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block of BM rows, block of BN outputs, split of BLOCKS blocks): out = x weight^T
    (+ bias). Each split has its own out.

    Programs with the same weights are neighbours, so that all but the first find them in L2.

    PARTS, SILU, ADD and DEPENDENT are those of `few_rows_linear_kernel`."""
    program = tl.program_id(1)
    OUTPUTS: tl.constexpr = BN // 2 if SILU else BN
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)
    index = tl.arange(0, BN)
    is_row = program * OUTPUTS + index % OUTPUTS < N
    row = program * OUTPUTS + index % OUTPUTS + index // OUTPUTS * N
    member = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = output < N
    live = member < num_rows
    both = inside[:, None] & live[None, :]
    place = member.to(tl.int64)[None, :] * N + output[:, None]
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x
    first_block = tl.program_id(2) * BLOCKS
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)  # Used after the product.
    if ADD:
        before = tl.load(residual_ptr + place, mask=both, other=0.0)
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0)
    if SLICES > 1:
        result = _sliced_products(
            words_ptr, factors_ptr, row, x_row_at, is_row, live, first_block,
            2 * N if SILU else N, K, BLOCKS, BITS, GROUP, BM, BN, SLICES, STAGES,
            N % OUTPUTS == 0, HALF, LEAST, ASSEMBLY,
        )  # fmt: skip
    else:
        result = _products(
            words_ptr, factors_ptr, row, x_row_at, is_row, live, first_block,
            2 * N if SILU else N, K, BLOCKS, BITS, GROUP, BM, BN, STAGES,
            N % OUTPUTS == 0, HALF, LEAST, ASSEMBLY,
        )  # fmt: skip
    if SHIFT > 0:
        result *= 1.0 / (1 << SHIFT)
    if PARTS > 0:
        result *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
    if BIAS:
        result += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    kind = out_ptr.dtype.element_ty
    if SILU:
        halves = tl.reshape(result, [2, OUTPUTS, BM])
        gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
        result = gated(gate, up, kind)
    if ADD:
        result, parts = add_to_residual(result, before, residual_ptr + place, both, kind)
        part_squares = tl.sum(parts, 0)
        tl.store(squares_out_ptr + member * tl.num_programs(1) + program, part_squares, mask=live)
        result *= gain.to(tl.float32)[:, None]
    out_ptr += tl.program_id(2).to(tl.int64) * num_rows * N
    tl.store(out_ptr + place, result.to(kind), mask=both)


@triton.jit(do_not_specialize=["num_rows"])  # One variant for all numbers of rows.
def words_qkv_kernel(
    x_ptr,
    words_ptr,
    factors_ptr,
    bias_ptr,
    squares_ptr,
    q_ptr,
    positions,
    table_rows,
    tables,
    cos_sin,
    k_cache,
    v_cache,
    eps,
    num_rows,
    stride_x,
    stride_page,
    stride_table,
    K: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (head, BN of its D outputs): the product, then `rope_and_store_kernel`.

    See `few_rows_qkv_kernel`."""
    head, dim, row = head_and_outputs(D, BN)
    member = tl.arange(0, BM)
    inside = row >= 0
    live = member < num_rows
    placed, place, cos, sin = places(
        member, live, dim, positions, table_rows, tables, cos_sin, stride_page, stride_table,
        D, PAGE,
    )  # fmt: skip
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)
    if SLICES > 1:
        result = _sliced_products(
            words_ptr, factors_ptr, row, x_row_at, inside, live, 0,
            (H + 2 * HKV) * D, K, BLOCKS, BITS, GROUP, BM, BN, SLICES, STAGES, True, HALF, LEAST,
            ASSEMBLY,
        )  # fmt: skip
    else:
        result = _products(
            words_ptr, factors_ptr, row, x_row_at, inside, live, 0,
            (H + 2 * HKV) * D, K, BLOCKS, BITS, GROUP, BM, BN, STAGES, True, HALF, LEAST,
            ASSEMBLY,
        )  # fmt: skip
    if SHIFT > 0:
        result *= 1.0 / (1 << SHIFT)
    if PARTS > 0:
        result *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    rotate_and_store(
        result, q_ptr, k_cache, v_cache, head, dim, member, placed, place, cos, sin,
        H, HKV, D, PAGE,
    )  # fmt: skip


@triton.jit
def words_numbers_kernel(
    words_ptr,
    factors_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    LEAST: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Program (block, BN outputs): the numbers, rounded to the type of out [N, K]."""
    block = tl.program_id(0)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = row < N
    WIDTH: tl.constexpr = min(GROUP, 32)
    BLOCK: tl.constexpr = 16 // BITS * WIDTH
    word = tl.arange(0, WIDTH)
    words_at = words_ptr + (block.to(tl.int64) * N + row)[:, None] * WIDTH + word[None, :]
    words = tl.load(words_at, mask=inside[:, None], other=0)
    for part in tl.static_range(16 // BITS):
        group = block * (BLOCK // GROUP) + part * WIDTH // GROUP
        factor = tl.load(factors_ptr + group * N + row, mask=inside, other=0)
        numbers = _part(words, factor, part, tl.float32, BITS, LEAST, False)
        numbers *= scale_of(factor, HALF)[:, None]
        if LEAST:
            numbers += _least_of(factor, HALF)[:, None]
        if SHIFT > 0:
            numbers *= 1.0 / (1 << SHIFT)
        column = block * BLOCK + part * WIDTH + word
        out_at = out_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
        is_input = inside[:, None] & (column < K)[None, :]
        tl.store(out_at, numbers.to(out_ptr.dtype.element_ty), mask=is_input)
