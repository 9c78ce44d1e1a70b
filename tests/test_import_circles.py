"""The files of the package have no import cycles, including imports in functions."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.support.syntax import parsed, statements

ROOT = Path(__file__).parents[1]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(source: str, files: set[str]) -> set[str]:
    """Return the files of the package that a file imports, including imports in functions and for
    type checkers. The name of a submodule means its file, not the `__init__` of the package."""
    found: set[str] = set()
    for node in statements(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in files else node.module)
    return found & files


def circle(sources: dict[str, str]) -> list[str]:
    """Return the files of one cycle, or an empty list."""
    files = set(sources)
    sorter = TopologicalSorter({n: imports(text, files) - {n} for n, text in sources.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_there_is_no_circle() -> None:
    paths = (ROOT / "parrot").rglob("*.py")
    sources = {module_name(path, ROOT): path.read_text() for path in paths}
    assert not (found := circle(sources)), " -> ".join(found)


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    sources = {
        "p": "",
        "p.a": "from p.b import B\n",
        "p.b": "if TYPE_CHECKING:\n    from p import c\n",
        "p.c": "def f():\n    import p.a\n",
    }
    assert set(circle(sources)) == {"p.a", "p.b", "p.c"}
    assert not circle(sources | {"p.c": ""})
