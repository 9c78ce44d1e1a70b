"""A picture of a result file: for each case the settings' completion times. Needs
matplotlib."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.apps.report import key_figures

Row = dict[str, Any]

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
_COLUMNS = 3


def plot(paths: Sequence[Path], output: Path) -> None:
    """One panel for each workload of all the files."""
    from matplotlib.figure import Figure

    runs = [run for path in paths for run in json.loads(path.read_text())["runs"]]
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    rows = -(-len(workloads) // _COLUMNS)
    columns = min(len(workloads), _COLUMNS)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for workload, panel in zip(workloads, panels, strict=False):
        _draw(panel, workload, [run for run in runs if run["workload"] == workload])
    for panel in list(panels):
        panel.set_visible(False)
    figure.savefig(output)


def mean_seconds(run: Row) -> float | None:
    """The mean completion time of the application itself: the first kind of job that is no chat."""
    figures = key_figures(run["figures"])
    names = [name for name in figures if name.startswith("jct_") and name.endswith("_mean")]
    own = [name for name in names if name not in ("jct_chat_mean", "jct_background_mean")]
    chosen = (own or names)[:1]
    return figures[chosen[0]] if chosen else None


def _draw(panel: Any, workload: str, runs: list[Row]) -> None:
    """Bars: the mean over the repetitions, with a mark for the least and the greatest."""
    cases = list(dict.fromkeys(run["case"] for run in runs))
    settings = list(dict.fromkeys(run["setting"] for run in runs))
    width = 0.8 / len(settings)
    for number, setting in enumerate(settings):
        for place, case in enumerate(cases):
            values = _values(runs, case, setting)
            if not values:
                continue
            at, mean = place + number * width, sum(values) / len(values)
            label = setting if place == 0 else None
            panel.bar(at, mean, width, color=_COLOURS[number % len(_COLOURS)], label=label)
            panel.vlines(at, min(values), max(values), color="black", linewidth=1)
    panel.set_xticks(
        [place + (len(settings) - 1) * width / 2 for place in range(len(cases))],
        [case.partition(":")[2] or "default" for case in cases],
        fontsize=7,
    )
    panel.set_title(workload)
    panel.set_ylabel("mean completion time, s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)


def _values(runs: list[Row], case: str, setting: str) -> list[float]:
    mine = [run for run in runs if run["case"] == case and run["setting"] == setting]
    return [value for run in mine if (value := mean_seconds(run)) is not None]
