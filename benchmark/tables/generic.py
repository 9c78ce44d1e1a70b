"""Tables that show the fields of a result file as they are."""

from typing import Any

from benchmark.results import load
from benchmark.tables.markdown import Cell, Row, table


def rows(name: str, key: str, *fields: str) -> str:
    """One line for each row of the list, or for the single object, under `key`. A dot selects a
    field of a nested object."""
    found = load(name)[key]
    lines = [[_field(row, field) for field in fields] for row in _listed(found)]
    return table([field.replace("_", " ").replace(".", ", ") for field in fields], lines)


def pairs(name: str, key: str) -> str:
    """The names and values of an object."""
    return table(["what", "measured"], list(load(name)[key].items()))


def _listed(found: list[Row] | Row) -> list[Row]:
    return found if isinstance(found, list) else [found]


def _field(row: Row, field: str) -> Cell:
    value: Any = row
    for name in field.split("."):
        value = value.get(name)
        if value is None:
            return None
    return f"{value:,}" if isinstance(value, int) else value
