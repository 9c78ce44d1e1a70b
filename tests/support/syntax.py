"""Syntax trees of the project's own files, for the rules that are checked on them."""

import ast
import gc


def parsed(source: str) -> ast.Module:
    """The tree of a source, made without a garbage collection. CPython before 3.11.8 counts the
    depth of all trees that are being made in one place (gh-106905): a finalizer that parses, as
    those do that print a traceback, or another thread, ends the outer parse in a `SystemError`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
