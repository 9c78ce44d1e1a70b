"""Pairs of texts before and after a real edit, from a repository's history: commits that change one
file. A command: `python -m benchmark.engine.drafting.edit_pairs OUT.json`."""

import argparse
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_SUFFIXES = (".py", ".md", ".toml")


@dataclass(frozen=True, slots=True)
class EditPair:
    """A file before and after `commit`, and the commit message."""

    commit: str
    path: str
    subject: str
    before: str
    after: str


def edit_pairs(
    repository: Path, *, min_chars: int = 2000, max_chars: int = 8000
) -> Iterator[EditPair]:
    """The edits of a repository, newest first. Size limits apply to the text after the edit."""
    log = _git(repository, "log", "--format=%x00%h %s", "--name-status", "--no-renames")
    for entry in log.split("\0")[1:]:
        head, *changes = [line for line in entry.splitlines() if line]
        if len(changes) != 1 or not changes[0].startswith("M\t"):
            continue
        path = changes[0][2:]
        if not path.endswith(_SUFFIXES):
            continue
        commit, subject = head.split(" ", 1)
        before = _git(repository, "show", f"{commit}~:{path}")
        after = _git(repository, "show", f"{commit}:{path}")
        if min_chars <= len(after) <= max_chars:
            yield EditPair(commit, path, subject, before, after)


def read_pairs(path: Path) -> list[EditPair]:
    return [EditPair(**pair) for pair in json.loads(path.read_text())]


def _git(repository: Path, *args: str) -> str:
    command = ["git", "-C", str(repository), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--count", type=int, default=64)
    options = parser.parse_args()
    pairs = [
        pair for pair, _ in zip(edit_pairs(options.repository), range(options.count), strict=False)
    ]
    options.out.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1))
    print(f"{len(pairs)} pairs")


if __name__ == "__main__":
    main()
