"""Work items of about the same shape, to be run as one padded call (numpy only)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from parrot.engine.attention.batch import IntArray, Span, Square

T = TypeVar("T")

# Padding is free up to here, in row-tokens: about what one more call costs.
_FREE_PADDING = 1024
_MAX_PADDING_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class SpanBucket:
    """`num_items` spans, each padded to `num_rows` rows and `num_blocks` blocks.

    `rows` [num_items * num_rows] and `blocks` [num_items * num_blocks]; padding repeats an item's
    own first row or block. `slots`: for each partial in `rows`, padding or not, its number in the
    work list, or -1."""

    rows: IntArray
    blocks: IntArray
    kv_lens: IntArray
    slots: IntArray
    num_items: int
    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SquareBucket:
    """Squares padded at the end to `num_rows` rows: no real row sees the padding."""

    rows: IntArray
    slots: IntArray
    num_items: int
    num_rows: int


def bucket_spans(spans: Sequence[Span], first_slot: int = 0) -> list[SpanBucket]:
    starts = _starts([len(s.rows) for s in spans], first_slot)
    buckets = []
    for members in _group(range(len(spans)), lambda i: (len(spans[i].rows), spans[i].kv_len)):
        chosen = [spans[i] for i in members]
        num_rows = max(len(s.rows) for s in chosen)
        num_blocks = max(len(s.blocks) for s in chosen)
        buckets.append(
            SpanBucket(
                rows=np.concatenate([_pad(s.rows, num_rows, s.rows[0]) for s in chosen]),
                blocks=np.concatenate([_pad(s.blocks, num_blocks, s.blocks[0]) for s in chosen]),
                kv_lens=np.array([s.kv_len for s in chosen], dtype=np.int64),
                slots=_slots(starts, members, [len(s.rows) for s in chosen], num_rows),
                num_items=len(chosen),
                num_rows=num_rows,
                num_blocks=num_blocks,
            )
        )
    return buckets


def bucket_squares(squares: Sequence[Square], first_slot: int) -> list[SquareBucket]:
    starts = _starts([s.num_rows for s in squares], first_slot)
    buckets = []
    for members in _group(range(len(squares)), lambda i: (squares[i].num_rows,) * 2):
        chosen = [squares[i] for i in members]
        num_rows = max(s.num_rows for s in chosen)
        rows = [
            _pad(np.arange(s.first_row, s.first_row + s.num_rows), num_rows, s.first_row)
            for s in chosen
        ]
        slots = _slots(starts, members, [s.num_rows for s in chosen], num_rows)
        buckets.append(SquareBucket(np.concatenate(rows), slots, len(chosen), num_rows))
    return buckets


def _starts(counts: Sequence[int], first_slot: int) -> IntArray:
    array = np.array(counts, dtype=np.int64)
    return np.cumsum(array) - array + first_slot


def _slots(
    starts: IntArray, members: Sequence[int], counts: Sequence[int], num_rows: int
) -> IntArray:
    parts = [
        _pad(np.arange(starts[i], starts[i] + count), num_rows, -1)
        for i, count in zip(members, counts, strict=True)
    ]
    return np.concatenate(parts)


def _pad(values: IntArray, length: int, fill: int) -> IntArray:
    padded = np.full(length, fill, dtype=np.int64)
    padded[: len(values)] = values
    return padded


def _group(items: Sequence[T], shape: Callable[[T], tuple[int, int]]) -> list[list[T]]:
    """Groups of items, largest first. An item joins while the padding of its group stays free or
    a small part of the real work; the number of groups grows only with the spread of shapes."""
    groups: list[list[T]] = []
    bound = (0, 0)
    real = 0
    for item in sorted(items, key=shape, reverse=True):
        rows, length = shape(item)
        wider = (max(bound[0], rows), max(bound[1], length))
        if groups:
            padding = (len(groups[-1]) + 1) * wider[0] * wider[1] - (real + rows * length)
            if padding <= max(_FREE_PADDING, _MAX_PADDING_RATIO * (real + rows * length)):
                groups[-1].append(item)
                bound, real = wider, real + rows * length
                continue
        groups.append([item])
        bound, real = (rows, length), rows * length
    return groups
