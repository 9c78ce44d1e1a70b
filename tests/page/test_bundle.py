"""The page's files are the build output of its sources."""

import shutil
import subprocess
from pathlib import Path

from tests.support.programs import program

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "parrot/gateway/page/static"
_MAX_GZIP = 60_000  # bytes


def test_the_committed_files_are_built_from_the_sources(tmp_path: Path) -> None:
    npm = program("npm", "npm")
    # Build in a copy with the same folder structure.
    ui, static = tmp_path / "ui", tmp_path / "parrot/gateway/page/static"
    shutil.copytree(ROOT / "ui", ui, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(STATIC, static)
    for command in (["ci", "--no-audit", "--no-fund"], ["run", "check"]):
        done = subprocess.run(
            [npm, *command], cwd=ui, capture_output=True, text=True, check=False, timeout=110
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_small() -> None:
    import gzip

    sizes = {path.name: len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir()}
    assert sum(sizes.values()) <= _MAX_GZIP, sizes
