"""The arguments of the CPU kernels for few rows: blocks of int64, passed by address.

A kernel receives three addresses: of a tensor, of a block for the step, and of a block for the
layer (or of the output).

    add_rms_norm(x, rows, norm)         residual += x, unless x is 0, and out = its RMSNorm
    silu_multiply(x, rows, out)         x [rows, 2 * GATED_WIDTH] -> silu(first half) * second half
    attend(qkv, step, layer)            qkv [rows, heads + 2 * KV heads, head_dim]
"""

# Tokens of a context that a unit of attention covers, rounded up to whole pages. Chunks start at
# multiples of this number, so the result of a row depends only on its own context.
CHUNK = 256

ROW_FIELDS = 4
NUM_ROWS, WIDTH, EPS, GATED_WIDTH = range(ROW_FIELDS)
"""A step, for norms and gates. WIDTH is the width of the residual stream. EPS is a float32."""

NORM_FIELDS = 3
RESIDUAL, WEIGHT, NORMED = range(NORM_FIELDS)
"""A norm: the addresses of two tensors [rows, WIDTH], and of the weight in float32."""

LAYER_FIELDS = 5
K_POOL, V_POOL, Q_NORM, K_NORM, NORM_EPS = range(LAYER_FIELDS)
"""A layer: the addresses of its keys and values [kv_heads, pages, page_size, head_dim], and of the
float32 weights [head_dim] of its head norms (0 for none). NORM_EPS is a float32."""

STEP_FIELDS = 29
(
    ROWS,  # Number of rows in the step, ordered by sequence.
    PAIRS,  # Number of pairs of a sequence and a chunk of its context.
    PAIR_SEQUENCES,  # int32 [pairs]
    PAIR_CHUNKS,  # int32 [pairs]
    FIRST_ROWS,  # int32 [sequences + 1]
    STARTS,  # int32 [sequences]: the position of each sequence's first row
    ROW_SEQUENCES,  # int32 [rows]
    TABLES,  # int32 [sequences, TABLE_WIDTH]: pages
    TABLE_WIDTH,
    ANGLES,  # float32 [rows, head_dim]: cosines, then sines
    THREADS,
    PARALLEL,  # Address of GOMP_parallel.
    ATTEND_PART,  # Address of the kernel that `attend` runs in each thread.
    NEXT_UNIT,  # Counter of started units. A unit is a pair and a KV head.
    NEXT_THREAD,  # Counter of started threads.
    LAYER,  # Address of the current layer's block.
    QUERIES,  # float32 [rows, heads, head_dim]
    MOST_CHUNKS,  # Largest number of chunks of a row.
    PARTIALS,  # float32 [rows, MOST_CHUNKS, heads, head_dim]
    STATISTICS,  # float32 [rows, MOST_CHUNKS, heads, 2]: largest score, sum of exponentials
    SCORES,  # float32 [threads, 4, SCORES_WIDTH]
    SCORES_WIDTH,
    OUT,  # [rows, heads, head_dim]
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    PAGE_SIZE,
    PAGES,  # Number of pages in the pool.
    QUERY_SCALE,  # float32, including log2(e), so that the softmax uses powers of two.
) = range(STEP_FIELDS)
