"""A step as flat arrays, and what each of its rows must attend to.

Every token of a step is a row. Attention of a row over its context is cut into pieces whose
results (output, log-sum-exp) are merged, so that KV which several sequences share is read once:

    blocks of A   [ 3 9 4 | 6 ]          span: rows of A, B and C over blocks 3 9 4
    blocks of B   [ 3 9 4 | 7 8 ]        span: rows of A over 6; of B and C over 7; of B over 8; ...
    blocks of C   [ 3 9 4 | 7 5 ]        square: the new tokens of a chunk among themselves

A *span* is read from the KV pool and all of it is visible to all of its rows. A *square* is causal
and needs no pool: it is the part of a chunk that the step itself computes. A sequence with one new
token has no square; its span includes the token itself, whose KV is written before attention runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from parrot.engine.core.plan import BlockCopy, SampleSpec, SequenceStep, StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` attend to the first `kv_len` tokens of `blocks`."""

    rows: IntArray
    blocks: IntArray
    kv_len: int


@dataclass(frozen=True, slots=True)
class Square:
    """Rows [first_row, first_row + num_rows) attend causally to themselves."""

    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """The partial results of a step, numbered span by span, then square by square, row by row.

    Row r merges the partials `merge_slots[merge_indptr[r]:merge_indptr[r + 1]]`."""

    spans: tuple[Span, ...]
    squares: tuple[Square, ...]
    merge_indptr: IntArray
    merge_slots: IntArray
    shared_tokens_saved: int


@dataclass(frozen=True, slots=True)
class Batch:
    """`slots[r]` is where row r's KV goes: block * block_size + offset. `sample_rows[i]` is the row
    whose logits `samples[i]` asks for. `fresh_blocks` begin in this step, which does not fill
    them."""

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    sample_rows: IntArray
    samples: tuple[SampleSpec, ...]
    copies: tuple[BlockCopy, ...]
    fresh_blocks: IntArray
    work: WorkList

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence in the making: its rows [first, first + count), and the block its own span
    begins at; what is before it is covered by shared spans."""

    first: int
    count: int
    blocks: IntArray
    start: int

    @property
    def rows(self) -> IntArray:
        return np.arange(self.first, self.first + self.count)

    @property
    def span_end(self) -> int:
        return self.start + 1 if self.count == 1 else self.start


def build_batch(plan: StepPlan, block_size: int, min_saved_tokens: int | None) -> Batch:
    """Flatten a plan. A common prefix becomes a shared span when that saves reading at least
    `min_saved_tokens` tokens of KV (sharers beyond the first, times length); None: never."""
    sequences = [s for s in plan.sequences if len(s.token_ids)]
    counts = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    tables = [np.asarray(s.block_ids, dtype=np.int64) for s in sequences]
    positions = [np.arange(s.start, s.end) for s in sequences]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, p in zip(tables, positions, strict=True)
    ]
    rows = [
        _Row(int(first), int(count), table, s.start)
        for first, count, table, s in zip(firsts, counts, tables, sequences, strict=True)
    ]
    sampled = [
        (s.sample, int(f + c) - 1) for s, f, c in zip(sequences, firsts, counts, strict=True)
    ]
    return Batch(
        token_ids=_concat([np.asarray(s.token_ids, dtype=np.int64) for s in sequences]),
        positions=_concat(positions),
        slots=_concat(slots),
        sample_rows=np.array(
            [row for sample, row in sampled if sample is not None], dtype=np.int64
        ),
        samples=tuple(sample for sample, _ in sampled if sample is not None),
        copies=plan.copies,
        fresh_blocks=_fresh_blocks(sequences, tables, block_size),
        work=_plan_work(rows, int(counts.sum()), block_size, min_saved_tokens),
    )


def _concat(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _fresh_blocks(
    sequences: Sequence[SequenceStep], tables: Sequence[IntArray], block_size: int
) -> IntArray:
    """The last block of a sequence, where the step begins it and leaves slots of it empty."""
    fresh = [
        table[s.end // block_size]
        for s, table in zip(sequences, tables, strict=True)
        if s.end % block_size and s.start <= s.end - s.end % block_size
    ]
    return np.array(fresh, dtype=np.int64)


def _plan_work(
    sequences: list[_Row], num_rows: int, block_size: int, min_saved_tokens: int | None
) -> WorkList:
    spans: list[Span] = []
    own_from = np.zeros(len(sequences), dtype=np.int64)
    saved = 0
    for members, begin, end in _shared_prefixes(sequences, block_size, min_saved_tokens):
        blocks = sequences[members[0]].blocks[begin:end]
        rows = np.concatenate([sequences[m].rows for m in members])
        spans.append(Span(rows, blocks, len(blocks) * block_size))
        own_from[members] = end
        saved += (len(members) - 1) * len(blocks) * block_size
    for sequence, begin in zip(sequences, own_from.tolist(), strict=True):
        kv_len = sequence.span_end - begin * block_size
        if kv_len > 0:
            num_blocks = -(-kv_len // block_size)
            blocks = sequence.blocks[begin : begin + num_blocks]
            spans.append(Span(sequence.rows, blocks, kv_len))
    squares = tuple(Square(s.first, s.count) for s in sequences if s.count > 1)
    indptr, slots = _merge_lists(spans, squares, num_rows)
    return WorkList(tuple(spans), squares, indptr, slots, saved)


def _merge_lists(
    spans: Sequence[Span], squares: Sequence[Square], num_rows: int
) -> tuple[IntArray, IntArray]:
    parts = [s.rows for s in spans]
    parts += [np.arange(s.first_row, s.first_row + s.num_rows) for s in squares]
    row_of_slot = _concat(parts)
    indptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of_slot, minlength=num_rows), out=indptr[1:])
    return indptr, np.argsort(row_of_slot, kind="stable")


def _shared_prefixes(
    sequences: list[_Row], block_size: int, min_saved_tokens: int | None
) -> Iterator[tuple[list[int], int, int]]:
    """Yield (members, begin, end): sequences whose blocks [begin, end) are the same and worth
    sharing, ancestors first. Only blocks that were full before the step are shared."""
    if min_saved_tokens is None:
        return
    full = [s.blocks[: s.start // block_size] for s in sequences]
    candidates = [i for i, blocks in enumerate(full) if len(blocks)]
    if len({int(full[i][0]) for i in candidates}) == len(candidates):
        return
    # Any order will do that puts equal prefixes together; comparing bytes is the fastest.
    order = sorted(candidates, key=lambda i: full[i].tobytes())
    common = [_common_length(full[a], full[b]) for a, b in pairwise(order)]
    # A group is order[lo:hi] with the blocks up to `done` already covered by shared spans.
    groups = [(lo, hi, 0) for lo, hi in _split(common, 0, len(order), 0)]
    while groups:
        lo, hi, done = groups.pop()
        if hi - lo < 2:
            continue
        depth = min(common[lo : hi - 1])
        worth = (hi - lo - 1) * (depth - done) * block_size >= max(1, min_saved_tokens)
        if worth:
            yield order[lo:hi], done, depth
        groups += [(a, b, depth if worth else done) for a, b in _split(common, lo, hi, depth)]


def _split(common: Sequence[int], lo: int, hi: int, depth: int) -> Iterator[tuple[int, int]]:
    """Cut order[lo:hi] where neighbours have no more than `depth` blocks in common."""
    begin = lo
    for i in range(lo, hi - 1):
        if common[i] <= depth:
            yield begin, i + 1
            begin = i + 1
    if begin < hi:
        yield begin, hi


def _common_length(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
