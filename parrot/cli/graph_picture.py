"""Draw the executed graph of a session, as SVG.

Nodes are placed in layers from left to right, in the usual three steps (Sugiyama, Tagawa, Toda
1981): a node's layer is the longest path that leads to it; the nodes of each layer are sorted by
the mean place of their neighbours to avoid crossings; each layer is centred. An edge over several
layers has one waypoint in each layer between.

    layer 0    1        2
        a --\\
             > d --\\
        b --/       > e        rows grow downwards, columns to the right
        c ---------/           (c -> e has a waypoint in layer 1)
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar
from xml.sax.saxutils import escape

from parrot.cli.calls import run_seconds
from parrot.protocol.public import CompletionInfo, SessionInfo

_SWEEPS = 8
_COLUMN, _ROW = 336, 90  # Pixels between the centres of two nodes.
_BOX_WIDTH, _BOX_HEIGHT = 240, 62
_MARGIN, _TITLE = 40, 20
_LEAST_WIDTH = 480
_COLOURS = {"done": "#d9efe0", "failed": "#f6d5d5", "cancelled": "#ececec"}
_OTHER_COLOUR = "#fdf3d1"
_INK, _FAINT = "#1f2933", "#7b8794"
_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SVG = f"""\
<?xml version="1.0" encoding="utf-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{{width}}" height="{{height}}" \
font-family="sans-serif" font-size="12">
<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{_FAINT}"/></marker>
<rect width="100%" height="100%" fill="white"/>
{{shapes}}
</svg>
"""

Node = TypeVar("Node", bound=Hashable)
Slot = Hashable  # An item of a column: a node or a waypoint.
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout(Generic[Node]):
    """`places`: (column, row) of each node. Rows are centred around 0, and at least 1 apart within
    a column. `paths`: the points of each edge from source to target, including waypoints."""

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
    """Compute the layout. The order of `nodes` breaks ties. Edges may repeat. Raises `ValueError`
    if an edge has an unknown node, or if the edges form a cycle."""
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
    """Sort each column by the mean row of its neighbours, alternating between the left and the
    right neighbours. Keep the order with the fewest crossings. Changes `columns` in place."""
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
    """The number of inversions of the edges' right ends, in the order of their left ends."""
    total = 0
    for column, following in pairwise(columns):
        row = {slot: y for y, slot in enumerate(following)}
        ends = [y for slot in column for y in sorted(row[n] for n in right[slot])]
        total += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return total


def draw_session(info: SessionInfo, title: str, path: Path) -> None:
    """Write an SVG picture of the calls and of the variables between them. Raises `OSError` if the
    file cannot be written."""
    known = {call.output_var_id for call in info.calls}
    edges = [(e.source, e.target) for e in info.edges if e.source in known and e.target in known]
    plan = layout([call.output_var_id for call in info.calls], edges)
    width = max(max(plan.num_columns - 1, 0) * _COLUMN + _BOX_WIDTH + 2 * _MARGIN, _LEAST_WIDTH)
    height = max(plan.height - 1, 0) * _ROW + _BOX_HEIGHT + 2 * _MARGIN + _TITLE
    top = min((y for _, y in plan.places.values()), default=0.0)
    shapes = [
        f'<text x="{_MARGIN}" y="{_MARGIN}" font-weight="bold" fill="{_INK}">{_text(title)}</text>',
        *(_arrow([_centre(point, top) for point in points]) for points in plan.paths.values()),
        *(_box(call, _centre(plan.places[call.output_var_id], top)) for call in info.calls),
    ]
    svg = _SVG.format(width=round(width), height=round(height), shapes="\n".join(shapes))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")


def _centre(place: Point, top: float) -> Point:
    """The centre of a node, in pixels from the upper left corner. `top` is the first row."""
    x = _MARGIN + _BOX_WIDTH / 2 + place[0] * _COLUMN
    return x, _MARGIN + _TITLE + _BOX_HEIGHT / 2 + (place[1] - top) * _ROW


def _arrow(way: list[Point]) -> str:
    """A smooth line from the right side of one box to the left side of the next."""
    way[0] = (way[0][0] + _BOX_WIDTH / 2, way[0][1])
    way[-1] = (way[-1][0] - _BOX_WIDTH / 2, way[-1][1])
    curves = [
        f"C{(x0 + x1) / 2:g},{y0:g} {(x0 + x1) / 2:g},{y1:g} {x1:g},{y1:g}"
        for (x0, y0), (x1, y1) in pairwise(way)
    ]
    line = f"M{way[0][0]:g},{way[0][1]:g}" + "".join(curves)
    return f'<path d="{line}" fill="none" stroke="{_FAINT}" marker-end="url(#head)"/>'


def _box(call: CompletionInfo, centre: Point) -> str:
    x, y = centre
    colour = _COLOURS.get(call.state, _OTHER_COLOUR)
    return (
        f'<rect x="{x - _BOX_WIDTH / 2:g}" y="{y - _BOX_HEIGHT / 2:g}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="8" fill="{colour}" stroke="{_INK}"/>\n'
        f'<text x="{x:g}" y="{y - 8:g}" text-anchor="middle" fill="{_INK}">'
        f"{_text(call_label(call))}</text>\n"
        f'<text x="{x:g}" y="{y + 18:g}" text-anchor="middle" font-size="9.5" fill="{_FAINT}">'
        f"{_text(_facts(call))}</text>"
    )


def _text(text: str) -> str:
    """The text without characters that XML 1.0 forbids."""
    return escape(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def call_label(call: CompletionInfo) -> str:
    name = f"{call.func_name or 'call'} → {call.output}"
    return name if len(name) <= 36 else name[:35] + "…"


def _facts(call: CompletionInfo) -> str:
    tokens = f"{call.cached_tokens} cached + {call.computed_tokens} in, {call.output_tokens} out"
    seconds = run_seconds(call)
    return tokens if seconds is None else f"{tokens}, {seconds:.1f} s"
