"""Places for the nodes of a directed acyclic graph, in layers from left to right.

The usual three steps (Sugiyama, Tagawa, Toda 1981): a node's layer is the longest path that leads
to it; the nodes of each layer are sorted by the mean place of their neighbours to avoid crossings;
each layer is centred. An edge over several layers has one waypoint in each layer between.

    layer 0    1        2
        a --\\
             > d --\\
        b --/       > e        rows grow downwards, columns to the right
        c ---------/           (c -> e has a waypoint in layer 1)
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)
Slot = Hashable  # what takes a place in a column: a node, or a waypoint
Point = tuple[float, float]
_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Layout(Generic[Node]):
    """`places`: (column, row) of each node, rows centred about 0 and at least 1 apart in a column.
    `paths`: for each edge the points from its source to its target, waypoints included."""

    places: dict[Node, Point]
    paths: dict[tuple[Node, Node], list[Point]]

    @property
    def num_columns(self) -> int:
        return 1 + int(max((x for x, _ in self.places.values()), default=-1))

    @property
    def height(self) -> float:
        rows = [y for path in self.paths.values() for _, y in path]
        rows += [y for _, y in self.places.values()]
        return max(rows) - min(rows) + 1 if rows else 0.0


def layout(nodes: Sequence[Node], edges: Iterable[tuple[Node, Node]]) -> Layout[Node]:
    """Lay out; the order of `nodes` decides ties. Edges may repeat. Raises `ValueError` when an
    edge names an unknown node or the edges form a cycle."""
    unique_edges = list(dict.fromkeys(edges))
    layer_of = _layers(nodes, unique_edges)
    columns: list[list[Slot]] = [[] for _ in range(1 + max(layer_of.values(), default=-1))]
    for node in dict.fromkeys(nodes):
        columns[layer_of[node]].append(node)
    chains: dict[tuple[Node, Node], list[Slot]] = {}
    for source, target in unique_edges:
        between = range(layer_of[source] + 1, layer_of[target])
        waypoints = [object() for _ in between]
        chains[source, target] = [source, *waypoints, target]
        for layer, waypoint in zip(between, waypoints, strict=True):
            columns[layer].append(waypoint)
    _reduce_crossings(columns, chains.values())
    places = {
        slot: (float(x), y - (len(column) - 1) / 2)
        for x, column in enumerate(columns)
        for y, slot in enumerate(column)
    }
    return Layout(
        {node: places[node] for node in nodes},
        {edge: [places[slot] for slot in chain] for edge, chain in chains.items()},
    )


def _layers(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> dict[Node, int]:
    predecessors: dict[Node, list[Node]] = {node: [] for node in nodes}
    for source, target in edges:
        if source not in predecessors or target not in predecessors:
            raise ValueError(f"the edge {source!r} -> {target!r} names an unknown node")
        predecessors[target].append(source)
    layer_of: dict[Node, int] = {}
    for node in TopologicalSorter(predecessors).static_order():
        layer_of[node] = 1 + max((layer_of[before] for before in predecessors[node]), default=-1)
    return layer_of


def _reduce_crossings(columns: list[list[Slot]], chains: Iterable[list[Slot]]) -> None:
    """Sort each column by the mean row of its neighbours on the left, then on the right, and so
    on; keep the best order seen. Changes `columns` in place."""
    left, right = defaultdict[Slot, list[Slot]](list), defaultdict[Slot, list[Slot]](list)
    for chain in chains:
        for a, b in pairwise(chain):
            right[a].append(b)
            left[b].append(a)
    best, fewest = [list(column) for column in columns], _num_crossings(columns, right)
    for sweep in range(_SWEEPS):
        if fewest == 0:
            break
        order, neighbours = (columns, left) if sweep % 2 == 0 else (columns[::-1], right)
        for fixed, column in pairwise(order):
            _sort_by_neighbours(column, fixed, neighbours)
        if (crossings := _num_crossings(columns, right)) < fewest:
            best, fewest = [list(column) for column in columns], crossings
    columns[:] = best


def _sort_by_neighbours(
    column: list[Slot], fixed: list[Slot], neighbours: dict[Slot, list[Slot]]
) -> None:
    row = {slot: y for y, slot in enumerate(fixed)}
    own = {slot: y * len(fixed) / len(column) for y, slot in enumerate(column)}

    def mean_row(slot: Slot) -> float:
        rows = [row[n] for n in neighbours[slot]]
        return sum(rows) / len(rows) if rows else own[slot]

    column.sort(key=mean_row)


def _num_crossings(columns: list[list[Slot]], right: dict[Slot, list[Slot]]) -> int:
    """Inversions among the right ends of the edges, taken in the order of their left ends."""
    total = 0
    for column, following in pairwise(columns):
        row = {slot: y for y, slot in enumerate(following)}
        ends = [y for slot in column for y in sorted(row[n] for n in right[slot])]
        total += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return total
