"""CPU kernels between a decoder's matrix products, for many rows, in one pass over each row.

torch's operators take four or five passes, and the rows have left the core's cache between them.
Only the process that compiles the kernels (`build`) imports this module. See `row_layout`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import numpy as np
from numba import njit

from parrot.engine.cpu.row_layout import (
    EPS,
    HEADS,
    NEXT_UNIT,
    NUM_ROWS,
    OTHER,
    OUT,
    STRIDE,
    UNIT_ROWS,
    WIDTH,
    X,
)
from parrot.engine.cpu.simd import (
    LANES,
    MEMORY,
    add,
    divide,
    exp2,
    float_at,
    int64_at,
    load_float32,
    multiply,
    multiply_add,
    root,
    splat,
    subtract,
    take_next,
    total,
)

_LOG2_E = math.log2(math.e)


def row_kernels_of(dtype):  # noqa: C901
    """The kernels for tensors of this type, by name. The caller compiles them."""
    load, store, size = MEMORY[dtype]
    compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

    @compiled
    def norm_rows(task):
        rows, width, eps = int64_at(task, NUM_ROWS), int64_at(task, WIDTH), float_at(task, 2 * EPS)
        weight = int64_at(task, OTHER)
        first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS
        while first < rows:
            for row in range(first, min(first + UNIT_ROWS, rows)):
                x = int64_at(task, X) + row * width * size
                out = int64_at(task, OUT) + row * width * size
                squares = splat(np.float32(0.0))
                for i in range(0, width, LANES):
                    value = load(x + i * size)
                    squares = multiply_add(value, value, squares)
                scale = splat(np.float32(1.0) / root(total(squares) / np.float32(width) + eps))
                for i in range(0, width, LANES):
                    value = multiply(load(x + i * size), scale)
                    store(out + i * size, multiply(value, load_float32(weight + i * 4)))
            first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS

    @compiled
    def gate_rows(task):
        rows, width = int64_at(task, NUM_ROWS), int64_at(task, WIDTH)
        one, minus_log2_e = splat(np.float32(1.0)), splat(np.float32(-_LOG2_E))
        first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS
        while first < rows:
            for row in range(first, min(first + UNIT_ROWS, rows)):
                gates = int64_at(task, X) + 2 * row * width * size
                ups, out = gates + width * size, int64_at(task, OUT) + row * width * size
                for i in range(0, width * size, LANES * size):
                    gate = load(gates + i)
                    denominator = add(one, exp2(multiply(gate, minus_log2_e)))
                    store(out + i, multiply(divide(gate, denominator), load(ups + i)))
            first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS

    @compiled
    def rotate_rows(task):
        rows, width = int64_at(task, NUM_ROWS), int64_at(task, WIDTH)
        half = width // 2
        first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS
        while first < rows:
            for row in range(first, min(first + UNIT_ROWS, rows)):
                angles = int64_at(task, OTHER) + row * width * 4
                for head in range(int64_at(task, HEADS)):
                    x = int64_at(task, X) + row * int64_at(task, STRIDE) + head * width * size
                    for i in range(0, half, LANES):
                        low, high = load(x + i * size), load(x + (half + i) * size)
                        cos, sin = (
                            load_float32(angles + i * 4),
                            load_float32(angles + (half + i) * 4),
                        )
                        store(x + i * size, subtract(multiply(low, cos), multiply(high, sin)))
                        rotated = add(multiply(high, cos), multiply(low, sin))
                        store(x + (half + i) * size, rotated)
            first = take_next(task + 8 * NEXT_UNIT) * UNIT_ROWS

    return {"norm_rows": norm_rows, "gate_rows": gate_rows, "rotate_rows": rotate_rows}
