"""The context tree of one step, and the decision which of its nodes are shared.

Equal leading block ids mean shared KV, so the tree is computed from the block tables alone. The
rows of the tables are sorted, and the common prefixes of neighbours are the nodes. A node is a run
of sorted requests and a half-open range of pages in all of their tables:

    request  table          sorted      nodes (lo, hi, first_page, end_page)
    0        [3 9 4]        2  [3 9 6]  (0, 2, 2, 3)   requests 2 and 1 also share page 6
    1        [3 9 6 1]      1  [3 9 6]  (0, 3, 0, 2)   all requests of root 3 share pages 3, 9
    2        [3 9 6 8]      0  [3 9 4]
    3        [5 7]          3  [5 7]                   no node: no other request has page 5

The KV of a shared node is read once per tile of query rows of all its requests. Sharing costs one
more partial result per request, and the launches that merge partial results. A node that is not
shared is merged into its children: each child reads its pages as well.

The module uses numpy only and does not import torch.
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
    """Requests in sorted order, and the nodes. Ranges of nodes are nested or disjoint."""

    order: IntArray  # `order[i]` is the request (row of the block table) at sorted place i.
    nodes: tuple[TreeNode, ...]  # Children come before their parents.


def build_tree(tables: IntArray, num_shareable: IntArray) -> PrefixTree:
    """Find all runs of two or more requests whose tables have a common prefix.

    `tables` is int32 [requests, pages]. Only the first `num_shareable[r]` pages of row r count:
    full pages whose KV is already computed. The cost is O(requests * pages) and one sort."""
    num_requests = len(tables)
    width = int(num_shareable.max(initial=0))
    identity = np.arange(num_requests, dtype=np.int32)
    if num_requests < 2 or width == 0 or _all_differ(tables, num_shareable):
        return PrefixTree(identity, ())
    # Pages that do not count get ids unique to their row. The additional column ends every prefix.
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
    """Whether all first pages differ: the common case, in which no page can be shared."""
    roots = np.sort(tables[num_shareable > 0, 0])
    return not bool((roots[1:] == roots[:-1]).any())


def _sort_rows(keys: IntArray) -> IntArray:
    """Sort rows by their bytes, which makes rows with a common prefix neighbours."""
    rows = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.itemsize * keys.shape[1])))
    return rows.ravel().argsort(kind="stable").astype(np.int32)


def _nodes_of(common: list[int]) -> tuple[TreeNode, ...]:
    """The nodes for the common prefix lengths of neighbours, in pages."""
    nodes: list[TreeNode] = []
    open_runs: list[tuple[int, int]] = []  # (lo, number of common pages), deepest last.
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
    """The cost model of sharing, fitted to measurements (docs/internals/kernels.md)."""

    memory_rate: float = 4.3e12  # Bytes/s from GPU memory.
    l2_rate: float = 8.0e12  # Bytes/s from the L2 cache.
    # A node whose KV of one layer is smaller than this is read again at `l2_rate`, in bytes.
    l2_bytes: int = 40 << 20
    row_tile: int = 64  # Query rows that read a tile of KV together.
    # Bytes/s of partial results. It is far below the rate of memory, because it includes all costs
    # of partial results: stores, merging, and launches that delay each other.
    partial_rate: float = 0.25e12
    launch_s: float = 2e-6  # Seconds that any sharing adds to a layer.
    node_s: float = 0.0  # Seconds that each shared node adds, if a node is a launch of its own.


def choose_shared(
    tree: PrefixTree, q_lens: IntArray, shape: AttentionShape, gate: GateConfig
) -> tuple[TreeNode, ...]:
    """The nodes to share, children before parents. Their spans include merged ancestors.

    `q_lens[r]` is the number of query tokens of request r. A node with more tokens or more requests
    is never less likely to be shared."""
    if not tree.nodes:
        return ()
    tokens = np.concatenate(([0], np.cumsum(q_lens[tree.order], dtype=np.int64))).tolist()
    leaf_tiles = -(-(q_lens[tree.order].astype(np.int64) * shape.group) // gate.row_tile)
    tiles_before = np.concatenate(([0], np.cumsum(leaf_tiles))).tolist()
    kept: list[tuple[TreeNode, float]] = []
    # Siblings visited so far, with the number of tiles that read their subtrees.
    done: list[tuple[TreeNode, int]] = []
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
    """Make each node start where its nearest shared ancestor ends."""
    extended: list[TreeNode] = []
    ancestors: list[TreeNode] = []
    for node in reversed(nodes):  # Parents first.
        while ancestors and not (ancestors[-1].lo <= node.lo and node.hi <= ancestors[-1].hi):
            ancestors.pop()
        first = ancestors[-1].end_page if ancestors else 0
        extended.append(TreeNode(node.lo, node.hi, first, node.end_page))
        ancestors.append(node)
    return tuple(reversed(extended))
