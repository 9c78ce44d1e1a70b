"""Which nodes of the context tree are worth sharing.

To share a node is to read its KV once per tile of query rows of all its requests; the price is
one more partial result per request, written and read again, and the launches that merge them. A
node that is not shared is merged down: each of its children reads its pages too.
"""

from dataclasses import dataclass

import numpy as np

from parrot.engine.attention.context_tree import ContextTree, IntArray, TreeNode
from parrot.engine.kernels.attention_shape import AttentionShape


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Fitted to measurements (docs/kernels.md). Rates in bytes/s, times in seconds.

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

    def num_tiles(self, rows: int) -> int:
        return -(-rows // self.row_tile)


def choose_shared(
    tree: ContextTree, q_lens: IntArray, shape: AttentionShape, gate: GateConfig
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
        shared = gate.num_tiles(num_tokens * shape.group)
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
