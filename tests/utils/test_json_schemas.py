"""Rewritten schemas have the same meaning and can be enforced exactly."""

import re
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.utils.json_schemas import MAX_DEPTH, check_size, exact_schema, rust_pattern

DATE = exact_schema({"format": "date"}, 10)["allOf"][0]["pattern"]


@given(st.integers(0, 9999), st.integers(0, 13), st.integers(0, 32))
def test_only_valid_dates_are_allowed(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        date.fromisoformat(text)
    except ValueError:
        assert not re.search(DATE, text)
    else:
        assert re.search(DATE, text)


@pytest.mark.parametrize(
    ("pattern", "rust"),
    [
        ("a.b", r"a[^\n\r\u2028\u2029]b"),
        (r"a\.b", r"a\.b"),
        ("[.]", "[.]"),
        (r"[\]]", r"[\]]"),
        ("[a[]", r"[a\[]"),
        ("[[^a]", r"[\[\^a]"),
        ("[^[a&~]", r"[^\[a\&\~]"),
        ("(?:a)(?i:b)", "(?:a)(?i:b)"),
    ],
)
def test_patterns(pattern: str, rust: str) -> None:
    assert rust_pattern(pattern) == rust


def test_only_schemas_are_rewritten() -> None:
    schema = {
        "properties": {"pattern": {"type": "string"}, "format": {"pattern": "."}},
        "enum": [{"pattern": "."}],
        "components": {"x": {"format": "date"}},
    }
    made = exact_schema(schema, 100)
    assert made["enum"] == schema["enum"]
    assert made["properties"]["pattern"] == {"type": "string"}
    assert made["properties"]["format"] == {"pattern": rust_pattern(".")}
    assert made["components"]["x"] == {"allOf": [{"pattern": DATE}]}


def test_lenient_schemas_keep_supported_keywords() -> None:
    schema = {"properties": {"pattern": {"pattern": "(?=a)", "type": "string"}}, "minProperties": 3}
    made = exact_schema(schema, 100, lenient=True)
    assert made.pop("x-guidance")["lenient"] is True
    assert made == {"properties": {"pattern": {"type": "string"}}}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_sizes_are_bounded() -> None:
    check_size(nested(MAX_DEPTH - 1), 100)
    with pytest.raises(ValueError, match="levels deep"):
        check_size(nested(MAX_DEPTH), 100)
    with pytest.raises(ValueError, match="more than 100 values"):
        check_size([0] * 100, 100)
