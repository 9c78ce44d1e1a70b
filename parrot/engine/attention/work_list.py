"""One step's attention as a list of work items, planned in numpy.

An item has query tokens, a span of KV, and slots for partial results. The queries of a shared
node's items are the tokens of all its requests. The KV that a request does not share has items of
its own. Long spans are split so that all multiprocessors have work. A token that one item covers
gets its output directly. A second kernel merges the partial results of the other tokens:

    tokens         0 1 2 3 4        requests A = {0}, B = {1}, C = {2 3 4}, a prompt chunk
    shared node    [ item 0  ]      slots 0 2 4 6 8       a token's slots are adjacent
    own KV         |1|2| 3   |      slots 1 3 5 7 9

There are up to four launches. A row is one token and one of the query heads of a KV head.

- narrow: items with few rows, such as decodes
- shared: shared nodes with more rows
- fills: prompt chunks
- converted fills: prompt chunks whose quantised pages a kernel converts to the type of q first

Long prompts from position 0 can be computed by cuDNN instead ("dense"). They have no items.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from parrot.engine.attention.context_tree import (
    GateConfig,
    IntArray,
    PrefixTree,
    TreeNode,
    build_tree,
    choose_shared,
)
from parrot.engine.kernels.attention_shape import AttentionShape

LongArray = npt.NDArray[np.int64]

OPEN_END = 1 << 30  # The end of a span that reaches to the position of each query token.

ITEM_FIELDS = 8
Q_FIRST, Q_COUNT, TABLE_ROW, KV_FIRST, KV_END, SLOT, OWN, CONVERTED_FIRST = range(ITEM_FIELDS)
"""Columns of an item. Its keys are the positions [KV_FIRST, KV_END) of block table row TABLE_ROW.

With OWN, its tokens are rows Q_FIRST... of q, all of one request. Each token attends to keys up to
its own position. Without OWN, its tokens are `token_order[Q_FIRST...]` and attend to all keys.
Token j writes partial result `slot_of[SLOT + j]`, or the output if SLOT is negative. For converted
fills, page i of the row is the converted page CONVERTED_FIRST + i."""


NARROW, SHARED, FILL, CONVERTED_FILL = range(4)

# Narrow spans are uneven if the longest exceeds this multiple of their mean length.
_UNEVEN_RATIO = 1.5

# Narrow items are even if the longest does not exceed this multiple of their mean length.
_EVEN_RATIO = 1.25

# Added to a quotient before rounding down: a span of 1.6 targets is split, a span of 1.5 is not.
_SPLIT_ROUNDING = 0.4


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The rules for splitting spans, chosen on an H200 (docs/internals/kernels.md)."""

    num_sms: int = 132  # Multiprocessors of the GPU.
    # By class of item (narrow, shared, fill): the target number of programs per multiprocessor, and
    # the smallest split, in tokens.
    waves: tuple[float, float, float] = (2.0, 1.0, 1.0)
    min_span: tuple[int, int, int] = (128, 256, 256)
    uneven: float = 2.0  # Multiplies the target of uneven narrow spans.
    narrow_rows: int = 16  # Most rows of a narrow item.
    tile_rows: int = 64  # Most rows of other items.
    # Bytes of narrow KV that the GPU reads while a program of a shared item processes one key. Both
    # run in parallel, so a shared span that ends before the narrow spans need not be split.
    hidden_bytes: int = 110_000
    # A prompt chunk from position 0 with at least `dense_min` tokens is dense, up to a multiple of
    # `dense` tokens. None: no chunk is dense.
    dense: int | None = None
    dense_min: int = 4096
    converted_pages: int = 0  # Most pages that a step converts.
    converted_rows: int = 256  # Fewest rows of a converted fill.


@dataclass(frozen=True, slots=True)
class StepRows:
    """The sequences of one step.

    Request r computes the tokens at positions [starts[r], starts[r] + q_lens[r]). These are the
    rows [q_first[r], q_first[r] + q_lens[r]) of q."""

    tables: IntArray  # The block table, int32 [requests, pages].
    starts: IntArray
    q_lens: IntArray

    @property
    def q_first(self) -> IntArray:
        ends = np.cumsum(self.q_lens, dtype=np.int32)
        return (ends - self.q_lens).astype(np.int32)

    @property
    def requests(self) -> IntArray:
        """The request of each row of q."""
        return np.repeat(np.arange(len(self.q_lens), dtype=np.int32), self.q_lens)

    @property
    def positions(self) -> IntArray:
        """The position of each row of q in its context."""
        shift = np.repeat(self.starts - self.q_first, self.q_lens)
        return (shift + np.arange(len(shift))).astype(np.int32)

    def fresh_pages(self, page_size: int) -> IntArray:
        """The pages that this step starts to fill and does not complete."""
        ends = self.starts + self.q_lens
        tail = ends % page_size
        begun = np.flatnonzero((tail > 0) & (self.starts <= ends - tail))
        pages: IntArray = self.tables[begun, ends[begun] // page_size]
        return pages


@dataclass(frozen=True, slots=True)
class WorkList:
    """The plan of a step. Items are int32 [items, ITEM_FIELDS], in descending order of work."""

    narrow: IntArray
    narrow_is_even: bool  # No narrow item is much longer than the mean.
    shared: IntArray
    fills: IntArray
    converted_fills: IntArray
    converted_pages: IntArray  # Pages of the pool to convert, in this order.
    tile_rows: int  # Rows of a tile, for all items except narrow ones.
    token_order: IntArray  # A permutation of the rows of q.
    # Token t merges the partial results [slot_indptr[t], slot_indptr[t + 1]). The range is empty if
    # its output is written directly.
    slot_indptr: IntArray
    slot_of: IntArray
    # (first row of q, number of tokens) of dense spans. Each starts at position 0 of a context.
    dense: tuple[tuple[int, int], ...]
    num_shared_tokens: int  # Number of KV tokens that sharing saves from being read again.
    hides_keys: bool  # Items without visible keys were dropped, so the plan cannot be reused.

    @property
    def num_slots(self) -> int:
        return len(self.slot_of)

    def with_table_rows(self, rows: IntArray) -> "WorkList":
        """A copy in which items refer to row `rows[i]` of the block tables instead of row i."""

        def mapped(items: IntArray) -> IntArray:
            changed = items.copy()
            changed[:, TABLE_ROW] = rows[items[:, TABLE_ROW]]
            return changed

        return replace(
            self,
            narrow=mapped(self.narrow),
            shared=mapped(self.shared),
            fills=mapped(self.fills),
            converted_fills=mapped(self.converted_fills),
        )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Parallel arrays with an entry per shared node and per request's own KV."""

    q_first: LongArray
    q_count: LongArray
    table_row: LongArray
    kv_first: LongArray
    kv_end: LongArray
    length: LongArray
    causal_first: LongArray  # Position of the first token of own KV; OPEN_END for shared nodes.


def plan_work(
    step: StepRows, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig
) -> WorkList:
    """Plan items that cover each pair of a token and a visible KV position exactly once.

    `gate` None: share no node."""
    num_dense = _num_dense(step, split)
    if len(num_dense) == 1 and num_dense[0] == step.q_lens[0]:
        return _without_items(int(num_dense[0]), split)
    if gate is None:
        tree = PrefixTree(np.arange(len(step.q_lens), dtype=np.int32), ())
    else:
        tree = build_tree(step.tables, (step.starts // shape.page_size).astype(np.int32))
    shared = choose_shared(tree, step.q_lens, shape, gate or GateConfig())
    order = tree.order
    token_order, first_in_order = _order_tokens(step, order)
    spans = _spans(step, num_dense, order, shared, first_in_order, shape.page_size)
    kinds = _kinds(spans, shape, split)
    converted_first, converted_pages = _conversions(spans, kinds, step.tables, shape.page_size)
    items, item_kinds, lengths, hides_keys = _cut(spans, kinds, converted_first, shape, split)
    indptr, slot_of = _assign_slots(items, token_order)
    own = items[:, OWN] != 0
    items[own, Q_FIRST] = token_order[items[own, Q_FIRST]]
    narrow = lengths[item_kinds == NARROW]
    is_even = narrow.max(initial=0) * len(narrow) <= _EVEN_RATIO * narrow.sum()
    num_shared_pages = sum((n.hi - n.lo - 1) * (n.end_page - n.first_page) for n in shared)
    by_kind = [items[item_kinds == kind].astype(np.int32) for kind in range(4)]
    return WorkList(
        narrow=by_kind[NARROW],
        narrow_is_even=bool(is_even),
        shared=by_kind[SHARED],
        fills=by_kind[FILL],
        converted_fills=by_kind[CONVERTED_FILL],
        converted_pages=converted_pages,
        tile_rows=split.tile_rows,
        token_order=token_order,
        slot_indptr=indptr,
        slot_of=slot_of,
        dense=tuple((int(step.q_first[r]), int(num_dense[r])) for r in np.flatnonzero(num_dense)),
        num_shared_tokens=num_shared_pages * shape.page_size,
        hides_keys=hides_keys,
    )


def _without_items(num_tokens: int, split: SplitConfig) -> WorkList:
    """The plan of a single prompt that is completely dense."""
    none = np.empty((0, ITEM_FIELDS), dtype=np.int32)
    return WorkList(
        **dict.fromkeys(("narrow", "shared", "fills", "converted_fills"), none),
        narrow_is_even=True,
        converted_pages=none[:, 0],
        tile_rows=split.tile_rows,
        token_order=np.arange(num_tokens, dtype=np.int32),
        slot_indptr=np.zeros(num_tokens + 1, dtype=np.int32),
        slot_of=none[:, 0],
        dense=((0, num_tokens),),
        num_shared_tokens=0,
        hides_keys=False,
    )


def _order_tokens(step: StepRows, order: IntArray) -> tuple[IntArray, LongArray]:
    """The rows of q in the order of sorted requests, and the first row of each sorted request."""
    counts = step.q_lens[order]
    first_in_order = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    if first_in_order[-1] == len(order):  # Decodes only.
        return order, first_in_order
    shift = step.q_first[order] - first_in_order[:-1]
    rows = np.repeat(shift, counts) + np.arange(first_in_order[-1])
    return rows.astype(np.int32), first_in_order


def _num_dense(step: StepRows, split: SplitConfig) -> LongArray:
    """The number of leading tokens of each request that are dense."""
    q_lens = step.q_lens.astype(np.int64)
    if split.dense is None or q_lens.max(initial=0) < split.dense_min:
        return np.zeros_like(q_lens)
    is_dense = (step.starts == 0) & (q_lens >= split.dense_min)
    return np.where(is_dense, q_lens // split.dense * split.dense, 0)


def _spans(
    step: StepRows,
    num_dense: LongArray,
    order: IntArray,
    shared: tuple[TreeNode, ...],
    first_in_order: LongArray,
    page_size: int,
) -> _Spans:
    own_first = np.zeros(len(order), dtype=np.int64)
    for node in reversed(shared):  # Parents first: the deepest node wins.
        own_first[node.lo : node.hi] = node.end_page * page_size
    nodes = np.array([(n.lo, n.hi, n.first_page, n.end_page) for n in shared], dtype=np.int64)
    lo, hi, first_page, end_page = nodes.reshape(-1, 4).T
    skipped = num_dense[order]
    starts = step.starts[order].astype(np.int64) + skipped
    counts = step.q_lens[order].astype(np.int64) - skipped
    node_first, node_end = first_page * page_size, end_page * page_size
    left = np.flatnonzero(counts)
    return _Spans(
        q_first=np.concatenate((first_in_order[lo], (first_in_order[:-1] + skipped)[left])),
        q_count=np.concatenate((first_in_order[hi] - first_in_order[lo], counts[left])),
        table_row=np.concatenate((order[lo], order[left])).astype(np.int64),
        kv_first=np.concatenate((node_first, own_first[left])),
        kv_end=np.concatenate((node_end, np.full(len(left), OPEN_END))),
        length=np.concatenate((node_end - node_first, (starts + counts - own_first)[left])),
        causal_first=np.concatenate((np.full(len(lo), OPEN_END), starts[left])),
    )


def _kinds(spans: _Spans, shape: AttentionShape, split: SplitConfig) -> LongArray:
    """The class of each span. Long fills are converted until `converted_pages` is reached."""
    rows = spans.q_count * shape.group
    kinds = np.where(spans.causal_first == OPEN_END, SHARED, FILL)
    kinds[rows <= split.narrow_rows] = NARROW
    if not split.converted_pages:
        return kinds
    long = (kinds == FILL) & (rows >= split.converted_rows)
    num_pages = np.where(long, -(-spans.length // shape.page_size), 0)
    kinds[long & (np.cumsum(num_pages) <= split.converted_pages)] = CONVERTED_FILL
    return kinds


def _conversions(
    spans: _Spans, kinds: LongArray, tables: IntArray, page_size: int
) -> tuple[LongArray, IntArray]:
    """CONVERTED_FIRST of each span, and the pages to convert."""
    first = spans.kv_first // page_size
    counts = np.where(kinds == CONVERTED_FILL, -(-spans.length // page_size), 0)
    if not counts.any():
        return counts, tables[:0, 0]
    converted_first = np.cumsum(counts) - counts - first
    span = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(len(span)) - converted_first[span]
    return converted_first, tables[spans.table_row[span], columns]


def _cut(
    spans: _Spans,
    kinds: LongArray,
    converted_first: LongArray,
    shape: AttentionShape,
    split: SplitConfig,
) -> tuple[LongArray, LongArray, LongArray, bool]:
    """Split spans into items. Returns items, classes and numbers of keys in descending order of
    work, and whether items without visible keys were dropped.

    Q_FIRST is still an index into `token_order`, and SLOT is 0."""
    rows = np.where(kinds == NARROW, split.narrow_rows, split.tile_rows)
    tokens_per_block = rows // shape.group
    blocks = -(-spans.q_count // tokens_per_block)
    chunk = _chunk_lengths(spans, kinds, blocks, shape, split)
    parts = -(-spans.length // chunk)
    counts = blocks * parts
    span = np.repeat(np.arange(len(kinds)), counts)
    within = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
    part, block = within // blocks[span], within % blocks[span]
    q_first = block * tokens_per_block[span]
    q_count = np.minimum(spans.q_count[span] - q_first, tokens_per_block[span])
    kv_first = spans.kv_first[span] + part * chunk[span]
    kv_end = np.where(part + 1 == parts[span], spans.kv_end[span], kv_first + chunk[span])
    causal_end = spans.causal_first[span] + q_first + q_count
    work = np.minimum(kv_end, causal_end) - kv_first
    items = np.zeros((len(span), ITEM_FIELDS), dtype=np.int64)
    items[:, Q_FIRST] = spans.q_first[span] + q_first
    items[:, Q_COUNT] = q_count
    items[:, TABLE_ROW] = spans.table_row[span]
    items[:, KV_FIRST] = kv_first
    items[:, KV_END] = kv_end
    items[:, OWN] = spans.causal_first[span] != OPEN_END
    items[:, CONVERTED_FIRST] = np.where(kinds == CONVERTED_FILL, converted_first, 0)[span]
    # The first tokens of a fill attend to none of the keys in its last splits.
    seen = np.flatnonzero(work > 0)
    most_first = seen[np.argsort(-work[seen], kind="stable")]
    hides_keys = len(seen) < len(work)
    return items[most_first], kinds[span[most_first]], work[most_first], hides_keys


def _chunk_lengths(
    spans: _Spans, kinds: LongArray, blocks: LongArray, shape: AttentionShape, split: SplitConfig
) -> LongArray:
    """Tokens per split of each span. The splits of a span are equal and near the class's target."""
    kinds = np.minimum(kinds, FILL)
    work = (blocks * spans.length).astype(np.float64)
    by_kind = np.bincount(kinds, weights=work, minlength=3)
    waves = np.array(split.waves)
    narrow = spans.length[kinds == NARROW]
    if len(narrow) and narrow.max() * len(narrow) > _UNEVEN_RATIO * narrow.sum():
        waves[NARROW] *= split.uneven
    fair = by_kind * shape.num_kv_heads / (split.num_sms * waves)
    target = np.maximum(fair, split.min_span)
    hidden = narrow.sum() * shape.kv_token_bytes / split.hidden_bytes
    target[SHARED] = max(target[SHARED], hidden)
    target = target[kinds]
    parts = np.maximum((spans.length / target + _SPLIT_ROUNDING).astype(np.int64), 1)
    align = max(shape.page_size, 64)
    chunk: LongArray = -(-spans.length // (parts * align)) * align
    return chunk


def _assign_slots(items: LongArray, token_order: IntArray) -> tuple[IntArray, IntArray]:
    """Assign slots: sets SLOT of `items`, and returns `slot_indptr` and `slot_of`.

    An item gets no slots if no other item covers its tokens."""
    num_tokens = len(token_order)
    counts = items[:, Q_COUNT]
    item = np.repeat(np.arange(len(items)), counts)
    place = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts - items[:, Q_FIRST], counts)
    token = token_order[place].astype(np.int64)  # `item[i]` covers `token[i]`.
    covering = np.bincount(token, minlength=num_tokens)
    alone = np.ones(len(items), dtype=bool)
    alone[item[covering[token] > 1]] = False
    slot_counts = np.where(alone, 0, counts)
    slot_first = np.cumsum(slot_counts) - slot_counts
    items[:, SLOT] = np.where(alone, -1, slot_first)
    merged = ~alone[item]
    merged_token = token[merged]
    slot_of = np.empty(len(merged_token), dtype=np.int32)
    slot_of[np.argsort(merged_token, kind="stable")] = np.arange(len(merged_token))
    per_token = np.bincount(merged_token, minlength=num_tokens)
    indptr = np.concatenate(([0], np.cumsum(per_token))).astype(np.int32)
    return indptr, slot_of


# A plan is reused until a context has grown by this number of tokens. More tokens would make the
# splits uneven.
_MAX_GROWTH = 64

_KEPT = 8  # Number of cached plans. Steps with and without drafts alternate, so one is too few.

_Key = tuple[tuple[int, ...], bytes]


class WorkPlanner:
    """Plans steps. Reuses a plan while the same contexts have equal numbers of new tokens.

    A plan stays valid while its contexts grow, because kernels read the positions of tokens."""

    def __init__(self, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig) -> None:
        self._arguments = (shape, gate, split)
        self._kept: dict[_Key, tuple[IntArray, WorkList]] = {}  # With the starts of its contexts.
        self.last: WorkList | None = None
        self.num_shared_steps = 0  # Steps with shared nodes. Tests check that sharing happens.
        self.num_shared_tokens = 0

    def plan(
        self, context_ids: Sequence[int], step: StepRows, table_rows: IntArray | None = None
    ) -> WorkList:
        """The work list of a step. A reused plan is the same object, so it is not sent again.

        Items refer to row i of the step's tables, or to `table_rows[i]` if given. `context_ids`
        are the names of the rows. A context must keep its row and its full pages while it keeps
        its name."""
        key = (tuple(context_ids), step.q_lens.tobytes())
        starts, work = self._kept.pop(key, (step.starts, None))
        if work is None or not _still_holds(work, step.starts - starts):
            work = plan_work(step, *self._arguments)
            work, starts = (
                work if table_rows is None else work.with_table_rows(table_rows),
                step.starts,
            )
        self._kept[key] = starts, work
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        self.last = work
        self.num_shared_steps += work.num_shared_tokens > 0
        self.num_shared_tokens += work.num_shared_tokens
        return work


def _still_holds(work: WorkList, growth: IntArray) -> bool:
    """Whether a plan is valid, and its splits even, for contexts that have grown by `growth`."""
    if work.hides_keys or work.dense or len(work.converted_pages):
        return False
    return bool((growth >= 0).all() and (growth < _MAX_GROWTH).all())
