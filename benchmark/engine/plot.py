"""Draw docs/engine_gpu.png from committed results; needs matplotlib.

python benchmark/engine/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "results"
TARGET = Path(__file__).parents[2] / "docs" / "engine_gpu.png"
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "llama-2-7b")
ARMS = {"floor": "floor_ms", "Parrot": "ms", "vLLM 0.25.1": "vllm_ms"}
WIDTH = 0.27
Row = dict[str, Any]


def draw(axes: Axes, model: str, rows: list[Row]) -> None:
    """Milliseconds of a step, without HTTP on either side."""
    cases = [row for row in rows if row["case"].startswith(("decode", "copilot", "roots4"))]
    places = range(len(cases))
    for i, (label, key) in enumerate(ARMS.items()):
        heights = [row[key] or 0.0 for row in cases]
        bars = axes.bar([p + (i - 1) * WIDTH for p in places], heights, WIDTH, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    names = [row["case"].replace("decode ", "") for row in cases]
    axes.set_xticks(list(places), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("milliseconds per step")
    axes.set_title(model)
    axes.legend()


def main() -> None:
    reports = {m: json.loads((RESULTS / f"engine_gpu_{m}.json").read_text()) for m in MODELS}
    figure, axes = plt.subplots(
        1, 3, figsize=(14, 4.6), layout="constrained", width_ratios=(1, 1, 2.4)
    )
    for place, (model, report) in zip(axes, reports.items(), strict=True):
        draw(place, model, report["rows"])
    figure.suptitle(f"Decode steps on one {reports[MODELS[0]]['gpu']}, bfloat16")
    figure.savefig(TARGET, dpi=80)


if __name__ == "__main__":
    main()
