"""CPU kernels between a decoder's matrix products, for few rows.

Only the process that compiles the kernels (`build`) imports this module. `layout` describes the
arguments."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import numpy as np
from numba import njit

from parrot.engine.cpu.layout import (
    ANGLES,
    ATTEND_PART,
    CHUNK,
    EPS,
    FIRST_ROWS,
    GATED_WIDTH,
    HEAD_DIM,
    HEADS,
    K_NORM,
    K_POOL,
    KV_HEADS,
    LAYER,
    MOST_CHUNKS,
    NEXT_THREAD,
    NEXT_UNIT,
    NORM_EPS,
    NORMED,
    NUM_ROWS,
    OUT,
    PAGE_SIZE,
    PAGES,
    PAIR_CHUNKS,
    PAIR_SEQUENCES,
    PAIRS,
    PARALLEL,
    PARTIALS,
    Q_NORM,
    QUERIES,
    QUERY_SCALE,
    RESIDUAL,
    ROW_SEQUENCES,
    ROWS,
    SCORES,
    SCORES_WIDTH,
    STARTS,
    STATISTICS,
    TABLE_WIDTH,
    TABLES,
    THREADS,
    V_POOL,
    WEIGHT,
    WIDTH,
)
from parrot.engine.cpu.simd import (
    LANES,
    MEMORY,
    add,
    call_in_threads,
    divide,
    exp2,
    float_at,
    int32_at,
    int64_at,
    larger,
    largest,
    load_float32,
    multiply,
    multiply_add,
    prefetch,
    root,
    set_float,
    set_int64,
    splat,
    store_float32,
    subtract,
    take_next,
    total,
)

LINE = 64  # Bytes of a cache line.
_LEAST, _LOG2_E = -math.inf, math.log2(math.e)


def kernels_of(dtype):  # noqa: C901
    """The kernels for tensors of this type, by name. The caller compiles them."""
    load, store, size = MEMORY[dtype]
    vector_bytes = LANES * size
    compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

    @compiled
    def scale_of(x, count, eps):
        """1 / sqrt(mean of squares + eps) of `count` numbers."""
        squares = splat(np.float32(0.0))
        for i in range(0, count, LANES):
            value = load(x + i * size)
            squares = multiply_add(value, value, squares)
        return np.float32(1.0) / root(total(squares) / np.float32(count) + eps)

    @compiled
    def add_rms_norm(x, rows, norm):
        width, eps = int64_at(rows, WIDTH), float_at(rows, 2 * EPS)
        weight = int64_at(norm, WEIGHT)
        for row in range(int64_at(rows, NUM_ROWS)):
            at = row * width * size
            residual, normed = int64_at(norm, RESIDUAL) + at, int64_at(norm, NORMED) + at
            if x != 0:
                for i in range(0, width * size, vector_bytes):
                    store(residual + i, add(load(residual + i), load(x + at + i)))
            scale = splat(scale_of(residual, width, eps))
            for i in range(0, width, LANES):
                value = multiply(load(residual + i * size), scale)
                store(normed + i * size, multiply(value, load_float32(weight + i * 4)))

    @compiled
    def silu_multiply(x, rows, out):
        width = int64_at(rows, GATED_WIDTH) * size
        one, minus_log2_e = splat(np.float32(1.0)), splat(np.float32(-_LOG2_E))
        for row in range(int64_at(rows, NUM_ROWS)):
            gates, results = x + 2 * row * width, out + row * width
            for i in range(0, width, vector_bytes):
                gate = load(gates + i)
                denominator = add(one, exp2(multiply(gate, minus_log2_e)))
                value = multiply(divide(gate, denominator), load(gates + width + i))
                store(results + i, value)

    @compiled
    def rotate_head(x, weight, angles, scale, out, head_dim, eps, is_key):
        """Normalise (if `weight` is not 0), rotate and scale a head.

        Keys are written in the pool's type, queries in float32."""
        half = head_dim // 2
        if weight != 0:
            scale = scale * scale_of(x, head_dim, eps)
        scales = splat(scale)
        for i in range(0, half, LANES):
            low = multiply(load(x + i * size), scales)
            high = multiply(load(x + (half + i) * size), scales)
            if weight != 0:
                low = multiply(low, load_float32(weight + i * 4))
                high = multiply(high, load_float32(weight + (half + i) * 4))
            cos, sin = load_float32(angles + i * 4), load_float32(angles + (half + i) * 4)
            first = subtract(multiply(low, cos), multiply(high, sin))
            second = add(multiply(high, cos), multiply(low, sin))
            if is_key:
                store(out + i * size, first)
                store(out + (half + i) * size, second)
            else:
                store_float32(out + i * 4, first)
                store_float32(out + (half + i) * 4, second)

    @compiled
    def rotate_and_store(qkv, step, layer):
        """Write the queries to QUERIES, and new keys and values to the pool."""
        heads, kv_heads = int64_at(step, HEADS), int64_at(step, KV_HEADS)
        head_dim, page_size = int64_at(step, HEAD_DIM), int64_at(step, PAGE_SIZE)
        pages, eps = int64_at(step, PAGES), float_at(layer, 2 * NORM_EPS)
        q_norm, k_norm = int64_at(layer, Q_NORM), int64_at(layer, K_NORM)
        scale, one = float_at(step, 2 * QUERY_SCALE), np.float32(1.0)
        for row in range(int64_at(step, ROWS)):
            sequence = int32_at(int64_at(step, ROW_SEQUENCES), row)
            in_sequence = row - int32_at(int64_at(step, FIRST_ROWS), sequence)
            position = int32_at(int64_at(step, STARTS), sequence) + in_sequence
            entry = sequence * int64_at(step, TABLE_WIDTH) + position // page_size
            page = int32_at(int64_at(step, TABLES), entry)
            angles = int64_at(step, ANGLES) + row * head_dim * 4
            x = qkv + row * (heads + 2 * kv_heads) * head_dim * size
            for head in range(heads):
                out = int64_at(step, QUERIES) + (row * heads + head) * head_dim * 4
                rotate_head(
                    x + head * head_dim * size, q_norm, angles, scale, out, head_dim, eps, False
                )
            for head in range(kv_heads):
                slot = ((head * pages + page) * page_size + position % page_size) * head_dim * size
                key = x + (heads + head) * head_dim * size
                value = key + kv_heads * head_dim * size
                out = int64_at(layer, K_POOL) + slot
                rotate_head(key, k_norm, angles, one, out, head_dim, eps, True)
                for i in range(0, head_dim * size, LANES * size):
                    store(int64_at(layer, V_POOL) + slot + i, load(value + i))

    @compiled
    def score(q0, q1, q2, q3, key, head_dim, out, width, at):
        """The scores of four queries with one key."""
        s0 = s1 = s2 = s3 = splat(np.float32(0.0))
        for i in range(0, head_dim, LANES):
            k = load(key + i * size)
            s0 = multiply_add(load_float32(q0 + i * 4), k, s0)
            s1 = multiply_add(load_float32(q1 + i * 4), k, s1)
            s2 = multiply_add(load_float32(q2 + i * 4), k, s2)
            s3 = multiply_add(load_float32(q3 + i * 4), k, s3)
        set_float(out, at, total(s0))
        set_float(out, at + width, total(s1))
        set_float(out, at + 2 * width, total(s2))
        set_float(out, at + 3 * width, total(s3))

    @compiled
    def score_one(q, key, head_dim, out, at):
        s = splat(np.float32(0.0))
        for i in range(0, head_dim, LANES):
            s = multiply_add(load_float32(q + i * 4), load(key + i * size), s)
        set_float(out, at, total(s))

    @compiled
    def softmax(scores, seen, count, statistics):
        """Replace scores by their exponentials, and by 0 after the first `seen` scores."""
        for i in range(max(seen, 0), -(-count // LANES) * LANES):
            set_float(scores, i, np.float32(_LEAST))
        peak = splat(np.float32(_LEAST))
        for i in range(0, count, LANES):
            peak = larger(peak, load_float32(scores + i * 4))
        most = largest(peak)
        peak, sums = splat(most), splat(np.float32(0.0))
        for i in range(0, count, LANES):
            weights = exp2(subtract(load_float32(scores + i * 4), peak))
            sums = add(sums, weights)
            store_float32(scores + i * 4, weights)
        set_float(statistics, 0, most)
        set_float(statistics, 1, total(sums))

    @compiled
    def attend_unit(step, sequence, chunk, kv_head, scores):  # noqa: C901
        """The partial results of a sequence's rows over a chunk, for the heads of one KV head."""
        heads, kv_heads = int64_at(step, HEADS), int64_at(step, KV_HEADS)
        head_dim, page_size = int64_at(step, HEAD_DIM), int64_at(step, PAGE_SIZE)
        width, most_chunks = int64_at(step, SCORES_WIDTH), int64_at(step, MOST_CHUNKS)
        span = -(-CHUNK // page_size) * page_size
        begin, group = chunk * span, heads // kv_heads
        first = int32_at(int64_at(step, FIRST_ROWS), sequence)
        num_rows = int32_at(int64_at(step, FIRST_ROWS), sequence + 1) - first
        start = int32_at(int64_at(step, STARTS), sequence)
        table = int64_at(step, TABLES)
        table += (sequence * int64_at(step, TABLE_WIDTH) + begin // page_size) * 4
        page_bytes = page_size * head_dim * size
        base = kv_head * int64_at(step, PAGES) * page_bytes
        k_pool = int64_at(int64_at(step, LAYER), K_POOL) + base
        v_pool = int64_at(int64_at(step, LAYER), V_POOL) + base
        queries, partials = int64_at(step, QUERIES), int64_at(step, PARTIALS)
        statistics = int64_at(step, STATISTICS)
        last = num_rows * group - 1
        for j in range(0, last + 1, 4):
            # The last query may be computed several times, with equal results.
            j1, j2, j3 = min(j + 1, last), min(j + 2, last), min(j + 3, last)
            count = min(start + j3 // group + 1 - begin, span)
            if count <= 0:
                continue
            row0, head0 = first + j // group, kv_head * group + j % group
            row1, head1 = first + j1 // group, kv_head * group + j1 % group
            row2, head2 = first + j2 // group, kv_head * group + j2 % group
            row3, head3 = first + j3 // group, kv_head * group + j3 % group
            q0 = queries + (row0 * heads + head0) * head_dim * 4
            q1 = queries + (row1 * heads + head1) * head_dim * 4
            q2 = queries + (row2 * heads + head2) * head_dim * 4
            q3 = queries + (row3 * heads + head3) * head_dim * 4
            last_page = (count - 1) // page_size
            for page in range(last_page + 1):
                keys = k_pool + int32_at(table, page) * page_bytes
                at = page * page_size
                ahead = k_pool + int32_at(table, min(page + 1, last_page)) * page_bytes - keys
                for token in range(min(page_size, count - at)):
                    key = keys + token * head_dim * size
                    for i in range(0, head_dim * size, LINE):
                        prefetch(key + ahead + i)
                        prefetch(key + v_pool - k_pool + i)
                    if j == last:
                        score_one(q0, key, head_dim, scores, at + token)
                    else:
                        score(q0, q1, q2, q3, key, head_dim, scores, width, at + token)
            to0 = (row0 * most_chunks + chunk) * heads + head0
            to1 = (row1 * most_chunks + chunk) * heads + head1
            to2 = (row2 * most_chunks + chunk) * heads + head2
            to3 = (row3 * most_chunks + chunk) * heads + head3
            seen = start + 1 - begin
            softmax(scores, min(seen + j // group, span), count, statistics + to0 * 8)
            if j == last:
                for i in range(0, head_dim, 2 * LANES):
                    a = b = splat(np.float32(0.0))
                    for page in range(last_page + 1):
                        at = page * page_size
                        value = v_pool + int32_at(table, page) * page_bytes + i * size
                        ahead = v_pool + int32_at(table, min(page + 1, last_page)) * page_bytes
                        ahead += i * size - value
                        for token in range(min(page_size, count - at)):
                            w = splat(float_at(scores, at + token))
                            a = multiply_add(w, load(value), a)
                            b = multiply_add(w, load(value + vector_bytes), b)
                            value += head_dim * size
                    store_float32(partials + (to0 * head_dim + i) * 4, a)
                    store_float32(partials + (to0 * head_dim + i + LANES) * 4, b)
                continue
            softmax(scores + width * 4, min(seen + j1 // group, span), count, statistics + to1 * 8)
            softmax(scores + width * 8, min(seen + j2 // group, span), count, statistics + to2 * 8)
            softmax(scores + width * 12, min(seen + j3 // group, span), count, statistics + to3 * 8)
            for i in range(0, head_dim, 2 * LANES):
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(np.float32(0.0))
                for page in range(last_page + 1):
                    at = page * page_size
                    value = v_pool + int32_at(table, page) * page_bytes + i * size
                    ahead = v_pool + int32_at(table, min(page + 1, last_page)) * page_bytes
                    ahead += i * size - value
                    for token in range(at, at + min(page_size, count - at)):
                        a, b = load(value), load(value + vector_bytes)
                        value += head_dim * size
                        w = splat(float_at(scores, token))
                        a0, b0 = multiply_add(w, a, a0), multiply_add(w, b, b0)
                        w = splat(float_at(scores, token + width))
                        a1, b1 = multiply_add(w, a, a1), multiply_add(w, b, b1)
                        w = splat(float_at(scores, token + 2 * width))
                        a2, b2 = multiply_add(w, a, a2), multiply_add(w, b, b2)
                        w = splat(float_at(scores, token + 3 * width))
                        a3, b3 = multiply_add(w, a, a3), multiply_add(w, b, b3)
                store_float32(partials + (to0 * head_dim + i) * 4, a0)
                store_float32(partials + (to0 * head_dim + i + LANES) * 4, b0)
                store_float32(partials + (to1 * head_dim + i) * 4, a1)
                store_float32(partials + (to1 * head_dim + i + LANES) * 4, b1)
                store_float32(partials + (to2 * head_dim + i) * 4, a2)
                store_float32(partials + (to2 * head_dim + i + LANES) * 4, b2)
                store_float32(partials + (to3 * head_dim + i) * 4, a3)
                store_float32(partials + (to3 * head_dim + i + LANES) * 4, b3)

    @compiled
    def attend_part(step):
        """The work of a thread: take units until no unit is left."""
        kv_heads = int64_at(step, KV_HEADS)
        scores = int64_at(step, SCORES)
        scores += take_next(step + 8 * NEXT_THREAD) * 16 * int64_at(step, SCORES_WIDTH)
        unit = take_next(step + 8 * NEXT_UNIT)
        while unit < int64_at(step, PAIRS) * kv_heads:
            pair = unit // kv_heads
            sequence = int32_at(int64_at(step, PAIR_SEQUENCES), pair)
            chunk = int32_at(int64_at(step, PAIR_CHUNKS), pair)
            attend_unit(step, sequence, chunk, unit % kv_heads, scores)
            unit = take_next(step + 8 * NEXT_UNIT)

    @compiled
    def merge(step):
        """Merge the partial results of all chunks into OUT."""
        heads, head_dim = int64_at(step, HEADS), int64_at(step, HEAD_DIM)
        page_size, most_chunks = int64_at(step, PAGE_SIZE), int64_at(step, MOST_CHUNKS)
        span = -(-CHUNK // page_size) * page_size
        for row in range(int64_at(step, ROWS)):
            sequence = int32_at(int64_at(step, ROW_SEQUENCES), row)
            in_sequence = row - int32_at(int64_at(step, FIRST_ROWS), sequence)
            position = int32_at(int64_at(step, STARTS), sequence) + in_sequence
            chunks = position // span + 1
            for head in range(heads):
                first = row * most_chunks * heads + head
                statistics = int64_at(step, STATISTICS) + first * 8
                partials = int64_at(step, PARTIALS) + first * head_dim * 4
                out = int64_at(step, OUT) + (row * heads + head) * head_dim * size
                peak = splat(np.float32(_LEAST))
                for chunk in range(chunks):
                    peak = larger(peak, splat(float_at(statistics, 2 * chunk * heads)))
                sums = splat(np.float32(0.0))
                for chunk in range(chunks):
                    at = 2 * chunk * heads
                    weight = exp2(subtract(splat(float_at(statistics, at)), peak))
                    sums = multiply_add(weight, splat(float_at(statistics, at + 1)), sums)
                for i in range(0, head_dim, LANES):
                    value = splat(np.float32(0.0))
                    for chunk in range(chunks):
                        at = chunk * heads
                        weight = exp2(subtract(splat(float_at(statistics, 2 * at)), peak))
                        partial = load_float32(partials + (at * head_dim + i) * 4)
                        value = multiply_add(weight, partial, value)
                    store(out + i * size, divide(value, sums))

    @compiled
    def attend(qkv, step, layer):
        """Rotate heads, store keys and values, and compute attention.

        qkv: [rows, heads + 2 KV heads, head_dim]."""
        rotate_and_store(qkv, step, layer)
        set_int64(step, LAYER, layer)
        set_int64(step, NEXT_UNIT, 0)
        set_int64(step, NEXT_THREAD, 0)
        threads = int64_at(step, THREADS)
        if threads > 1:
            call_in_threads(int64_at(step, PARALLEL), int64_at(step, ATTEND_PART), step, threads)
        else:
            attend_part(step)
        merge(step)

    return {
        "add_rms_norm": add_rms_norm,
        "silu_multiply": silu_multiply,
        "attend": attend,
        "attend_part": attend_part,
    }
