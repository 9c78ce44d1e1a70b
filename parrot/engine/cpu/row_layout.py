"""The argument of the CPU kernels for many rows: a block of int64, passed by address.

All threads run the kernel with the same block. Each thread takes rows until no row is left.

    norm_rows       OUT = RMSNorm of X, with the weight OTHER, float32 [WIDTH]
    gate_rows       X [rows, 2 * WIDTH] -> OUT = silu(first half) * second half
    rotate_rows       X [rows, HEADS, WIDTH], rotated in place by OTHER, float32 [rows, WIDTH]:
                    cosines, then sines
"""

ROW_FIELDS = 9
X, OUT, OTHER, NUM_ROWS, WIDTH, HEADS, STRIDE, EPS, NEXT_UNIT = range(ROW_FIELDS)
"""STRIDE: bytes between rows of X, for `rotate_rows`. EPS: a float32. NEXT_UNIT: initially 0."""

UNIT_ROWS = 16  # Rows that a thread takes at once.
