"""Draw docs/scheduler.png from committed results; needs matplotlib.

python benchmark/serve/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmark" / "results"


def draw(axes: Axes, rows: list[dict[str, Any]], count: str, fixed: str) -> None:
    for phase, label in (
        ("first_round", "all engines idle"),
        ("later_rounds", "one round for each task that ends"),
    ):
        points = [(row[count], row[phase]["us_each"]) for row in rows if row[phase]["placed"]]
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xscale="log", xlabel=count, title=f"{rows[0][fixed]:,} {fixed}")
    axes.grid(visible=True, alpha=0.3)


def main() -> None:
    curves = json.loads((RESULTS / "scheduler_curves.json").read_text())
    figure, (by_tasks, by_engines) = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    draw(by_tasks, curves["by_tasks"], "tasks", "engines")
    draw(by_engines, curves["by_engines"], "engines", "tasks")
    by_tasks.set_ylabel("\N{MICRO SIGN}s of CPU per placement")
    by_tasks.set_ylim(bottom=0)
    by_engines.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "scheduler.png", dpi=80)


if __name__ == "__main__":
    main()
