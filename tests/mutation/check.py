"""Insert plausible bugs into a copy of the code, one at a time, and check that a test fails.

    python -m tests.mutation.check [--only TEXT] [--jobs 2]

Each bug in `bugs.toml` has a text that occurs exactly once in the package, a faulty replacement,
and the tests that should fail. A bug survives if all of them pass. The exit status is 1 if fewer
than 95% of the bugs are caught, or if the tests fail without a bug. A run takes 30 minutes on two
cores and is not part of CI. CI only checks that every bug can still be inserted.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from tests.support.syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("bugs.toml")
REQUIRED_SHARE = 0.95
_BUG_TIMEOUT_S = 300.0  # For the tests of one bug, which may make them wait indefinitely.
_ALL_TIMEOUT_S = 3600.0  # For the tests of all bugs, which run once without any bug.


@dataclass(frozen=True, slots=True)
class Bug:
    """A text of the package, and its faulty replacement.

    The text has no file name, so that it is found after the code has moved. `tests` are arguments
    of pytest."""

    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    within: str = ""  # the innermost function or class around `old`, if `old` occurs in several

    def applied_to(self, sources: Mapping[str, str]) -> tuple[str, str]:
        """Return the path of the file with `old`, and its text with `new` instead.

        Raises `ValueError` if the bug no longer fits the code."""
        places = [
            (path, at)
            for path, source in sources.items()
            for at in occurrences(source, self.old)
            if not self.within or innermost_definition(source, at) == self.within
        ]
        if len(places) != 1:
            found = ", ".join(path for path, _ in places) or "nowhere"
            raise ValueError(f"should stand once, but stands in {found}: {self.old!r}")
        [(path, at)] = places
        source = sources[path]
        mistaken = source[:at] + self.new + source[at + len(self.old) :]
        compile(mistaken, path, "exec")
        return path, mistaken


def occurrences(source: str, text: str) -> Iterator[int]:
    at = source.find(text)
    while at >= 0:
        yield at
        at = source.find(text, at + 1)


def innermost_definition(source: str, at: int) -> str:
    """Return the innermost function or class around the character at `at`, or ""."""
    line = source.count("\n", 0, at) + 1
    name, length = "", len(source)
    for node in statements(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            end = node.end_lineno or node.lineno
            if node.lineno <= line <= end and end - node.lineno < length:
                name, length = node.name, end - node.lineno
    return name


@cache
def package_sources() -> dict[str, str]:
    """Return the texts of all files of the package by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "parrot").rglob("*.py")
    }


def read_bugs() -> list[Bug]:
    entries = tomllib.loads(BUGS.read_text())["bug"]
    return [Bug(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def tests_pass(root: Path, tests: Sequence[str], timeout_s: float, *, is_shown: bool) -> bool:
    """Run the tests on the code in `root`. A timeout counts as a failure. With `is_shown`, prints
    the end of pytest's output after a failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "60", *tests]
    command += ["-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        if is_shown:
            print(f"not finished after {timeout_s:g} s")
        return False
    if done.returncode and is_shown:
        print(done.stdout.decode()[-2000:])
    if done.returncode not in (0, 1, 2):  # 2: the collection failed, e.g. by an import error
        raise RuntimeError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return done.returncode == 0


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Make `count` copies of the files in git. Workers take copies and return them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            root = Path(folder) / str(number)
            for name in files:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, root / name)
            free.put(root)
        yield free


def is_caught(bug: Bug, free: SimpleQueue[Path]) -> bool:
    path, mistaken = bug.applied_to(package_sources())
    root = free.get()
    try:
        (root / path).write_text(mistaken)
        return not tests_pass(root, bug.tests, _BUG_TIMEOUT_S, is_shown=False)
    finally:
        (root / path).write_text(package_sources()[path])
        free.put(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="bugs whose file or description has this text")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    args = parser.parse_args()
    files_of = {bug: bug.applied_to(package_sources())[0] for bug in read_bugs()}
    bugs = [bug for bug, file in files_of.items() if args.only in file or args.only in bug.what]
    if not bugs:
        sys.exit(f"no bug has `{args.only}` in its file or description")
    with copies(args.jobs) as free, ThreadPoolExecutor(args.jobs) as workers:
        root = free.get()
        files = sorted({name for bug in bugs for name in bug.tests})
        if not tests_pass(root, files, _ALL_TIMEOUT_S, is_shown=True):
            sys.exit("the tests fail without any bug: " + " ".join(files))
        free.put(root)
        survivors = []
        began = time.monotonic()
        results = workers.map(lambda bug: is_caught(bug, free), bugs)
        for number, (bug, caught) in enumerate(zip(bugs, results, strict=True), 1):
            if not caught:
                survivors.append(bug)
            state = "caught  " if caught else "SURVIVED"
            elapsed = time.monotonic() - began
            place = f"{number}/{len(bugs)} {state} {files_of[bug]}"
            print(f"{elapsed:5.0f} s {place}: {bug.what}", flush=True)
    share = 1 - len(survivors) / len(bugs)
    print(f"{len(bugs) - len(survivors)} of {len(bugs)} bugs caught: {share:.0%}")
    sys.exit(share < REQUIRED_SHARE)


if __name__ == "__main__":
    main()
