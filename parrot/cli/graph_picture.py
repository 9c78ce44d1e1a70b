"""Draw the executed graph of a session, as SVG and PNG.

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

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from parrot.cli.calls import run_seconds
from parrot.protocol.public import CompletionInfo, SessionInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SWEEPS = 8
_COLUMN, _ROW = 3.6, 0.95  # inches from node to node
_BOX_WIDTH, _BOX_HEIGHT = 2.5, 0.66
_MARGIN, _TITLE = 0.5, 0.3
_COLOURS = {"done": "#d9efe0", "failed": "#f6d5d5", "cancelled": "#ececec"}
_OTHER_COLOUR = "#fdf3d1"
_INK, _FAINT = "#1f2933", "#7b8794"

Node = TypeVar("Node", bound=Hashable)
Slot = Hashable  # what takes a place in a column: a node, or a waypoint
Point = tuple[float, float]


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


def can_draw() -> bool:
    """Whether matplotlib is there; it comes with the `demo` extra."""
    return find_spec("matplotlib") is not None


def draw_session(info: SessionInfo, title: str, paths: Iterable[Path]) -> None:
    """Write a picture of the calls and of the variables between them to each path; the suffix says
    the format. Raises `OSError` when a file cannot be written."""
    figure = _figure(info, title)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(info: SessionInfo, title: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = {call.output_var_id for call in info.calls}
    edges = [(e.source, e.target) for e in info.edges if e.source in known and e.target in known]
    plan = layout([call.output_var_id for call in info.calls], edges)
    width = max(plan.num_columns - 1, 0) * _COLUMN + _BOX_WIDTH + 2 * _MARGIN
    height = max(plan.height - 1, 0) * _ROW + _BOX_HEIGHT + 2 * _MARGIN + _TITLE
    figure = Figure(figsize=(max(width, 5.0), height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-_BOX_WIDTH / 2 - _MARGIN, figure.get_figwidth() - _BOX_WIDTH / 2 - _MARGIN)
    bottom = (_TITLE - height) / 2
    axes.set_ylim(bottom, bottom + height)
    axes.text(-_BOX_WIDTH / 2, bottom + height - _MARGIN, title, color=_INK, fontweight="bold")
    _draw_edges(axes, plan)
    for call in info.calls:
        _draw_call(axes, call, _inches(plan.places[call.output_var_id]))
    return figure


def _inches(place: Point) -> Point:
    return place[0] * _COLUMN, -place[1] * _ROW


def _draw_edges(axes: "Axes", plan: Layout[str]) -> None:
    """A smooth line from the right side of one box to the left side of the next."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    for points in plan.paths.values():
        way = [_inches(point) for point in points]
        way[0] = (way[0][0] + _BOX_WIDTH / 2, way[0][1])
        way[-1] = (way[-1][0] - _BOX_WIDTH / 2, way[-1][1])
        vertices, codes = [way[0]], [int(Curve.MOVETO)]
        for (x0, y0), (x1, y1) in pairwise(way):
            middle = (x0 + x1) / 2
            vertices += [(middle, y0), (middle, y1), (x1, y1)]
            codes += [int(Curve.CURVE4)] * 3
        axes.add_patch(
            FancyArrowPatch(
                path=Curve(vertices, codes), arrowstyle="-|>", mutation_scale=9, color=_FAINT, lw=1
            )
        )


def _draw_call(axes: "Axes", call: CompletionInfo, centre: Point) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = centre
    axes.add_patch(
        FancyBboxPatch(
            (x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2),
            _BOX_WIDTH,
            _BOX_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=_COLOURS.get(call.state, _OTHER_COLOUR),
            edgecolor=_INK,
            linewidth=0.8,
        )
    )
    axes.text(x, y + 0.13, call_label(call), ha="center", va="center", fontsize=9, color=_INK)
    axes.text(x, y - 0.15, _facts(call), ha="center", va="center", fontsize=7, color=_FAINT)


def call_label(call: CompletionInfo) -> str:
    """`$` would start mathematics in the picture."""
    name = f"{call.func_name or 'call'} → {call.output}".replace("$", r"\$")
    return name if len(name) <= 36 else name[:35] + "…"


def _facts(call: CompletionInfo) -> str:
    tokens = f"{call.cached_tokens} cached + {call.computed_tokens} in, {call.output_tokens} out"
    seconds = run_seconds(call)
    return tokens if seconds is None else f"{tokens}, {seconds:.1f} s"
