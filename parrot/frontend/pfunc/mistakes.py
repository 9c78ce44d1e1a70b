"""Mistakes of a program under `parrot run`: one line instead of a traceback through Parrot's files.

`python program.py` shows the whole traceback."""

import os
import sys
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from parrot.protocol.errors import ParrotError
from parrot.utils.config import ConfigError
from parrot.utils.source_place import PACKAGE, SHORT_ERRORS

_PUBLIC = str(Path(__file__).parent)  # Functions that programs call, and their checks.


def shorten_errors() -> None:
    """Print mistakes as one line, if the environment asks for it."""
    if os.environ.get(SHORT_ERRORS) and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def one_line(error: BaseException, traceback: TracebackType | None) -> str | None:
    """The file, the line and the message; None for an error that may be a defect of Parrot or that
    the program raised itself."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback)]
    if not places:
        return None
    is_refused = isinstance(error, TypeError | ValueError) and places[-1][0].startswith(_PUBLIC)
    if not isinstance(error, ParrotError | ConfigError) and not is_refused:
        return None
    inside = [index for index, (file, _) in enumerate(places) if file.startswith(PACKAGE)]
    if not inside:
        return None
    own = [place for place in places[: inside[-1]] if _is_of_program(place[0])]
    if not own:
        return None
    file, line = own[-1]
    kind = f"{type(error).__name__}: " if isinstance(error, ParrotError) else ""
    return f"{file}, line {line}: {kind}{error}"


def _is_of_program(file: str) -> bool:
    return not file.startswith((PACKAGE, os.path.dirname(os.__file__), "<"))


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = one_line(error, trace)
    if line is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(line, file=sys.stderr)  # noqa: T201
