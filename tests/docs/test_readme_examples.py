"""The README's program and its curl lines do what they say, against a simulated cluster."""

import json
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


def test_the_curl_lines(cluster: Cluster) -> None:
    """Each line with the ids that the answers before it gave."""
    known = {"localhost:9000": cluster.core_url}
    lines = re.findall(r"curl .*?(?=\ncurl|\Z)", block("bash", "curl"), re.DOTALL)
    assert len(lines) == 3
    answers = []
    for line in lines:
        for placeholder, value in known.items():
            line = line.replace(placeholder, value)
        command = re.sub(r" +#.*", "", line)
        result = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
        )
        answers.append(result.stdout)
        answer = json.loads(result.stdout) if result.stdout.startswith("{") else {}
        if "session_auth" in answer:
            known["SESSION_ID"] = str(answer["session_id"])
            known['"..."'] = json.dumps(answer["session_auth"])
            known["=..."] = f"={answer['session_auth']}"
        elif "param_info" in answer:
            known["VAR_ID"] = answer["param_info"][-1]["var_id"]
    assert "event: delta" in answers[-1]
    assert "event: done" in answers[-1]
