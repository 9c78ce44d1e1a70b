"""The planner of attention work, without a runner or a device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parrot.engine.attention.context_tree import GateConfig, build_tree, choose_shared
from parrot.engine.attention.work_list import (
    CONVERTED_FIRST,
    KV_END,
    KV_FIRST,
    OWN,
    Q_COUNT,
    Q_FIRST,
    SLOT,
    TABLE_ROW,
    SplitConfig,
    StepRows,
    WorkList,
    WorkPlanner,
    plan_work,
)
from parrot.engine.kernels.attention_shape import AttentionShape

PAGE = 16
FREE_SHARING = GateConfig(memory_rate=1.0, l2_bytes=0, partial_rate=1.0e30, launch_s=0.0)
SMALL_SPLITS = SplitConfig(num_sms=4, min_span=(32,) * 3)
SOME_DENSE = SplitConfig(num_sms=4, min_span=(32,) * 3, dense=8, dense_min=16)
SOME_CONVERTED = SplitConfig(num_sms=4, min_span=(32,) * 3, converted_pages=6, converted_rows=20)
SPLITS = st.sampled_from([SMALL_SPLITS, SOME_DENSE, SOME_CONVERTED])


def shape_of(group: int, kv_heads: int = 2) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, 64, PAGE)


def steps() -> st.SearchStrategy[StepRows]:
    """Steps with decodes and fills. The contexts share prefixes that come from a small tree."""
    path = st.lists(st.integers(0, 1), max_size=4).map(tuple)
    request = st.tuples(path, st.integers(0, 3 * PAGE), st.sampled_from([1, 1, 1, 2, 40]))
    return st.lists(request, min_size=1, max_size=9).map(_step)


def _step(requests: list[tuple[tuple[int, ...], int, int]]) -> StepRows:
    page_of: dict[object, int] = {}

    def page_id(key: object) -> int:
        return page_of.setdefault(key, len(page_of))

    tables, starts, q_lens = [], [], []
    for index, (path, own, new) in enumerate(requests):
        # Every tree node is two pages long. Its name is the path from the root.
        table = [page_id((path[: d + 1], half)) for d in range(len(path)) for half in (0, 1)]
        start = len(table) * PAGE + own
        pages = -(-(start + new) // PAGE)
        table += [page_id((index, p)) for p in range(len(table), pages)]
        tables.append(table)
        starts.append(start)
        q_lens.append(new)
    width = max(map(len, tables)) + 1
    padded = [table + [0] * (width - len(table)) for table in tables]
    as_array = [np.array(part, dtype=np.int32) for part in (padded, starts, q_lens)]
    return StepRows(*as_array)


def items_of(work: WorkList) -> np.ndarray:
    return np.concatenate((work.narrow, work.shared, work.fills, work.converted_fills))


def item_tokens(work: WorkList, item: np.ndarray) -> np.ndarray:
    places = np.arange(item[Q_FIRST], item[Q_FIRST] + item[Q_COUNT])
    return places if item[OWN] else work.token_order[places]


def seen_keys(step: StepRows, work: WorkList) -> list[list[tuple[int, int]]]:
    """For each row of q, the (page, offset) of each key that an item reads for it."""
    request_of = np.repeat(np.arange(len(step.q_lens)), step.q_lens)
    position_of = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(step.starts, step.q_lens, strict=True)]
    )
    seen: list[list[tuple[int, int]]] = [[] for _ in request_of]
    for item in items_of(work):
        table = step.tables[item[TABLE_ROW]]
        for token in item_tokens(work, item):
            end = min(item[KV_END], position_of[token] + 1) if item[OWN] else item[KV_END]
            seen[token] += [(table[n // PAGE], n % PAGE) for n in range(item[KV_FIRST], end)]
    for first, count in work.dense:
        table = step.tables[request_of[first]]
        for token in range(first, first + count):
            seen[token] += [(table[n // PAGE], n % PAGE) for n in range(token - first + 1)]
    return seen


@given(steps(), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([None, FREE_SHARING]), SPLITS)
def test_every_token_reads_each_of_its_keys_once(
    step: StepRows, group: int, gate: GateConfig | None, split: SplitConfig
) -> None:
    work = plan_work(step, shape_of(group), gate, split)
    seen = seen_keys(step, work)
    token = 0
    for row, (start, count) in enumerate(zip(step.starts, step.q_lens, strict=True)):
        for position in range(start, start + count):
            expected = [(step.tables[row, n // PAGE], n % PAGE) for n in range(position + 1)]
            assert sorted(seen[token]) == sorted(expected), (row, position)
            token += 1


@given(steps(), st.sampled_from([1, 3, 4]), SPLITS)
def test_slots_are_unique_and_those_of_a_token_lie_in_its_range(
    step: StepRows, group: int, split: SplitConfig
) -> None:
    work = plan_work(step, shape_of(group), FREE_SHARING, split)
    owners: dict[int, int] = {}
    direct = [first + token for first, count in work.dense for token in range(count)]
    for item in items_of(work):
        for member, token in enumerate(item_tokens(work, item)):
            if item[SLOT] < 0:
                direct.append(int(token))
                continue
            slot = int(work.slot_of[item[SLOT] + member])
            assert slot not in owners
            owners[slot] = int(token)
            assert work.slot_indptr[token] <= slot < work.slot_indptr[token + 1]
    assert sorted(owners) == list(range(work.num_slots))
    merged = set(owners.values())
    assert len(direct) == len(set(direct))
    assert merged.isdisjoint(direct)
    assert merged | set(direct) == set(range(int(step.q_lens.sum())))
    assert work.slot_indptr[-1] == work.num_slots


@pytest.mark.parametrize(("lengths", "even"), [((90, 100, 80), True), ((300, 20, 20), False)])
def test_narrow_items_of_similar_length_are_marked_as_even(
    lengths: tuple[int, ...], even: bool
) -> None:
    tables = np.arange(60, dtype=np.int32).reshape(3, 20)
    step = StepRows(tables, np.array(lengths, dtype=np.int32) - 1, np.ones(3, dtype=np.int32))
    whole = SplitConfig(num_sms=1, min_span=(1000,) * 3)
    assert plan_work(step, shape_of(1), None, whole).narrow_is_even is even


@pytest.mark.parametrize(
    ("start", "length", "dense"),
    [(0, 15, ()), (0, 16, ((3, 16),)), (0, 31, ((3, 24),)), (1, 31, ())],
)
def test_only_the_start_of_a_long_fill_from_position_0_is_dense(
    start: int, length: int, dense: tuple[tuple[int, int], ...]
) -> None:
    tables = np.arange(8, dtype=np.int32).reshape(2, 4)
    starts, q_lens = (np.array(n, dtype=np.int32) for n in ((9, start), (3, length)))
    work = plan_work(StepRows(tables, starts, q_lens), shape_of(1), None, SOME_DENSE)
    assert work.dense == dense


def test_a_single_prompt_that_is_dense_as_a_whole_has_no_items() -> None:
    tables, starts = np.arange(4, dtype=np.int32)[None], np.zeros(1, dtype=np.int32)
    step = StepRows(tables, starts, np.array([24], dtype=np.int32))
    work = plan_work(step, shape_of(1), FREE_SHARING, SOME_DENSE)
    assert work.dense == ((0, 24),)
    assert (len(items_of(work)), work.num_slots) == (0, 0)
    assert work.token_order.tolist() == list(range(24))
    assert work.slot_indptr.tolist() == [0] * 25
    moved = work.with_table_rows(np.array([7], dtype=np.int32))
    assert moved.narrow.shape == work.narrow.shape


@given(steps(), st.sampled_from([1, 4]))
def test_converted_fills_find_their_pages_among_the_conversions(step: StepRows, group: int) -> None:
    work = plan_work(step, shape_of(group), FREE_SHARING, SOME_CONVERTED)
    assert len(work.converted_pages) <= SOME_CONVERTED.converted_pages
    read = set()
    for item in work.converted_fills:
        row = item[TABLE_ROW]
        end = min(item[KV_END], step.starts[row] + step.q_lens[row])
        for page in range(item[KV_FIRST] // PAGE, -(-end // PAGE)):
            assert work.converted_pages[item[CONVERTED_FIRST] + page] == step.tables[row, page]
            read.add(int(item[CONVERTED_FIRST] + page))
    assert read == set(range(len(work.converted_pages)))
    rows = np.concatenate([step.q_lens[work.fills[:, TABLE_ROW]], [0]]) * group
    if (rows >= SOME_CONVERTED.converted_rows).any():  # One of these fills did not fit.
        pages = -(-(step.starts + step.q_lens) // PAGE)
        assert pages[step.q_lens * group >= SOME_CONVERTED.converted_rows].sum() > 6


@given(steps())
def test_items_fit_their_tiles_and_come_largest_first(step: StepRows) -> None:
    shape = shape_of(4)
    work = plan_work(step, shape, FREE_SHARING, SMALL_SPLITS)
    heights = ((work.narrow, 16), (work.shared, work.tile_rows), (work.fills, work.tile_rows))
    for items, rows in heights:
        assert (items[:, Q_COUNT] >= 1).all()
        assert (items[:, Q_COUNT] * shape.group <= rows).all()
    assert sorted(work.token_order) == list(range(int(step.q_lens.sum())))
    lengths = work.shared[:, KV_END] - work.shared[:, KV_FIRST]
    assert (np.diff(lengths) <= 0).all()


@given(steps())
def test_free_sharing_reads_each_page_of_decodes_once(step: StepRows) -> None:
    decodes = StepRows(step.tables, step.starts, np.ones_like(step.q_lens))
    work = plan_work(decodes, shape_of(1), FREE_SHARING, SplitConfig(min_span=(10**6,) * 3))
    # Partial pages are not shared and no tile of rows is full, so each page is read once.
    read: list[int] = []
    for item in items_of(work):
        end = decodes.starts[item[TABLE_ROW]] + 1 if item[OWN] else item[KV_END]
        pages = range(item[KV_FIRST] // PAGE, -(-int(end) // PAGE))
        read += [int(decodes.tables[item[TABLE_ROW], page]) for page in pages]
    assert len(read) == len(set(read))


@given(steps())
def test_nodes_are_nested_and_their_requests_share_a_prefix(step: StepRows) -> None:
    tree = build_tree(step.tables, step.starts // PAGE)
    assert sorted(tree.order) == list(range(len(step.starts)))
    for index, node in enumerate(tree.nodes):
        rows = tree.order[node.lo : node.hi]
        assert node.hi - node.lo >= 2
        assert node.first_page < node.end_page <= (step.starts[rows] // PAGE).min()
        assert (step.tables[rows, : node.end_page] == step.tables[rows[0], : node.end_page]).all()
        for parent in tree.nodes[index + 1 :]:
            nested = parent.lo <= node.lo and node.hi <= parent.hi
            assert nested or node.hi <= parent.lo or parent.hi <= node.lo


def shared_step(batch: int, prefix: int, own: int = PAGE) -> StepRows:
    return _step_of_prefixes([("root", prefix)] * batch, own)


def _step_of_prefixes(prefixes: list[tuple[str, int]], own: int) -> StepRows:
    keys = [[(name, p) for p in range(n // PAGE)] for name, n in prefixes]
    for index, row in enumerate(keys):
        row += [(str(index), p) for p in range(own // PAGE + 1)]
    ids = {key: i for i, key in enumerate(dict.fromkeys(k for row in keys for k in row))}
    width = max(map(len, keys)) + 1
    tables = np.array([[ids[k] for k in row] + [0] * (width - len(row)) for row in keys])
    starts = np.array([n + own - 1 for _, n in prefixes], dtype=np.int32)
    return StepRows(tables.astype(np.int32), starts, np.ones(len(keys), dtype=np.int32))


def test_the_gate_is_monotone_in_length_and_in_requests() -> None:
    shape = AttentionShape(32, 8, 128, PAGE)
    gate = GateConfig()

    def shares(batch: int, prefix: int) -> bool:
        step = shared_step(batch, prefix)
        tree = build_tree(step.tables, step.starts // PAGE)
        return bool(choose_shared(tree, step.q_lens, shape, gate))

    lengths = [16, 64, 256, 1024, 4096, 16384]
    table = [[shares(batch, length) for length in lengths] for batch in (2, 4, 8, 16)]
    for row in table:
        assert row == sorted(row)
    for column in zip(*table, strict=True):
        assert list(column) == sorted(column)
    assert not table[0][0]
    assert table[-1][-1]


def test_a_node_that_is_not_worth_sharing_is_merged_into_its_children() -> None:
    # Two groups of 8 requests share one page at the root. Each group's node takes over that page.
    prefixes = [("a", 8192)] * 8 + [("b", 8192)] * 8
    step = _step_of_prefixes(prefixes, PAGE)
    step.tables[:, 0] = step.tables[0, 0]
    shape = AttentionShape(32, 8, 128, PAGE)
    tree = build_tree(step.tables, step.starts // PAGE)
    assert sorted((n.first_page, n.end_page) for n in tree.nodes) == [(0, 1), (1, 512), (1, 512)]
    kept = choose_shared(tree, step.q_lens, shape, GateConfig())
    assert [(n.first_page, n.end_page) for n in kept] == [(0, 512), (0, 512)]


@given(steps())
def test_shared_nodes_save_more_than_they_cost(step: StepRows) -> None:
    """A node has a cost if it needs a call of its own, as on a CPU."""
    shape = shape_of(1)
    tree = build_tree(step.tables, step.starts // PAGE)
    for pages in (0, 1, 3, 20):
        gate = replace(FREE_SHARING, node_s=float(pages * PAGE * shape.kv_token_bytes))
        nodes = choose_shared(tree, step.q_lens, shape, gate)
        saved = sum((n.hi - n.lo - 1) * (n.end_page - n.first_page) for n in nodes)
        assert saved >= pages * len(nodes)
    assert plan_work(step, shape, None, SMALL_SPLITS).num_shared_tokens == 0


@pytest.mark.parametrize(
    ("start", "count", "fresh"),
    [
        (0, 1, [3]),
        (0, 4, []),
        (0, 6, [4]),
        (3, 1, []),
        (3, 2, [4]),
        (4, 4, []),
        (5, 2, []),
        (8, 1, [5]),
    ],
)
def test_fresh_pages_are_pages_that_the_step_starts_and_does_not_fill(
    start: int, count: int, fresh: list[int]
) -> None:
    tables = np.array([[9, 9, 9, 9], [3, 4, 5, 0]], dtype=np.int32)
    step = StepRows(tables, np.array([2, start]), np.array([1, count]))
    assert step.fresh_pages(4).tolist() == fresh


def test_rows_know_their_request_and_their_position() -> None:
    tables = np.zeros((3, 4), dtype=np.int32)
    step = StepRows(tables, np.array([3, 0, 7]), np.array([2, 1, 3]))
    assert step.requests.tolist() == [0, 0, 1, 2, 2, 2]
    assert step.positions.tolist() == [3, 4, 0, 7, 8, 9]


def test_without_common_prefixes_the_plan_is_that_without_sharing() -> None:
    step = _step_of_prefixes([(str(i), 64) for i in range(5)], PAGE)
    shape = shape_of(2)
    on = plan_work(step, shape, FREE_SHARING, SMALL_SPLITS)
    off = plan_work(step, shape, None, SMALL_SPLITS)
    assert (on.narrow == off.narrow).all()
    assert len(on.shared) == 0
    assert on.num_shared_tokens == 0


def test_shared_tokens_are_counted() -> None:
    work = plan_work(shared_step(5, 64), shape_of(1), FREE_SHARING, SMALL_SPLITS)
    assert work.num_shared_tokens == 4 * 64


@pytest.mark.parametrize("own", [1, 100])
def test_the_planner_keeps_its_plan_while_contexts_only_grow(own: int) -> None:
    planner = WorkPlanner(shape_of(2), FREE_SHARING, SMALL_SPLITS)
    step = shared_step(4, 64, own)
    step = replace(step, tables=np.pad(step.tables, ((0, 0), (0, 64))))
    ids = [7, 8, 9, 10]
    first = planner.plan(ids, step)
    for growth in range(1, 64):
        grown = StepRows(step.tables, step.starts + growth, step.q_lens)
        assert planner.plan(ids, grown) is first
    too_far = StepRows(step.tables, step.starts + 64, step.q_lens)
    assert planner.plan(ids, too_far) is not first
    assert planner.num_shared_steps == 65


@example(_step([((), 40, 40)]), 4, replace(SMALL_SPLITS, num_sms=64), [60] * 9)
@given(steps(), st.sampled_from([1, 4]), SPLITS, st.lists(st.integers(0, 63), min_size=9))
def test_a_reused_plan_is_right_for_contexts_that_have_grown(
    step: StepRows, group: int, split: SplitConfig, growth: list[int]
) -> None:
    """Steps with drafts, in which each context has several new tokens, are checked too."""
    planner = WorkPlanner(shape_of(group), FREE_SHARING, split)
    count = len(step.starts)
    free = 1000 + np.arange(6 * count, dtype=np.int32).reshape(count, 6)
    used = -(-(step.starts + step.q_lens) // PAGE)
    tables = np.pad(step.tables, ((0, 0), (0, 6)))
    for row, first_free, more in zip(tables, used, free, strict=True):
        row[first_free : first_free + 6] = more
    first = planner.plan(range(count), replace(step, tables=tables))
    starts = step.starts + np.array(growth[:count], dtype=np.int32)
    grown = StepRows(tables, starts, step.q_lens)
    work = planner.plan(range(count), grown)
    if step.q_lens.max() == 1:
        assert work is first
    seen, token = seen_keys(grown, work), 0
    for row, (start, new) in enumerate(zip(grown.starts, grown.q_lens, strict=True)):
        for position in range(start, start + new):
            expected = [(tables[row, n // PAGE], n % PAGE) for n in range(position + 1)]
            assert sorted(seen[token]) == sorted(expected), (row, position)
            token += 1


def test_alternating_steps_with_and_without_drafts_reuse_their_plans() -> None:
    planner = WorkPlanner(shape_of(2), FREE_SHARING, SMALL_SPLITS)
    step = shared_step(4, 64)
    step = replace(step, tables=np.pad(step.tables, ((0, 0), (0, 64))))
    drafted = replace(step, q_lens=np.array([1, 3, 1, 3], dtype=np.int32))
    plans = [planner.plan([1, 2, 3, 4], rows) for rows in (step, drafted)]
    for growth in range(1, 20):
        for rows, first in zip((step, drafted), plans, strict=True):
            grown = replace(rows, starts=rows.starts + growth)
            assert planner.plan([1, 2, 3, 4], grown) is first


def test_another_batch_needs_a_new_plan() -> None:
    planner = WorkPlanner(shape_of(2), FREE_SHARING, SMALL_SPLITS)
    step = shared_step(4, 64)
    first = planner.plan([1, 2, 3, 4], step)
    fill = StepRows(step.tables, step.starts, np.array([1, 1, 1, 3], dtype=np.int32))
    restarted = StepRows(step.tables, step.starts - 1, step.q_lens)
    plans = [first, planner.plan([1, 2, 3, 5], step), planner.plan([1, 2, 3, 5], fill)]
    assert len({id(plan) for plan in plans}) == 3
    assert planner.plan([1, 2, 3, 5], restarted) is not plans[1]


def test_items_use_the_rows_of_the_device_block_table() -> None:
    planner, step = WorkPlanner(shape_of(2), FREE_SHARING, SMALL_SPLITS), shared_step(3, 64)
    own = plan_work(step, shape_of(2), FREE_SHARING, SMALL_SPLITS)
    rows = np.array([5, 9, 2], dtype=np.int32)
    moved = planner.plan([1, 2, 3], step, rows)
    assert planner.last is moved
    assert items_of(moved)[:, TABLE_ROW].tolist() == rows[items_of(own)[:, TABLE_ROW]].tolist()
    assert (
        np.delete(items_of(moved), TABLE_ROW, 1) == np.delete(items_of(own), TABLE_ROW, 1)
    ).all()
