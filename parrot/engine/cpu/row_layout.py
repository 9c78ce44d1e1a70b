"""The block of int64 that kernels of many rows are given, by address. They are functions of it
alone, which threads call beside each other: each takes rows until none is left.

    norm_rows       OUT = RMSNorm of X, OTHER its weight, float32 [WIDTH]
    gate_rows       X [rows, 2 * WIDTH] -> OUT = silu(first half) * second half
    turn_rows       X [rows, HEADS, WIDTH], turned in place by OTHER, float32 [rows, WIDTH]:
                    cosines, then sines
"""

ROW_FIELDS = 9
X, OUT, OTHER, NUM_ROWS, WIDTH, HEADS, STRIDE, EPS, NEXT_UNIT = range(ROW_FIELDS)
"""STRIDE: bytes from a row of X to the next, for `turn_rows`. EPS: a float32. NEXT_UNIT: zero."""

UNIT_ROWS = 16
"""Rows that a thread takes at once."""
