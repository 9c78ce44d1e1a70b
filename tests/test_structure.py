"""How large a file, a function, a class, a folder may grow, so that each can be read at once; and
how no docstring of the package begins."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import parsed

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("parrot", "benchmark") for path in (ROOT / top).rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # but for kernels, which cannot be cut
MAX_PUBLIC_METHODS = 15
MAX_PROJECT_IMPORTS = 15
MAX_MODULES = 15  # in a folder
ODD_BEGINNING = re.compile(r"(Of|That|So|What|Whoever)\b|None:")  # no sentence, but a part of one


def project_imports(tree: ast.AST) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules.update(name.name for name in node.names)
    return {module for module in modules if module.startswith("parrot.")}


def excesses(path: Path, source: str) -> Iterator[str]:
    tree = parsed(source)
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines"
    if (count := len(project_imports(tree))) > MAX_PROJECT_IMPORTS:
        yield f"imports {count} modules of the project"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and "kernels" not in path.name:
                yield f"{node.name} has {lines} lines"
        elif isinstance(node, ast.ClassDef):
            methods = {
                n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            public = [name for name in methods if not name.startswith("_")]
            if len(public) > MAX_PUBLIC_METHODS:
                yield f"{node.name} has {len(public)} public methods"


def test_files_functions_classes_and_imports() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {excess}"
        for path in FILES
        for excess in excesses(path, path.read_text())
    ]
    assert not found, "\n".join(found)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Those of modules, classes, functions, and of what is assigned in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str()) as text):
                        yield text


def odd_docstrings(source: str) -> Iterator[str]:
    for text in docstrings(parsed(source)):
        if ODD_BEGINNING.match(str(text.value)):
            yield f"{text.lineno}: {str(text.value).partition(chr(10))[0]}"


def test_docstrings_begin_as_sentences_do() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{odd}"
        for path in FILES
        if path.is_relative_to(ROOT / "parrot")
        for odd in odd_docstrings(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "is_odd"),
    [
        ("Of the last call.", True),
        ("That one.", True),
        ("So many calls.", True),
        ("What is open.", True),
        ("Whoever asks.", True),
        ("None: it has not ended.", True),
        ("None if it has not ended.", False),
        ("Offsets of the last call.", False),
        ("The session. So it ends.", False),
    ],
)
def test_an_odd_docstring_is_found(docstring: str, is_odd: bool) -> None:
    text = f'"""{docstring}"""\n'
    sources = [text, f"x = 1\n{text}", f"class C:\n  x: int\n  {text}", f"async def f():\n  {text}"]
    assert [any(odd_docstrings(source)) for source in sources] == [is_odd] * 4


def test_folders() -> None:
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py")
    found = {str(f.relative_to(ROOT)): n for f, n in counts.items() if n > MAX_MODULES}
    assert not found


@pytest.mark.parametrize(
    ("source", "excess"),
    [
        ("x = 1\n" * 401, "401 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("class C:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(16)), "C has 16"),
        ("".join(f"import parrot.m{i}\n" for i in range(16)), "imports 16"),
    ],
)
def test_an_excess_is_found(source: str, excess: str) -> None:
    assert any(excess in found for found in excesses(Path("x.py"), source))
    assert not list(excesses(Path("x.py"), "x = 1\n"))
