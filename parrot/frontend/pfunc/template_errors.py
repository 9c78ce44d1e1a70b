"""Errors of templates. They show the wrong line, like tracebacks.

the template names `topc`, which is no parameter: did you mean `topic`?
  File "program.py", line 12
    Tell a joke about {{topc}}: {{joke}}
                      ^^^^^^^^
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

_MAX_WIDTH = 100  # Characters of a line that are shown.
_AFTER_NAME = r"\b\s*(?=[:,=)\n]|$)"


class TemplateError(ValueError):
    """An invalid template. [start, end) is the wrong range of its text. If a parameter has no
    placeholder, `parameter` is its name instead."""

    def __init__(
        self, problem: str, template: str, start: int = 0, end: int = 0, *, parameter: str = ""
    ) -> None:
        self.problem = problem
        self.template = template
        self.range = start, end
        self.parameter = parameter
        super().__init__(self.shown(None))

    def shown(self, pyfunc: Callable[..., Any] | None) -> str:
        """The problem and the wrong line: from the source of `pyfunc`, whose docstring is the
        template, or else from the template."""
        if self.parameter:
            return self.problem + parameter_line(pyfunc, self.parameter)
        return self.problem + template_line(pyfunc, self.template, *self.range)


def template_line(pyfunc: Callable[..., Any] | None, template: str, start: int, end: int) -> str:
    """A line break and the line with this range of a template."""
    begin = template.rfind("\n", 0, start) + 1
    line = template[begin:].partition("\n")[0]
    width = min(end, begin + len(line)) - start
    number = template.count("\n", 0, start)
    twins = sum(line.strip() in other for other in template.split("\n")[:number])
    for place, source in _source_lines(pyfunc):
        if line.strip() in source:
            if not twins:
                column = source.index(line.strip()) + start - begin - _indent(line)
                return _pointed(place, source, column, width)
            twins -= 1
    return _pointed(f"template, line {number + 1}", line, start - begin, width)


def parameter_line(pyfunc: Callable[..., Any] | None, name: str) -> str:
    """A line break and the line of the signature with this parameter. Empty if unknown."""
    for place, source in _source_lines(pyfunc):
        if found := re.search(rf"(?<=[(,\s]){re.escape(name)}{_AFTER_NAME}", source):
            return _pointed(place, source, found.start(), len(name))
    return ""


def _source_lines(pyfunc: Callable[..., Any] | None) -> Sequence[tuple[str, str]]:
    """(location, text) of each line of a function. Empty if its source cannot be found."""
    if pyfunc is None:
        return ()
    try:
        lines, first = inspect.getsourcelines(pyfunc)
        file = inspect.getsourcefile(pyfunc)
    except (OSError, TypeError):
        return ()
    return [(f'File "{file}", line {first + n}', line.rstrip("\n")) for n, line in enumerate(lines)]


def _pointed(place: str, line: str, column: int, width: int) -> str:
    first = max(column - _MAX_WIDTH // 2, 0) if len(line) > _MAX_WIDTH else _indent(line)
    shown = line[first : first + _MAX_WIDTH].rstrip().replace("\t", " ")
    return f"\n  {place}\n    {shown}\n    {' ' * (column - first)}{'^' * max(width, 1)}"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
