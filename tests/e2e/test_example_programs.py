"""The example programs run completely on the real embedded model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parrot.cluster import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "common.py")
# A sensible answer has one of these words. Titles and inputs that a program prints have none.
EXPECTED = {
    "agent_with_tools.py": ('{"copies":3}', "9 euros"),
    "best_of_n.py": ("honey", "bee", "sweet", "village"),
    "chain_summary.py": ("parrot", "word"),
    "chatbot.py": ("seed", "fruit", "nut", "vegetable"),
    "hello_world.py": ("hello", "hi ", "day", "robin"),
    "joke_with_explanation.py": ("parrot", "program", "code"),
    "linux_terminal.py": ("/home/robin",),
    "map_reduce_summary.py": ("parrot", "word"),
    "native_formatting.py": ("elephant", "lion", "giraffe", "zebra", "buffalo"),
    "play_writer.py": ("love", "victorian", "theatre"),
    "recommendation_letter.py": ("computer science", "distributed systems", "phd"),
    "snake_game.py": ("def ", "import ", "class "),
}
PARAGRAPHS = "\n\n".join(f"On day {day} the parrot learned a new word. " * 8 for day in range(3))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # In the model's own type, greedy answers depend on which programs share a step.
    with Cluster(engines=[{"model": "embedded", "dtype": "float32"}]) as running:
        yield running


@pytest.fixture(scope="module")
def started(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run all examples in parallel. Together they need few more steps of the engine than the
    longest one."""
    document = tmp_path_factory.mktemp("examples") / "document.txt"
    document.write_text(PARAGRAPHS)
    shorter = {
        "chain_summary.py": [str(document), "--max-chunks", "2"],
        "map_reduce_summary.py": [str(document)],
        "linux_terminal.py": ["pwd", "ls"],
    }
    processes = {
        program: subprocess.Popen(
            [
                sys.executable,
                str(EXAMPLES / program),
                "--core",
                cluster.core_url,
                *shorter.get(program, []),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in PROGRAMS
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first test waits for almost all programs
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_answers_of_example_programs_make_sense(
    program: str, started: dict[str, subprocess.Popen[str]]
) -> None:
    stdout, stderr = started[program].communicate(timeout=280)
    assert started[program].returncode == 0, stderr
    assert "---" in stdout
    assert "Traceback" not in stderr
    assert any(word in stdout.lower() for word in EXPECTED[program]), stdout
