"""The argument of `attend_prompt`: a block of int64, passed by address."""

PROMPT_FIELDS = 18
(
    QUERIES,  # bfloat16 [TOKENS, HEADS, HEAD_DIM], the last two contiguous
    QUERY_STRIDE,  # Bytes between tokens.
    KEYS,  # bfloat16 [KV_HEADS, WIDTH / 64, HEAD_DIM / 2, 64, 2]
    VALUES,  # bfloat16 [KV_HEADS, WIDTH / 2, HEAD_DIM, 2]; finite after the last key
    OUT,  # bfloat16 [TOKENS, HEADS, HEAD_DIM]
    STATISTICS,  # float32 [TOKENS, HEADS, 2]: largest score, sum of powers of two
    TOKENS,  # Number of query tokens, the last of the context; at least TILE_ROWS.
    NUM_KEYS,  # Keys of the context. The last token attends to all of them.
    WIDTH,  # NUM_KEYS, rounded up to a multiple of TILE_COLUMNS.
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    QUERY_SCALE,  # float32, including log2(e), so that the softmax uses powers of two.
    THREADS,
    PARALLEL,  # Address of GOMP_parallel.
    SCRATCH,  # THREADS blocks of `scratch_bytes`.
    NEXT_UNIT,  # Counter of started units.
    NEXT_THREAD,  # Counter of started threads.
) = range(PROMPT_FIELDS)

TILE_ROWS, TILE_COLUMNS = 6, 64
UNIT_TOKENS = 8 * TILE_ROWS  # Tokens of a head that a thread takes at once.


def scratch_bytes(width: int) -> int:
    """Bytes of a tile's scores in float32, its weights in bfloat16, and a tile of results."""
    return TILE_ROWS * (width * 6 + TILE_COLUMNS * 4)
