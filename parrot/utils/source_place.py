"""Where the code of a program calls Parrot, for messages about mistakes."""

import ast
import linecache
import sys
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])
"""The folder of Parrot's own code."""
SHORT_ERRORS = "PARROT_SHORT_ERRORS"
"""The environment variable with which `parrot run` has programs print mistakes as one line."""


def annotated_output() -> str:
    """The semantic function and the output whose annotation the program evaluates now, before a
    message; empty if the program does something else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return ""
    try:
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        tree = ast.parse("".join(lines))
    except SyntaxError:  # not Python, such as a cell of a notebook with magic commands
        return ""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            about = f"semantic function `{function.name}`: "
            given = function.args
            for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if _covers(parameter.annotation, frame.f_lineno):
                    return f"{about}output `{parameter.arg}`: "
            if _covers(function.returns, frame.f_lineno):
                return about
    return ""


def _covers(annotation: ast.expr | None, line: int) -> bool:
    return annotation is not None and annotation.lineno <= line <= (annotation.end_lineno or 0)
