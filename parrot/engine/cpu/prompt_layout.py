"""The block of int64 that `attend_prompt` is given, by address."""

PROMPT_FIELDS = 18
(
    QUERIES,  # bfloat16 [TOKENS, HEADS, HEAD_DIM], the last two contiguous
    QUERY_STRIDE,  # bytes from a token to the next
    KEYS,  # bfloat16 [KV_HEADS, WIDTH / 64, HEAD_DIM / 2, 64, 2]
    VALUES,  # bfloat16 [KV_HEADS, WIDTH / 2, HEAD_DIM, 2]; beyond the last key finite
    OUT,  # bfloat16 [TOKENS, HEADS, HEAD_DIM]
    STATISTICS,  # float32 [TOKENS, HEADS, 2]: largest score, sum of powers of two of the others
    TOKENS,  # the last ones of the context, at least as many as a tile has rows
    NUM_KEYS,  # of the context: the last token sees all, each one before it one less
    WIDTH,  # NUM_KEYS, rounded up to a multiple of a tile's columns
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    QUERY_SCALE,  # float32: with it exponentials of scores are powers of two
    THREADS,
    PARALLEL,  # GOMP_parallel
    SCRATCH,  # THREADS blocks of `scratch_bytes`
    NEXT_UNIT,  # counters: of units that are begun,
    NEXT_THREAD,  # and of threads
) = range(PROMPT_FIELDS)

TILE_ROWS, TILE_COLUMNS = 6, 64
UNIT_TOKENS = 8 * TILE_ROWS
"""Tokens of a head that a thread computes at once."""


def scratch_bytes(width: int) -> int:
    """Scores in float32 and weights in bfloat16 of a tile's rows, and a tile."""
    return TILE_ROWS * (width * 6 + TILE_COLUMNS * 4)
