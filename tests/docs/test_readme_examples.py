"""The README's program does what it says, against a simulated cluster."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parrot.cluster import Cluster

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    engine = {"engine_type": "sim", "instance": {"step_s": 0.0005}}
    with Cluster(engines=[engine]) as cluster:
        yield cluster


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(found for found in blocks if containing in found)


def test_the_program(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    source = block("python", "VirtualMachine")
    assert source.count("http://localhost:9000") == 1
    program.write_text(source.replace("http://localhost:9000", cluster.core_url))
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20
