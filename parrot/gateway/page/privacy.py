"""Rows without texts, for visitors without the right to see values of tenants."""

from collections.abc import Mapping
from typing import Any

from parrot.gateway.page.feed import Rows

Row = Mapping[str, Any]
_TEXTS = frozenset({"words", "error", "head"})  # Fields with texts of prompts, values or errors.


def without_texts(rows: Rows) -> Rows:
    """The rows without fields that contain texts. An error keeps its type. A remark on a prefix
    keeps its place, without the excerpts of the prompts."""
    return {key: hidden(row) for key, row in rows.items()}


def hidden(row: Row) -> Row:
    """The row without texts."""
    errors, remark = row.get("errors"), row.get("remark")
    if errors is None and remark is None and _TEXTS.isdisjoint(row):
        return row
    shown = {name: value for name, value in row.items() if name not in _TEXTS}
    if errors is not None:
        shown["errors"] = [{"type": error["type"], "message": ""} for error in errors]
    if remark is not None:  # "prefix: WHERE: EXCERPTS"
        shown["remark"] = ": ".join(remark.split(": ", 2)[:2])
    return shown
