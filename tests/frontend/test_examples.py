"""All examples run completely with ServeCore and an engine that records its prompts."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_serve import FakeServe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")

# The number of calls of each example. For the other examples, it depends on the text.
NUM_CALLS = {
    "hello_world.py": 1,
    "joke_with_explanation.py": 1,
    "recommendation_letter.py": 1,
    "chatbot.py": 4,
    "linux_terminal.py": 5,
    "play_writer.py": 3,
    "snake_game.py": 8,
    "native_formatting.py": 3,
    "best_of_n.py": 7,
}


def start(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / program), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the examples importable, since they import each other by plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in set(sys.modules) - before:
        if (EXAMPLES / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("program", PROGRAMS)
def test_example(
    program: str,
    url: str,
    serve: FakeServe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--core", url])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert "---" in capsys.readouterr().out
    assert len(serve.calls) == NUM_CALLS.get(program, len(serve.calls)) > 0
    assert len(serve.ended) == 1


def test_map_reduce_of_a_file(url: str, serve: FakeServe, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i}. " + "word " * 100 for i in range(60)))
    done = start("map_reduce_summary.py", "--core", url, str(file))
    assert (done.returncode, done.stderr) == (0, "")
    names = [call.func_name for call in serve.calls]
    num_chunks = names.count("summarize_chunk")
    assert f"in {num_chunks} chunks" in done.stdout
    assert num_chunks > 16
    assert names.count("combine_summaries") == -(-num_chunks // 16) + 1


def test_splitting_loses_nothing() -> None:
    from map_reduce_summary import split_text

    text = "\n\n".join(f"Paragraph {i}. " + "word " * (i % 90) for i in range(50)) + "x" * 3000
    chunks = split_text(text, 1000)
    assert " ".join(chunks).split() == text.split()
    assert all(len(chunk) <= 1000 for chunk in chunks[:-1])
    assert split_text(" \n ") == []


def test_an_example_reports_a_missing_cluster() -> None:
    done = start("hello_world.py", "--core", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("Unavailable: no answer from http://127.0.0.1:9")
    assert "parrot up" in done.stderr
    assert "Traceback" not in done.stderr
