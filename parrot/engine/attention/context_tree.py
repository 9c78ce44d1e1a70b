"""The context tree of one step, read off flat block tables, and which nodes are worth sharing.

Equal leading block ids mean shared KV, so the tree needs no bookkeeping: rows of the block table
are sorted, and neighbours' common prefixes give the nodes. A node is a run of sorted requests and
a half-open range of pages that all of them begin with:

    request  table          sorted      nodes (lo, hi, first_page, end_page)
    0        [3 9 4]        2  [3 9 6]  (0, 2, 2, 3)   requests 2 and 1 share page 6 too
    1        [3 9 6 1]      1  [3 9 6]  (0, 3, 0, 2)   all of root 3 share pages 3, 9
    2        [3 9 6 8]      0  [3 9 4]
    3        [5 7]          3  [5 7]                   no node: nobody shares 5

To share a node is to read its KV once per tile of query rows of all its requests; the price is
one more partial result per request, written and read again, and the launches that merge them. A
node that is not shared is merged down: each of its children reads its pages too.

Everything here is numpy on the host; nothing imports torch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parrot.engine.kernels.attention_shape import AttentionShape

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Sorted requests [lo, hi) share pages [first_page, end_page) of their tables."""

    lo: int
    hi: int
    first_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """`order[i]` is the request (row of the block table) at sorted place i. `nodes` holds
    children before their parents; their ranges [lo, hi) are nested or disjoint."""

    order: IntArray
    nodes: tuple[TreeNode, ...]


def build_tree(tables: IntArray, num_shareable: IntArray) -> PrefixTree:
    """Find every run of two or more requests whose tables begin alike.

    `tables` is int32 [requests, pages]; of row r only the first `num_shareable[r]` ids count
    (full pages whose KV is already there). O(requests * pages), plus one sort."""
    num_requests = len(tables)
    width = int(num_shareable.max(initial=0))
    identity = np.arange(num_requests, dtype=np.int32)
    if num_requests < 2 or width == 0 or _all_differ(tables, num_shareable):
        return PrefixTree(identity, ())
    # Ids that do not count become unique to their row; the extra column ends every prefix.
    keys = np.empty((num_requests, width + 1), dtype=np.int32)
    keys[:, :width] = tables[:, :width]
    keys[:, width] = -1 - identity
    ignored = np.arange(width, dtype=np.int32) >= num_shareable[:, None]
    np.copyto(keys[:, :width], (-1 - identity)[:, None], where=ignored)
    order = _sort_rows(keys)
    ordered = keys[order]
    common = (ordered[1:] != ordered[:-1]).argmax(axis=1)
    return PrefixTree(order, _nodes_of(common.tolist()))


def _all_differ(tables: IntArray, num_shareable: IntArray) -> bool:
    """The common case of nothing to share, told by the first page alone."""
    roots = np.sort(tables[num_shareable > 0, 0])
    return not bool((roots[1:] == roots[:-1]).any())


def _sort_rows(keys: IntArray) -> IntArray:
    """Some order in which rows with a common prefix are neighbours: that of their bytes."""
    rows = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.itemsize * keys.shape[1])))
    return rows.ravel().argsort(kind="stable").astype(np.int32)


def _nodes_of(common: list[int]) -> tuple[TreeNode, ...]:
    """The tree of intervals over neighbours' common prefix lengths (in pages)."""
    nodes: list[TreeNode] = []
    open_runs: list[tuple[int, int]] = []  # (lo, pages in common), deepest last
    for place, length in enumerate([*common, 0]):
        lo = place
        while open_runs and open_runs[-1][1] > length:
            lo, pages = open_runs.pop()
            parent_pages = max(length, open_runs[-1][1] if open_runs else 0)
            nodes.append(TreeNode(lo, place + 1, parent_pages, pages))
        if length > (open_runs[-1][1] if open_runs else 0):
            open_runs.append((lo, length))
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Fitted to measurements (docs/internals/kernels.md). Rates in bytes/s, times in seconds.

    `l2_bytes`: a node whose KV of one layer is smaller is re-read from the L2 cache when it is
    not shared, at `l2_rate`. `row_tile`: query rows that read a tile of KV together.
    `partial_rate`: far below what memory does, because it stands for all that more partial
    results bring with them: stores, merging, and launches that get in each other's way.
    `launch_s`: what any sharing adds to a layer. `node_s`: what each shared node adds, where nodes
    are launches of their own."""

    memory_rate: float = 4.3e12
    l2_rate: float = 8.0e12
    l2_bytes: int = 40 << 20
    row_tile: int = 64
    partial_rate: float = 0.25e12
    launch_s: float = 2e-6
    node_s: float = 0.0


def choose_shared(
    tree: PrefixTree, q_lens: IntArray, shape: AttentionShape, gate: GateConfig
) -> tuple[TreeNode, ...]:
    """The nodes to share, children before parents, their spans extended over those merged down.

    `q_lens[r]` is the number of query tokens of request r. Sharing more tokens or more requests
    never turns a kept node into one that is merged down."""
    if not tree.nodes:
        return ()
    tokens = np.concatenate(([0], np.cumsum(q_lens[tree.order], dtype=np.int64))).tolist()
    leaf_tiles = -(-(q_lens[tree.order].astype(np.int64) * shape.group) // gate.row_tile)
    tiles_before = np.concatenate(([0], np.cumsum(leaf_tiles))).tolist()
    kept: list[tuple[TreeNode, float]] = []
    done: list[tuple[TreeNode, int]] = []  # siblings so far, with the tiles that read them
    for node in tree.nodes:
        unshared = tiles_before[node.hi] - tiles_before[node.lo]
        while done and done[-1][0].lo >= node.lo:
            child, child_tiles = done.pop()
            unshared += child_tiles - (tiles_before[child.hi] - tiles_before[child.lo])
        num_tokens = tokens[node.hi] - tokens[node.lo]
        shared = -(-num_tokens * shape.group // gate.row_tile)
        saved_s = _saved_seconds(node, unshared - shared, num_tokens, shape, gate)
        if saved_s > 0.0:
            kept.append((node, saved_s))
        done.append((node, shared if saved_s > 0.0 else unshared))
    if sum(saved_s for _, saved_s in kept) <= gate.launch_s:
        return ()
    return _extend_over_merged([node for node, _ in kept])


def _saved_seconds(
    node: TreeNode, saved_tiles: int, num_tokens: int, shape: AttentionShape, gate: GateConfig
) -> float:
    span_bytes = (node.end_page - node.first_page) * shape.page_size * shape.kv_token_bytes
    rate = gate.l2_rate if span_bytes < gate.l2_bytes else gate.memory_rate
    partials_s = num_tokens * shape.partial_token_bytes / gate.partial_rate
    return saved_tiles * span_bytes / rate - partials_s - gate.node_s


def _extend_over_merged(nodes: list[TreeNode]) -> tuple[TreeNode, ...]:
    """Let each node begin where its nearest kept ancestor ends."""
    extended: list[TreeNode] = []
    ancestors: list[TreeNode] = []
    for node in reversed(nodes):  # parents first
        while ancestors and not (ancestors[-1].lo <= node.lo and node.hi <= ancestors[-1].hi):
            ancestors.pop()
        first = ancestors[-1].end_page if ancestors else 0
        extended.append(TreeNode(node.lo, node.hi, first, node.end_page))
        ancestors.append(node)
    return tuple(reversed(extended))
