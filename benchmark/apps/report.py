"""The result file: what was run, where, and the figures of each run, written after each."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_PACKAGES = ("torch", "triton", "vllm", "transformers", "fastapi", "uvicorn", "aiohttp", "pydantic")


class ResultFile:
    """One JSON object: the circumstances, `runs` in the order in which they ended, and `ratios`
    against the first setting."""

    def __init__(self, path: Path, servers: Row, arguments: Row) -> None:
        self._path = path
        self._runs: list[Row] = []
        self._report: Row = {
            "command": shlex.join(["python", "-m", "benchmark.apps", *sys.argv[1:]]),
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "git": arguments.get("commit") or git_hash(),
            "python": platform.python_version(),
            "versions": package_versions(),
            "device": device_name(),
            "arguments": arguments,
            "servers": servers,
        }
        self.write()

    def add(self, row: Row) -> None:
        self._runs.append(row)
        self.write()

    def write(self) -> None:
        """The whole file at once, so that what is there can always be read."""
        whole = self._report | {"ratios": ratios(self._runs), "runs": self._runs}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps(whole, indent=1) + "\n")
        os.replace(draft, self._path)


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


def git_hash() -> str:
    """Of the working tree, with "+" if it has changes; "unknown" outside of a repository."""
    try:
        head = _output("git", "rev-parse", "--short", "HEAD")
        return head + (
            "+" if _output("git", "--no-optional-locks", "status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def device_name() -> str:
    try:
        return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace(
            "\n", ", "
        )
    except (OSError, subprocess.SubprocessError):
        return f"{os.cpu_count()} CPUs, {platform.machine()}"


def package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, check=True, timeout=10, text=True)
    return answer.stdout.strip()
