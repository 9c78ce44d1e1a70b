"""Draws the pictures of docs/ from the result files, and one from any runs; needs matplotlib.

python -m benchmark.plots
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmark.apps.metrics import key_figures
from benchmark.results import ROOT, load
from benchmark.tables.markdown import Row

DOCS = ROOT / "docs"
SUFFIX = "200"
CHATS = ("jct_chat_mean", "jct_background_mean")
COLUMNS = 3


def lines(axes: Axes, points: Mapping[str, Iterable[tuple[float, float]]]) -> None:
    for label, line in points.items():
        axes.plot(*zip(*line, strict=True), "o-", label=label)


def bars(axes: Axes, names: Sequence[str], arms: Mapping[str, Sequence[float]]) -> None:
    """Groups of bars, with one bar for each arm."""
    width = 0.81 / len(arms)
    for i, (label, heights) in enumerate(arms.items()):
        places = [place + (i - (len(arms) - 1) / 2) * width for place in range(len(names))]
        drawn = axes.bar(places, heights, width, label=label)
        if axes.get_yscale() == "linear":
            axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.legend()


def scheduler() -> None:
    """CPU time of a placement by queued tasks, and by engines."""
    curves = load("scheduler_curves.json")
    phases = {
        "first_round": "all engines idle",
        "later_rounds": "one round for each task that ends",
    }
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for axes, count, fixed in zip(panels, ("tasks", "engines"), ("engines", "tasks"), strict=True):
        rows = curves[f"by_{count}"]
        points = {
            label: [(row[count], row[phase]["us_each"]) for row in rows if row[phase]["placed"]]
            for phase, label in phases.items()
        }
        lines(axes, points)
        axes.set(xscale="log", xlabel=count, title=f"{rows[0][fixed]:,} {fixed}")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("\N{MICRO SIGN}s of CPU per placement")
    panels[0].set_ylim(bottom=0)
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "internals" / "scheduler.png", dpi=80)


def engine_gpu() -> None:
    """Milliseconds of a step, without HTTP on either side."""
    arms = {"floor": "floor_ms", "Parrot": "ms", "vLLM 0.25.1": "vllm_ms"}
    figure, panels = plt.subplots(
        1, 3, figsize=(14, 4.6), layout="constrained", width_ratios=(1, 1, 2.4)
    )
    for axes, model in zip(panels, ("qwen3-0.6b", "llama-3.1-8b", "llama-2-7b"), strict=True):
        report = load(f"engine_gpu_{model}.json")
        cases = [r for r in report["rows"] if r["case"].startswith(("decode", "copilot", "roots4"))]
        names = [row["case"].replace("decode ", "") for row in cases]
        heights = {label: [row[key] or 0.0 for row in cases] for label, key in arms.items()}
        bars(axes, names, heights)
        axes.set(ylabel="milliseconds per step", title=model)
    figure.suptitle("Decode steps on one NVIDIA H200, bfloat16")
    figure.savefig(DOCS / "internals" / "engine_gpu.png", dpi=80)


def kernels() -> None:
    """Speed-up by batch and shared tokens, comparison with FlashInfer, and ratios to the floor."""
    grid, cells = load("kernels_table_h200.json")["grid"], load("kernels_h200.json")["cells"]
    figure, panels = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    for axes, kv_heads in zip(panels[0], (8, 32), strict=True):
        draw_speedup(axes, [row for row in grid if row["kv_heads"] == kv_heads], kv_heads)
    arms = {"floor": "floor_us", "Parrot": "us", "FlashInfer 0.6.13": "flashinfer_us"}
    panels[1][0].set(yscale="log", ylabel="microseconds")
    names = [row["cell"].replace("hkv", "").replace("_", " ") for row in cells]
    bars(panels[1][0], names, {label: [r[key] for r in cells] for label, key in arms.items()})
    panels[1][0].set_title("One prompt of 6144 tokens: KV heads, batch, suffix")
    axes = panels[1][1]
    for kv_heads in (8, 32):
        points = [(r["floor_us"], r["over_floor"]) for r in grid if r["kv_heads"] == kv_heads]
        axes.scatter(*zip(*points, strict=True), s=12, label=f"{kv_heads} KV heads")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="floor, microseconds", ylabel="measured / floor")
    axes.set_title("Every case of the table")
    axes.legend()
    figure.suptitle("Decode attention of one layer on one NVIDIA H200")
    figure.savefig(DOCS / "internals" / "kernels.png", dpi=80)


def draw_speedup(axes: Axes, rows: Sequence[Row], kv_heads: int) -> None:
    chosen = [row for row in rows if row["suffix"] == SUFFIX and row["prefix"]]
    prefixes = [p for p in dict.fromkeys(row["prefix"] for row in chosen) if p >= 512]
    points = {
        f"{prefix} shared tokens": [
            (row["batch"], row["speedup"]) for row in chosen if row["prefix"] == prefix
        ]
        for prefix in prefixes
    }
    lines(axes, points)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="times faster than unshared reads")
    batches = sorted({row["batch"] for row in chosen})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_title(f"Sharing a prompt, {kv_heads} KV heads, suffixes of {SUFFIX}")
    axes.legend()


def applications(paths: Sequence[Path], output: Path) -> None:
    """Mean completion times by case and setting, over the repetitions; one panel per workload."""
    runs = [run for path in paths for run in json.loads(path.read_text())["runs"]]
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    columns = min(len(workloads), COLUMNS)
    rows = -(-len(workloads) // columns)
    size = (5 * columns, 3.4 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    for workload, axes in zip(workloads, panels.flat, strict=False):
        mine = [run for run in runs if run["workload"] == workload]
        cases = list(dict.fromkeys(run["case"] for run in mine))
        arms = {
            setting: [mean_seconds(mine, case, setting) for case in cases]
            for setting in dict.fromkeys(run["setting"] for run in mine)
        }
        bars(axes, [case.partition(":")[2] or "default" for case in cases], arms)
        axes.set(visible=True, title=workload, ylabel="mean completion time, s")
    figure.savefig(output)


def mean_seconds(runs: Sequence[Row], case: str, setting: str) -> float:
    """The mean completion time of the application itself: the first kind of job that is not a chat.
    0 if all runs failed."""
    found = []
    for run in runs:
        if (run["case"], run["setting"]) == (case, setting):
            figures = key_figures(run["figures"])
            names = [name for name in figures if name.startswith("jct_") and name.endswith("_mean")]
            own = [name for name in names if name not in CHATS] or names
            found += [figures[name] for name in own[:1]]
    return fmean(found) if found else 0.0


if __name__ == "__main__":
    for draw in (scheduler, engine_gpu, kernels):
        draw()
