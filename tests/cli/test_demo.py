"""How the demo splits a text into parts and chooses its document."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.cli.demo.command import _TEXT, read_document
from parrot.cli.demo.program import WORDS_PER_PART, main_fact, split_text

WORDS = st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), max_size=60)


@given(WORDS, st.integers(1, 20))
def test_parts_hold_all_words_in_order_and_are_even(words: list[str], limit: int) -> None:
    parts = split_text(" \n".join(words), limit)
    assert [word for part in parts for word in part.split()] == words
    lengths = [len(part.split()) for part in parts]
    assert len(parts) == -(-len(words) // limit)
    assert all(0 < length <= limit for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_paragraphs_are_parts_unless_one_is_too_long() -> None:
    assert split_text("a b\n\n\n c\nd \n\n", 2) == ["a b", "c d"]
    assert split_text("a b c\n\nd", 2) == ["a b", "c d"]
    assert len(split_text(read_document(_TEXT))) == 4


def test_a_part_and_its_prompt_fit_a_small_model() -> None:
    assert WORDS_PER_PART * 3 < 2048
    assert main_fact.to_template_str().endswith("{{text}}{{summary}}")
    assert main_fact.metadata.chat


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00", "is not UTF-8 text"), (b" \n\t", "is empty"), (None, "No such file")],
)
def test_documents_without_text_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match="1"):
        read_document(path)
    assert message in capsys.readouterr().err


def test_a_directory_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_document(tmp_path)
    assert "error:" in capsys.readouterr().err
