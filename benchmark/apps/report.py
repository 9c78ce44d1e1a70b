"""The runs of a result file, and how the settings compare."""

import statistics
from typing import Any

from benchmark.results import Report

Row = dict[str, Any]


class Runs:
    """The report's `runs` in the order in which they ended, and `ratios` against the first
    setting; written after each run."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._runs: list[Row] = []
        report.save()

    def add(self, row: Row) -> None:
        self._runs.append(row)
        self._report |= {"ratios": ratios(self._runs), "runs": self._runs}
        self._report.save()


def key_figures(figures: Row) -> dict[str, float]:
    """What runs are compared by, smaller is better; nothing of a run with errors. In seconds."""
    if figures["num_errors"] or figures["timed_out"]:
        return {}
    found = {"seconds": figures["seconds"]}
    for kind, times in figures["jct_s"].items():
        found |= {f"jct_{kind}_{name}": times[name] for name in ("mean", "p99")}
    during = figures.get("bystanders", {}).get("during")
    if during is not None:
        found |= {f"bystander_{name}": during[name]["p99"] for name in ("ttft_s", "tpot_s")}
    return found


def ratios(runs: list[Row]) -> list[Row]:
    """For each case and setting but the first: its key figures over those of the first setting in
    the same repetition (above 1: the first is better). Median and spread over the repetitions."""
    found: list[Row] = []
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        first, *others = dict.fromkeys(run["setting"] for run in mine)
        base = _by_repeat(mine, first)
        for other in others:
            theirs = _by_repeat(mine, other)
            pairs = [(base[r], theirs[r]) for r in sorted(base.keys() & theirs.keys())]
            row: Row = {"case": case, "setting": other, "over": first, "repeats": len(pairs)}
            for name in pairs[0][0] if pairs else ():
                values = [b[name] / a[name] for a, b in pairs if a.get(name) and name in b]
                if values:
                    row[name] = [statistics.median(values), min(values), max(values)]
            found.append(row)
    return found


def _by_repeat(runs: list[Row], setting: str) -> dict[int, dict[str, float]]:
    return {
        run["repeat"]: figures
        for run in runs
        if run["setting"] == setting and (figures := key_figures(run["figures"]))
    }
