"""The first programs of README.md and docs/index.md make sense on the included model."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parrot.cluster import Cluster
from tests.docs.pages import ROOT, blocks_of

# Words that a sensible answer contains.
EXPECTED = {
    "README.md": [("library", "garden", "school"), ("milk", "cow", "mammal", "goat")],
    "index.md": [("bee", "pollen", "flower"), ("milk", "cow", "mammal", "goat")],
}
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(engines=[{"engine_type": "builtin", "model": "embedded"}]) as cluster:
        yield cluster


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_the_answers_make_sense(page: Path, cluster: Cluster, tmp_path: Path) -> None:
    programs = [block.code for block in blocks_of(page) if block.language == "python"]
    for code, words in zip(programs, EXPECTED[page.name], strict=True):
        file = tmp_path / "program.py"
        file.write_text(code.replace("http://localhost:9000", cluster.core_url))
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, str(file)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert any(word in done.stdout.lower() for word in words), done.stdout
