"""The context tree of one step, read off flat block tables, and the choice of what to share.

Equal leading block ids mean shared KV, so the tree needs no bookkeeping: rows of the block table
are sorted, and neighbours' common prefixes give the nodes. A node is a run of sorted requests and
a half-open range of pages that all of them begin with:

    request  table          sorted      nodes (lo, hi, first_page, end_page)
    0        [3 9 4]        2  [3 9 6]  (0, 2, 2, 3)   requests 2 and 1 share page 6 too
    1        [3 9 6 1]      1  [3 9 6]  (0, 3, 0, 2)   all of root 3 share pages 3, 9
    2        [3 9 6 8]      0  [3 9 4]
    3        [5 7]          3  [5 7]                   no node: nobody shares 5

Everything here is numpy on the host; nothing imports torch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Sorted requests [lo, hi) share pages [first_page, end_page) of their tables."""

    lo: int
    hi: int
    first_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class ContextTree:
    """`order[i]` is the request (row of the block table) at sorted place i. `nodes` holds
    children before their parents; their ranges [lo, hi) are nested or disjoint."""

    order: IntArray
    nodes: tuple[TreeNode, ...]


def build_tree(tables: IntArray, num_shareable: IntArray) -> ContextTree:
    """Find every run of two or more requests whose tables begin alike.

    `tables` is int32 [requests, pages]; of row r only the first `num_shareable[r]` ids count
    (full pages whose KV is already there). O(requests * pages), plus one sort."""
    num_requests = len(tables)
    width = int(num_shareable.max(initial=0))
    identity = np.arange(num_requests, dtype=np.int32)
    if num_requests < 2 or width == 0 or _all_differ(tables, num_shareable):
        return ContextTree(identity, ())
    # Ids that do not count become unique to their row; the extra column ends every prefix.
    keys = np.empty((num_requests, width + 1), dtype=np.int32)
    keys[:, :width] = tables[:, :width]
    keys[:, width] = -1 - identity
    ignored = np.arange(width, dtype=np.int32) >= num_shareable[:, None]
    np.copyto(keys[:, :width], (-1 - identity)[:, None], where=ignored)
    order = _sort_rows(keys)
    ordered = keys[order]
    common = (ordered[1:] != ordered[:-1]).argmax(axis=1)
    return ContextTree(order, _nodes_of(common.tolist()))


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
