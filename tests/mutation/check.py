"""Put plausible bugs into a copy of the code, one at a time, and see whether a test fails.

    python tests/mutation/check.py [--only TEXT] [--jobs 2]

Each bug of `bugs.toml` names a file, a text that stands in it exactly once, what a mistaken
developer might have written instead, and the tests that should notice. A bug survives if all of
them pass. The exit status is 1 if fewer than 95% are caught, or if the tests fail without any bug.
It takes some ten minutes on two cores and is not a part of CI, which only checks that every bug can
still be put in.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).with_name("bugs.toml")
REQUIRED_SHARE = 0.95
_TIMEOUT_S = 300  # for the tests of one bug, which may make them wait for ever


@dataclass(frozen=True, slots=True)
class Bug:
    """A text of a file, and the mistaken one that takes its place. `old` stands in `file` exactly
    once; `tests` are pytest's arguments."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def put_into(self, root: Path) -> str:
        """Write the mistaken file below `root` and return what stood there.

        Raises `ValueError` if the bug does not fit the code any more."""
        path = root / self.file
        before = path.read_text()
        if before.count(self.old) != 1:
            raise ValueError(f"{self.file}: {before.count(self.old)} times: {self.old!r}")
        after = before.replace(self.old, self.new)
        compile(after, self.file, "exec")
        path.write_text(after)
        return before


def read_bugs() -> list[Bug]:
    entries = tomllib.loads(BUGS.read_text())["bug"]
    return [Bug(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def tests_pass(root: Path, tests: Sequence[str]) -> bool:
    """Run them on the code below `root`. Tests that do not end in time have failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "60", *tests]
    command += ["-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2):  # 2: collecting them failed, as with a bad import
        raise RuntimeError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return done.returncode == 0


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Make `count` copies of what git tracks, for workers to take and to put back."""
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
    root = free.get()
    try:
        before = bug.put_into(root)
        try:
            return not tests_pass(root, bug.tests)
        finally:
            (root / bug.file).write_text(before)
    finally:
        free.put(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="bugs whose file or description has this text")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    args = parser.parse_args()
    bugs = [bug for bug in read_bugs() if args.only in bug.file or args.only in bug.what]
    if not bugs:
        sys.exit(f"no bug has `{args.only}` in its file or description")
    with copies(args.jobs) as free, ThreadPoolExecutor(args.jobs) as workers:
        root = free.get()
        files = sorted({name for bug in bugs for name in bug.tests})
        if not tests_pass(root, files):
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
            print(
                f"{elapsed:5.0f} s {number}/{len(bugs)} {state} {bug.file}: {bug.what}", flush=True
            )
    share = 1 - len(survivors) / len(bugs)
    print(f"{len(bugs) - len(survivors)} of {len(bugs)} bugs caught: {share:.0%}")
    sys.exit(share < REQUIRED_SHARE)


if __name__ == "__main__":
    main()
