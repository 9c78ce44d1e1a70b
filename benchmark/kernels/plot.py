"""Draw docs/kernels.png from committed results; needs matplotlib.

python benchmark/kernels/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "results"
TARGET = Path(__file__).parents[2] / "docs" / "kernels.png"
SUFFIX = "200"
Row = dict[str, Any]


def draw_speedup(axes: Axes, rows: list[Row], kv_heads: int) -> None:
    for prefix in (512, 2048, 6144, 16384):
        points = [r for r in rows if r["kv_heads"] == kv_heads and r["prefix"] == prefix]
        points = [r for r in points if r["suffix"] == SUFFIX]
        batches = [r["batch"] for r in points]
        axes.plot(batches, [r["speedup"] for r in points], "o-", label=f"{prefix} shared tokens")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="times faster than unshared reads")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_title(f"Sharing a prompt, {kv_heads} KV heads, suffixes of {SUFFIX}")
    axes.legend()


def draw_cells(axes: Axes, cells: list[Row]) -> None:
    """Against the better of FlashInfer's two kernels, cell by cell."""
    names = [row["cell"].replace("hkv", "").replace("_", " ") for row in cells]
    places = range(len(cells))
    width = 0.27
    arms = {"floor": "floor_us", "Parrot": "us", "FlashInfer 0.6.13": "flashinfer_us"}
    for i, (label, key) in enumerate(arms.items()):
        axes.bar([p + (i - 1) * width for p in places], [r[key] for r in cells], width, label=label)
    axes.set(yscale="log", ylabel="microseconds")
    axes.set_xticks(list(places), names, rotation=45, ha="right", fontsize=8)
    axes.set_title("One prompt of 6144 tokens: KV heads, batch, suffix")
    axes.legend()


def draw_floor(axes: Axes, rows: list[Row]) -> None:
    for kv_heads in (8, 32):
        points = [r for r in rows if r["kv_heads"] == kv_heads]
        axes.scatter(
            [r["floor_us"] for r in points],
            [r["over_floor"] for r in points],
            s=12,
            label=f"{kv_heads} KV heads",
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="floor, microseconds", ylabel="measured / floor")
    axes.set_title("Every case of the table")
    axes.legend()


def main() -> None:
    table = json.loads((RESULTS / "kernels_table_h200.json").read_text())
    cells = json.loads((RESULTS / "kernels_h200.json").read_text())["cells"]
    figure, axes = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    draw_speedup(axes[0][0], table["grid"], 8)
    draw_speedup(axes[0][1], table["grid"], 32)
    draw_cells(axes[1][0], cells)
    draw_floor(axes[1][1], table["grid"])
    figure.suptitle(f"Decode attention of one layer on one {table['gpu']}")
    figure.savefig(TARGET, dpi=80)


if __name__ == "__main__":
    main()
