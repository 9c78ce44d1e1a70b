"""The tables of docs/applications.md, from the result files, so that the page cannot drift.

<!-- results: apps_cpu.json -->
...
<!-- end -->
"""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "applications.md"
RESULTS = Path(__file__).parents[1] / "results"

_MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def filled(page: str) -> str:
    """The page with each marked table made anew, where there is such a result file."""
    return _MARKED.sub(lambda match: match[1] + _content(RESULTS / match[2]) + match[3], page)


def _content(path: Path) -> str:
    return table(path) if path.exists() else "Not measured yet.\n\n"


def table(path: Path) -> str:
    """Times of the first setting, and of the others over it: median [least-greatest]."""
    report = json.loads(path.read_text())
    lines = [
        f"`{report['command']}`  ",
        f"{report['device']}, {report['when']}, commit {report['git']}\n",
        "| case | setting | runs | mean JCT (s) | over the first | p99 JCT over the first "
        "| tokens/s | recomputed | bystanders' TPOT p99 over the first |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    runs, ratios = report["runs"], report["ratios"]
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        for setting in dict.fromkeys(run["setting"] for run in mine):
            chosen = [run["figures"] for run in mine if run["setting"] == setting]
            ratio: Row = next(
                (r for r in ratios if (r["case"], r["setting"]) == (case, setting)), {}
            )
            lines += _lines(case, setting, chosen, ratio)
    return "\n".join(lines) + "\n"


def _lines(case: str, setting: str, figures: list[Row], ratio: Row) -> list[str]:
    """One line for each kind of job; what is not of a kind stands in the first."""
    kinds = dict.fromkeys(kind for f in figures for kind in f["jct_s"])
    lines = []
    for number, kind in enumerate(kinds):
        means = [f["jct_s"][kind]["mean"] for f in figures if kind in f["jct_s"]]
        cells = [
            case if len(kinds) == 1 else f"{case}, {kind}",
            setting,
            str(len(means)),
            f"{sum(means) / len(means):.3g}",
            _ratio(ratio.get(f"jct_{kind}_mean")),
            _ratio(ratio.get(f"jct_{kind}_p99")),
        ]
        if number == 0:
            rates = [f["output_tokens_per_s"] for f in figures]
            recomputed = [f["tokens"]["recomputed"] for f in figures]
            known = [max(0, count) for count in recomputed if count is not None]
            cells += [
                f"{sum(rates) / len(rates):.0f}",
                f"{sum(known) / len(known):.0f}" if known else "",
                _ratio(ratio.get("bystander_tpot_s")),
            ]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines or [f"| {case} | {setting} | 0 | failed | | | | | |"]


def _ratio(values: list[float] | None) -> str:
    if values is None:
        return ""
    median, least, greatest = values
    return f"{median:.2f} [{least:.2f}-{greatest:.2f}]"
