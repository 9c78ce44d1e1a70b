"""Docs, messages and code use plain English: they contain none of the banned constructions.

CONTRIBUTING.md has the rules of writing. In the package the test reads comments and all strings:
errors, help texts, descriptions of config keys, log lines, docstrings."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import parsed, walk

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
BANNED = re.compile(
    r"\b(?:whoever|whom|nobody|somebody|anybody|anew|likewise|by and by|for ever|any more"
    r"|but for|for want of|had better|so many|so lately|that of which|of which there"
    r"|those who|who (?:is|has|waits|asks|reads|comes|goes|may|knows|runs|holds)"
    r"|what (?:is|was|has|it|its|runs) (?:there|gone|kept|computed|known))\b",
    re.IGNORECASE,
)


def prose(page: Path) -> str:
    """Return the page without code blocks and quotations."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r'"[^"\n]*"|`[^`\n]*`', "", text)


def written(file: Path, *, all_strings: bool) -> Iterator[str]:
    """Yield the comments of a module and its docstrings, or all of its strings, without code in
    backquotes."""
    source = file.read_text()
    for node in walk(parsed(source)):
        text = node if all_strings else node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield re.sub(r"`[^`\n]*`", "", text.value)
    if not any(BANNED.search(line) for line in re.findall("#.*", source)):
        return  # These lines include all comments. The tokenizer would be slower.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_the_list_finds_banned_constructions() -> None:
    assert BANNED.search("Whoever reads it waits.")
    assert not BANNED.search("Readers block until the value is set.")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert BANNED.findall(prose(page)) == []


@pytest.mark.parametrize(
    ("folder", "all_strings"),
    # Strings of tests and benchmarks are data: prompts and names.
    [("parrot", True), ("examples", True), ("tests", False), ("benchmark", False)],
)
def test_code_is_in_plain_english(folder: str, all_strings: bool) -> None:
    found = [
        (str(file.relative_to(ROOT)), match[0])
        for file in sorted((ROOT / folder).rglob("*.py"))
        for text in written(file, all_strings=all_strings)
        for match in BANNED.finditer(text)
    ]
    assert found == []
