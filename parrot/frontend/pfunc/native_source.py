"""The source text of a native function, as it travels to ServeCore."""

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def function_source(pyfunc: Callable[..., Any]) -> str:
    """The `def` alone: no decorators, annotations, defaults or indentation.

    Raises `ValueError` for what cannot travel: a lambda, a coroutine, code without source text,
    anything that uses names from outside itself."""
    name = getattr(pyfunc, "__name__", repr(pyfunc))
    if not inspect.isfunction(pyfunc) or name == "<lambda>":
        raise ValueError(f"native function `{name}` must be made with `def`")
    if inspect.iscoroutinefunction(pyfunc) or inspect.isgeneratorfunction(pyfunc):
        raise ValueError(f"native function `{name}` must be a plain function, not async or `yield`")
    definition = _definition(pyfunc)
    definition.decorator_list = []
    definition.returns = None
    definition.args.defaults = []  # the caller fills in defaults
    definition.args.kw_defaults = [None] * len(definition.args.kwonlyargs)
    for arg in ast.walk(definition.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    source = ast.unparse(ast.Module([definition], []))
    if outside := sorted(set(_free_names(source)) - {name}):
        raise ValueError(
            f"native function `{name}` uses `{outside[0]}` from outside itself: it runs alone in "
            "ServeCore, so import inside it and pass values as inputs"
        )
    return source


def _definition(pyfunc: Callable[..., Any]) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(pyfunc))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(
            f"the source text of native function `{pyfunc.__name__}` cannot be found: {error}"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == pyfunc.__name__:
            return node
    raise ValueError(f"native function `{pyfunc.__name__}` must be made with `def`")


def _free_names(source: str) -> Iterator[str]:
    """Names that the code takes from neither itself nor the builtins."""
    tables = list(symtable.symtable(source, "<native function>", "exec").get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()
