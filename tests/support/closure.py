"""The number of lines of code that a part of the package depends on."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.syntax import num_code_lines, parsed

ROOT = Path(__file__).parents[2]


def closure_lines(part: str) -> int:
    """Lines of code of all modules of the package that the module or package `part` reaches by
    imports. Imports in function bodies count. Imports for type checkers alone do not."""
    pending = [file for file in _files() if file == part or file.startswith(part + ".")]
    assert pending, part
    reached = set(pending)
    while pending:
        for module in _imports(pending.pop()) - reached:
            reached.add(module)
            pending.append(module)
    return sum(map(_lines, reached))


@cache
def _files() -> dict[str, Path]:
    """The path of each module, by its dotted name. A package is its `__init__`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "parrot").rglob("*.py")
    }


@cache
def _lines(module: str) -> int:
    return num_code_lines(_files()[module].read_text())


@cache
def _imports(module: str) -> frozenset[str]:
    found = set()
    for node in _executed(parsed(_files()[module].read_text())):
        match node:
            case ast.Import():
                found |= {name.name for name in node.names}
            case ast.ImportFrom(module=str(source)):
                found |= {source, *(f"{source}.{name.name}" for name in node.names)}
    return frozenset(found & _files().keys())


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except the code below `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (inner for other in node.orelse for inner in (other, *_executed(other)))
            continue
        yield node
        yield from _executed(node)
