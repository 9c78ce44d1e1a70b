"""Markdown tables, and the pages that contain them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Table = Callable[..., str]
Cell = str | float | int | None

_MARKED = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A Markdown table. `None` is an empty cell. Floats are shown with three digits."""
    lines = [heads, ["---"] * len(heads), *([shown(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return digits(cell) if isinstance(cell, float) else str(cell)


def digits(value: float, count: int = 3) -> str:
    """At least `count` significant digits, without an exponent, and all digits before the point."""
    exponent = int(f"{value:.{count - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, count - 1 - exponent)}f}"


def ratio(values: Sequence[float] | None) -> str:
    """The median of a ratio with its minimum and maximum."""
    if values is None:
        return ""
    middle, least, greatest = values
    return f"{middle:.2f} [{least:.2f}-{greatest:.2f}]"


def spread(values: Sequence[float], unit: str = "") -> str:
    """The minimum and the maximum."""
    low, high = digits(min(values)), digits(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def filled(page: str, tables: Mapping[str, Table]) -> str:
    """The page with all marked tables regenerated."""

    def content(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return match[1] + tables[name](*arguments) + match[3]

    return _MARKED.sub(content, page)
