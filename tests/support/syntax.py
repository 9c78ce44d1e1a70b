"""Syntax trees of the project's own files, for the rules that are checked on them."""

import ast
import gc
import io
import tokenize


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source, parsed without garbage collection. CPython before 3.11.8 counts
    the depth of all trees that are under construction in one counter (gh-106905). If a finalizer or
    another thread also parses, the outer parse fails with `SystemError`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()


def walk(tree: ast.AST) -> list[ast.AST]:
    """The nodes of `ast.walk`, except the contexts of names. Takes a third of the time."""
    found = [tree]
    for node in found:  # The list grows.
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return found


def statements(tree: ast.AST) -> list[ast.AST]:
    """The tree and all its statements, handlers and cases. These are a tenth of the nodes."""
    found = [tree]
    for node in found:  # The list grows.
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, name, ())
    return found


def num_code_lines(source: str) -> int:
    """Lines of a source except blank lines, comments and docstrings."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in statements(parsed(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
