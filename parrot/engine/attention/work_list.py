"""One step's attention as a list of work items, planned in numpy.

An item is (query tokens, a span of KV, a run of slots for partial results). A shared node gives
items whose queries are the tokens of all its requests; what a request does not share gives items
of its own. Long spans are split so that all multiprocessors have work. A token that only one item
covers gets its output directly; the partial results of others are merged by a second kernel:

    tokens         0 1 2 3 4        requests A = {0}, B = {1}, C = {2 3 4}, a fill
    shared node    [ item 0  ]      slots 0 2 4 6 8       a token's slots lie side by side
    own KV         |1|2| 3   |      slots 1 3 5 7 9

Three classes of items go to three launches: narrow (few rows, that is tokens times query heads per
KV head: decodes), shared (nodes with more rows) and fills. Over quantised KV there is a fourth:
fills whose pages a kernel converts to the type of q first. Long beginnings of contexts, which see
nothing but themselves, can be left to a library ("dense"); they are no items.
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

OPEN_END = 1 << 30
"""A span's end when it reaches as far as the query's own position."""

ITEM_FIELDS = 8
Q_FIRST, Q_COUNT, TABLE_ROW, KV_FIRST, KV_END, SLOT, OWN, CONVERTED_FIRST = range(ITEM_FIELDS)
"""Columns of an item. Its keys are the positions [KV_FIRST, KV_END) of block table row TABLE_ROW.

OWN: its tokens are rows Q_FIRST... of q, one request's, and each sees keys up to its own position.
Else its tokens are `token_order[Q_FIRST...]` and see all of its keys. Token j of it writes partial
`slot_of[SLOT + j]`; a negative SLOT means straight to the output. CONVERTED_FIRST, of converted
fills: page i of the row is converted page CONVERTED_FIRST + i, if it is among them."""


NARROW, SHARED, FILL, CONVERTED_FILL = range(4)

_UNEVEN_RATIO = 1.5
"""Longest to mean length from which narrow spans count as uneven."""

_EVEN_RATIO = 1.25
"""Longest to mean length up to which narrow items count as even."""

_SPLIT_ROUNDING = 0.4
"""Added before rounding down: a span of 1.6 targets is split in two, one of 1.5 is not."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The rules by which spans are cut, chosen on an H200 (docs/internals/kernels.md).

    `waves`: programs to aim for per multiprocessor, and `min_span`: tokens that are worth a split,
    by class of item. Narrow spans of uneven length aim for `uneven` times as many programs.
    `narrow_rows`: the most rows of a narrow item. `tile_rows`: the most of other items.
    `hidden_bytes`: of narrow KV that the device reads while one program of a shared item takes a
    key. The two run side by side, so a shared span that ends before the narrow ones do need not be
    split for the sake of time. `dense`: of a fill from position 0, as many tokens as are a multiple
    of this are dense, from `dense_min` tokens on. None: no fill is. `converted_pages`: the most
    pages that a step converts, for fills of at least `converted_rows` rows."""

    num_sms: int = 132
    waves: tuple[float, float, float] = (2.0, 1.0, 1.0)
    min_span: tuple[int, int, int] = (128, 256, 256)
    uneven: float = 2.0
    narrow_rows: int = 16
    tile_rows: int = 64
    hidden_bytes: int = 110_000
    dense: int | None = None
    dense_min: int = 4096
    converted_pages: int = 0
    converted_rows: int = 256


@dataclass(frozen=True, slots=True)
class StepRows:
    """The sequences of one step: request r computes tokens at positions
    [starts[r], starts[r] + q_lens[r]); they are rows [q_first[r], q_first[r] + q_lens[r]) of q.

    `tables` is the int32 block table [requests, pages], in the order of the device's copy."""

    tables: IntArray
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
        """The pages that this step begins and does not fill."""
        ends = self.starts + self.q_lens
        tail = ends % page_size
        begun = np.flatnonzero((tail > 0) & (self.starts <= ends - tail))
        pages: IntArray = self.tables[begun, ends[begun] // page_size]
        return pages


@dataclass(frozen=True, slots=True)
class WorkList:
    """Items are int32 [items, ITEM_FIELDS], most work first; `tile_rows` is the
    heights of their tiles. `token_order`: a permutation of the rows of q. Token t merges partials
    [slot_indptr[t], slot_indptr[t + 1]); an empty range means that it was written directly.
    `narrow_is_even`: its longest item is not much longer than the others.
    `dense`: (first row of q, tokens) of what no item covers: tokens 0... of one context each.
    `converted_pages`: pages of the pool, those of `converted_fills`, to be converted in this order.
    `hides_keys`: some tokens have no item for keys of their own request that come after them.

    `num_shared_tokens`: KV tokens whose repeated reading the plan saves."""

    narrow: IntArray
    narrow_is_even: bool
    shared: IntArray
    fills: IntArray
    converted_fills: IntArray
    converted_pages: IntArray
    tile_rows: int
    token_order: IntArray
    slot_indptr: IntArray
    slot_of: IntArray
    dense: tuple[tuple[int, int], ...]
    num_shared_tokens: int
    hides_keys: bool

    @property
    def num_slots(self) -> int:
        return len(self.slot_of)

    def with_table_rows(self, rows: IntArray) -> "WorkList":
        """A copy with `rows[i]` in the place of row i of the block tables."""

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
    """Parallel arrays, one entry per shared node or per request's own part. `causal_first` is
    the position of the first token where the span is its own, else OPEN_END."""

    q_first: LongArray
    q_count: LongArray
    table_row: LongArray
    kv_first: LongArray
    kv_end: LongArray
    length: LongArray
    causal_first: LongArray


def plan_work(
    step: StepRows, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig
) -> WorkList:
    """Cover every (token, visible KV position) pair exactly once. `gate` None: share nothing."""
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
    """The plan of one context's beginning that is dense as a whole."""
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
    """Rows of q with the requests in sorted order, and where each sorted request's begin."""
    counts = step.q_lens[order]
    first_in_order = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    if first_in_order[-1] == len(order):  # decodes only
        return order, first_in_order
    shift = step.q_first[order] - first_in_order[:-1]
    rows = np.repeat(shift, counts) + np.arange(first_in_order[-1])
    return rows.astype(np.int32), first_in_order


def _num_dense(step: StepRows, split: SplitConfig) -> LongArray:
    """Number of leading tokens of each request that no item has to cover."""
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
    for node in reversed(shared):  # parents first: the deepest node decides
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
    """The kind of each span. Long fills are converted as far as there is room."""
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
    """CONVERTED_FIRST of each span, and the pages that are converted."""
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
    """Items with their kinds and numbers of keys, most work first, and whether any was left out.
    Q_FIRST is still a place in sorted order and SLOT is zero."""
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
    seen = np.flatnonzero(work > 0)  # the last splits of a fill are invisible to its first tokens
    most_first = seen[np.argsort(-work[seen], kind="stable")]
    hides_keys = len(seen) < len(work)
    return items[most_first], kinds[span[most_first]], work[most_first], hides_keys


def _chunk_lengths(
    spans: _Spans, kinds: LongArray, blocks: LongArray, shape: AttentionShape, split: SplitConfig
) -> LongArray:
    """Tokens per split of each span: even splits, none far above its class's fair share."""
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
    """Number the partial results, in `items` itself, and list each token's. An item whose tokens
    nobody else covers needs none."""
    num_tokens = len(token_order)
    counts = items[:, Q_COUNT]
    item = np.repeat(np.arange(len(items)), counts)
    place = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts - items[:, Q_FIRST], counts)
    token = token_order[place].astype(np.int64)  # covered by `item`, pair by pair
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


_MAX_GROWTH = 64
"""Tokens that contexts may grow before a plan is made again, to keep the splits even."""

_KEPT = 8
"""Plans that are kept: steps with drafts and without take turns."""

_Key = tuple[tuple[int, ...], bytes]


class WorkPlanner:
    """Plans steps, and returns an earlier plan while the same contexts have as many new tokens.

    A plan stays right as its contexts grow, since the device reads their positions.
    `num_shared_steps` and `num_shared_tokens` count, to notice sharing that is off."""

    def __init__(self, shape: AttentionShape, gate: GateConfig | None, split: SplitConfig) -> None:
        self._arguments = (shape, gate, split)
        self._kept: dict[_Key, tuple[IntArray, WorkList]] = {}  # with its contexts' lengths
        self.last: WorkList | None = None
        self.num_shared_steps = 0
        self.num_shared_tokens = 0

    def plan(
        self, context_ids: Sequence[int], step: StepRows, table_rows: IntArray | None = None
    ) -> WorkList:
        """The step's work list; the same object as earlier means that, where that was sent, nothing
        has to be.

        Its items name the rows of the step's tables, or `table_rows[i]` in the place of row i.

        `context_ids` names the rows of `step`. While a context has its name, the pages that it has
        filled stay where they are in its row of the table, and that in its place."""
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
    """Whether a plan is right, and its splits even, for contexts that have grown so much."""
    if work.hides_keys or work.dense or len(work.converted_pages):
        return False
    return bool((growth >= 0).all() and (growth < _MAX_GROWTH).all())
