"""Result files: figures, and the command, the commit and the configs that they come from.

A benchmark is a module with two functions, and a last line that calls `run(__name__)`:

    arguments(parser)       adds its options, except `--output` and `--commit`
    measure(args, report)   fills the report, which is written even if it raises; each row that is
                            `add`ed is shown and written at once

Older files have no provenance. `results/history.json` lists them with the commit that last changed
the file, the command that measures the same today, and, for outdated figures, the reason.
"""

import argparse
import hashlib
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmark" / "results"
HISTORY = RESULTS / "history.json"
UNKNOWN = "unknown"

_PACKAGES = ("torch", "triton", "vllm", "transformers", "fastapi", "uvicorn", "aiohttp", "pydantic")
_DIGITS = 12  # Digits of a hash that are kept.


class Report(dict[str, Any]):
    """The content of a result file. Its provenance is recorded when the report is created."""

    def __init__(self, path: Path | None, command: str, commit: str | None = None) -> None:
        """`path`: None to write nothing. `commit`: required if there is no repository."""
        super().__init__()
        self._path = path
        head, is_dirty = (commit, None) if commit else _commit()
        self["provenance"] = {
            "command": command,
            "commit": head,
            "dirty": is_dirty,
            "configs": {},
            "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "device": _device(),
            "python": platform.python_version(),
            "versions": _versions(),
        }

    def uses(self, name: str, config: Any) -> None:
        """Record a config's hash: the hash of a file's bytes, or of a value as JSON."""
        is_file = isinstance(config, Path)
        content = config.read_bytes() if is_file else json.dumps(config, sort_keys=True).encode()
        self["provenance"]["configs"][name] = hashlib.sha256(content).hexdigest()[:_DIGITS]

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Show a row, append it to the list under `key`, and save."""
        self.setdefault(key, []).append(row)
        print("  ".join(f"{name}={_shown(value)}" for name, value in row.items()), flush=True)
        self.save()

    def save(self) -> None:
        """Write the whole file at once, so that it can be read at any time."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps(self, indent=1) + "\n")
        os.replace(draft, self._path)


def run(name: str, arguments: Sequence[str] | None = None) -> None:
    """The command line of the benchmark in module `name`."""
    module = sys.modules[name]
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser_of(module).parse_args(given)
    command = shlex.join(["python", "-m", _module_name(module), *given])
    report = Report(args.output, command, args.commit)
    try:
        module.measure(args, report)
    finally:
        report.save()
    print(json.dumps(report, indent=1))


def parser_of(module: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    add_output(parser)
    return parser


def add_output(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    parser.add_argument("--output", type=Path, default=default, help="the result file, JSON")
    parser.add_argument("--commit", help="the commit of this tree, if there is no git repository")


def load(name: str) -> dict[str, Any]:
    """A result file by its name. Provenance that the file does not have is "unknown"."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    if "provenance" not in content:
        known = {"command": UNKNOWN, "configs": UNKNOWN, "when": UNKNOWN, "device": UNKNOWN}
        known |= {key: content[key] for key in known if key in content}
        if "gpu" in content:
            known["device"] = content["gpu"]
        known["commit"] = content.get("git", UNKNOWN)
        content["provenance"] = known | json.loads(HISTORY.read_text())[name]
    return content


def names() -> list[str]:
    """All result files."""
    return sorted(path.name for path in RESULTS.glob("*.json") if path != HISTORY)


def check_command(command: str) -> argparse.Namespace:
    """The arguments of a benchmark's command. Raises if it is not `python -m MODULE` with options
    that MODULE has."""
    words = shlex.split(command)
    while "=" in words[0]:  # variables of the environment
        words.pop(0)
    assert words[:2] == ["python", "-m"], command
    module = importlib.import_module(words[2])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[2]}.__main__")
    parser = module.parser() if hasattr(module, "parser") else parser_of(module)
    try:
        return parser.parse_args(words[3:])
    except SystemExit as error:
        raise ValueError(f"{command!r} is not a command of {words[2]}") from error


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _module_name(module: Any) -> str:
    if module.__spec__ is not None:
        return str(module.__spec__.name).removesuffix(".__main__")
    return ".".join(Path(module.__file__).resolve().relative_to(ROOT).with_suffix("").parts)


def _commit() -> tuple[str, bool | None]:
    """The commit of the tree, and whether tracked files other than results differ from it."""
    try:
        head = _output("git", "rev-parse", "--short", "HEAD")
        changes = _output(
            "git", "--no-optional-locks", "status", "--porcelain", "-uno", "--", ".",
            ":!benchmark/results",
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN, None
    return head, bool(changes)


def _device() -> str:
    try:
        names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        return names.replace("\n", ", ")
    except (OSError, subprocess.SubprocessError):
        return f"{os.cpu_count()} CPUs, {platform.machine()}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str:
    answer = subprocess.run(
        command, cwd=ROOT, capture_output=True, check=True, timeout=10, text=True
    )
    return answer.stdout.strip()
