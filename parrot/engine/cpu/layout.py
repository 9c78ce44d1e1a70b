"""The arguments of a CPU's kernels: blocks of int64, by address.

All of them are functions (x, block, other) -> nothing: of the address of a tensor, of what is true
of a step, and of what is true of a layer.

    add_rms_norm(x, rows, norm)         residual += x, unless x is 0, and out = its RMSNorm
    silu_multiply(x, rows, out)         x [rows, 2 * GATED_WIDTH] -> silu(first half) * second half
    attend(qkv, step, layer)            qkv [rows, heads + 2 * KV heads, head_dim]
"""

CHUNK = 256
"""Tokens of a context that are attended to at once, in whole pages. Chunks begin at multiples of
this, so what is computed for a row depends on nothing but its own context."""

ROW_FIELDS = 4
NUM_ROWS, WIDTH, EPS, GATED_WIDTH = range(ROW_FIELDS)
"""A step for norms and gates: WIDTH is that of the residual stream, EPS a float32."""

NORM_FIELDS = 3
RESIDUAL, WEIGHT, NORMED = range(NORM_FIELDS)
"""A norm: addresses of tensors [rows, WIDTH], and of the weight in float32."""

LAYER_FIELDS = 5
K_POOL, V_POOL, Q_NORM, K_NORM, NORM_EPS = range(LAYER_FIELDS)
"""A layer: addresses of its keys and values [kv_heads, pages, page_size, head_dim], and of the
float32 weights of its norms of heads [head_dim], or 0; NORM_EPS is their float32."""

STEP_FIELDS = 29
(
    ROWS,  # of the step, one after the other those of its sequences
    PAIRS,  # of a sequence and a chunk that its last row sees
    PAIR_SEQUENCES,  # int32 [pairs]
    PAIR_CHUNKS,  # int32 [pairs]
    FIRST_ROWS,  # int32 [sequences + 1]
    STARTS,  # int32 [sequences]: the position of its first row
    ROW_SEQUENCES,  # int32 [rows]
    TABLES,  # int32 [sequences, TABLE_WIDTH]: pages
    TABLE_WIDTH,
    ANGLES,  # float32 [rows, head_dim]: cosines, then sines
    THREADS,
    PARALLEL,  # GOMP_parallel
    ATTEND_PART,  # the kernel that `attend` runs in each thread
    NEXT_UNIT,  # counters: of pairs for a KV head that are begun,
    NEXT_THREAD,  # and of threads
    LAYER,  # the layer that is attended to
    QUERIES,  # float32 [rows, heads, head_dim]
    MOST_CHUNKS,  # of a row
    PARTIALS,  # float32 [rows, MOST_CHUNKS, heads, head_dim]
    STATISTICS,  # float32 [rows, MOST_CHUNKS, heads, 2]: largest score, sum of exponentials
    SCORES,  # float32 [threads, 4, SCORES_WIDTH]
    SCORES_WIDTH,
    OUT,  # [rows, heads, head_dim]
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    PAGE_SIZE,
    PAGES,  # of the pool
    QUERY_SCALE,  # float32: with it exponentials of scores are powers of two
) = range(STEP_FIELDS)
