"""Draw the executed graph of a session, as SVG and PNG."""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from parrot.cli.calls import run_seconds
from parrot.cli.graph_layout import Layout, Point, layout
from parrot.protocol.public import CompletionInfo, SessionInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMN, _ROW = 3.6, 0.95  # inches from node to node
_BOX_WIDTH, _BOX_HEIGHT = 2.5, 0.66
_MARGIN, _TITLE = 0.5, 0.3
_COLOURS = {"done": "#d9efe0", "failed": "#f6d5d5", "cancelled": "#ececec"}
_OTHER_COLOUR = "#fdf3d1"
_INK, _FAINT = "#1f2933", "#7b8794"


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
