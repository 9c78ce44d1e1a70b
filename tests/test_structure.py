"""Limits on the size of code: of files, classes, functions, constructors and dependencies of a
module. Public class names are unique.

The limits are generous. When one is exceeded, improve the design, or record an exception with its
reason in `structure.toml`. Do not split code only to pass this test. tests/journey limits the
length of the request path."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.closure import closure_lines
from tests.support.syntax import num_code_lines, parsed, statements

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("parrot", "benchmark") for path in (ROOT / top).rglob("*.py"))
PACKAGE_FILES = [path for path in FILES if path.is_relative_to(ROOT / "parrot")]
LIMITS = tomllib.loads(Path(__file__).with_name("structure.toml").read_text())

MAX_FILE_LINES = 800
MAX_CLASS_LINES = 450
MAX_FUNCTION_LINES = 60  # Except kernels, which cannot be split.
MAX_CONSTRUCTOR_PARAMETERS = 7
ODD_BEGINNING = re.compile(r"(Of|That|So|What|Whoever)\b|None:")  # not a sentence


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def alarms(name: str, source: str) -> Iterator[str]:
    """Yield the exceeded limits of one file as `file: what`."""
    tree = parsed(source)
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{name}: {lines} lines"
    for node in statements(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if length(node) > MAX_FUNCTION_LINES and "kernels" not in name:
                    yield f"{name}: {node.name} has {length(node)} lines"
            case ast.ClassDef():
                if length(node) > MAX_CLASS_LINES:
                    yield f"{name}: {node.name} has {length(node)} lines"
                yield from (f"{name}: {excess}" for excess in constructor_excesses(node))


def constructor_excesses(node: ast.ClassDef) -> Iterator[str]:
    """Yield a class whose constructor has too many parameters. `**` in `__init__` is also reported,
    since it hides their number. Fields of a mutable dataclass count. Fields of a frozen dataclass
    do not, because it is a value."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any("dataclass" in text and "frozen=True" not in text for text in decorators):
        fields = [
            field
            for field in node.body
            if isinstance(field, ast.AnnAssign)
            and "ClassVar" not in ast.unparse(field.annotation)
            and "init=False" not in ast.unparse(field)
        ]
        if len(fields) > MAX_CONSTRUCTOR_PARAMETERS:
            yield f"{node.name} takes {len(fields)} parameters"
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            arguments = method.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if len(names) - 1 > MAX_CONSTRUCTOR_PARAMETERS:
                yield f"{node.name} takes {len(names) - 1} parameters"
            if arguments.kwarg:
                yield f"{node.name} takes any keyword"


def without_numbers(alarm: str) -> str:
    """Return the alarm in the form of `structure.toml`: without the number, and without the file
    unless the file is too long."""
    file, _, what = re.sub(r"\d+ ", "", alarm).partition(": ")
    return file if what == "lines" else what


def test_alarms() -> None:
    found = [
        alarm
        for path in FILES
        for alarm in alarms(str(path.relative_to(ROOT)), path.read_text())
        if without_numbers(alarm) not in LIMITS["exceptions"]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "alarm"),
    [
        ("x = 1\n" * 801, "x.py: 801 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "x.py: f has 61 lines"),
        ("class C:\n" + "    x = 1\n" * 450, "x.py: C has 451 lines"),
        (
            "class C:\n    def __init__(self, a, b, c, d, *, e, f, g, h): ...\n",
            "x.py: C takes 8 parameters",
        ),
        ("class C:\n    def __init__(self, **a): ...\n", "x.py: C takes any keyword"),
        (
            "@dataclass(slots=True)\nclass C:\n" + "".join(f"    x{i}: int\n" for i in range(8)),
            "x.py: C takes 8 parameters",
        ),
    ],
)
def test_exceeded_limits_are_found(source: str, alarm: str) -> None:
    assert list(alarms("x.py", source)) == [alarm]
    assert not list(alarms("x.py", "x = 1\n"))


@pytest.mark.parametrize(
    "source",
    [
        "class C:\n    def __init__(self, a, b, c, d, *, e, f, g): ...\n",
        "@dataclass(frozen=True)\nclass C:\n" + "".join(f"    x{i}: int\n" for i in range(8)),
        "@dataclass\nclass C:\n    a: int\n"
        + "".join(f"    x{i}: int = field(init=False)\n" for i in range(8)),
    ],
)
def test_code_within_the_limits_has_no_alarm(source: str) -> None:
    assert not list(alarms("x.py", source))


def test_lines_of_code_are_counted_without_explanations() -> None:
    source = '"""A module."""\n\n# A reason.\nx = """\na"""  # And another.\n'
    assert num_code_lines(source) == 2


def test_public_class_names_are_unique() -> None:
    """Except for the names that PFunc exports, because programs use them."""
    files = defaultdict(list)
    for path in PACKAGE_FILES:
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(ROOT)))
    twice = {
        name: found
        for name, found in files.items()
        if len(found) > 1 and name not in LIMITS["names_twice"]
    }
    assert not twice


@pytest.mark.parametrize("part", LIMITS["closures"])
def test_modules_have_few_dependencies(part: str) -> None:
    """Comments and docstrings do not count, so that explanations are free."""
    assert closure_lines(part) <= LIMITS["closures"][part]


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes, functions and assignments."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str()) as text):
                        yield text


def odd_docstrings(source: str) -> Iterator[str]:
    for text in docstrings(parsed(source)):
        if ODD_BEGINNING.match(str(text.value)):
            yield f"{text.lineno}: {str(text.value).partition(chr(10))[0]}"


def test_docstrings_begin_like_sentences() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{odd}"
        for path in PACKAGE_FILES
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
