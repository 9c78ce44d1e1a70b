"""The limits on values, keys and containers of JSON are checked before it is parsed."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.protocol.bodies import MAX_ESCAPES, MAX_KEYS, MAX_NESTED, MAX_VALUES, JsonMeter
from parrot.protocol.errors import PayloadTooLarge

TEXTS = st.text(alphabet='",:[]{}\\\n a\u00e9')
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


def counted(value: Any) -> list[int]:
    """Return the numbers of commas, colons and opening brackets in the JSON of a value."""
    if isinstance(value, list):
        own, inner = [max(0, len(value) - 1), 0, 1], value
    elif isinstance(value, dict):
        own, inner = [max(0, len(value) - 1), len(value), 1], list(value.values())
    else:
        return [0, 0, 0]
    for one in inner:
        own = [a + b for a, b in zip(own, counted(one), strict=True)]
    return own


@given(JSON, st.lists(st.integers(0, 400), max_size=5), st.booleans())
def test_symbols_outside_strings_are_counted(value: Any, cuts: list[int], is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    meter, start = JsonMeter(), 0
    with patch("parrot.protocol.bodies._MAX_UNREAD", -1):
        for cut in [*sorted(cuts), len(raw)]:
            meter.feed(raw[start:cut])
            start = max(start, cut)
    assert meter._counts == counted(value)


@given(JSON, st.lists(st.integers(0, 400), max_size=5), st.integers(0, 40), st.integers(-1, 400))
def test_the_limit_does_not_depend_on_how_the_body_is_split(
    value: Any, cuts: list[int], most: int, unread: int
) -> None:
    raw = json.dumps(value).encode()
    is_refused, start = False, 0
    meter = JsonMeter()
    with (
        patch("parrot.protocol.bodies._MOST", (most, most, most)),
        patch("parrot.protocol.bodies._MAX_UNREAD", unread),
    ):
        try:
            for cut in [*sorted(cuts), len(raw)]:
                meter.feed(raw[start:cut])
                start = max(start, cut)
        except PayloadTooLarge:
            is_refused = True
    assert is_refused == (max(counted(value)) > most)


@pytest.mark.parametrize(
    ("unit", "most", "what"),
    [
        (b"1,", MAX_VALUES, "values"),
        (b'"a",', MAX_VALUES, "values"),
        (b"[],", MAX_NESTED, "arrays and objects"),
        (b"[", MAX_NESTED, "arrays and objects"),
        (b'"a":1 ', MAX_KEYS, "keys"),
        (b"\\n", MAX_ESCAPES, "escapes"),
    ],
)
def test_each_kind_has_a_limit(unit: bytes, most: int, what: str) -> None:
    JsonMeter().feed(unit * most)
    with pytest.raises(PayloadTooLarge, match=f"more than {most} {what}"):
        JsonMeter().feed(unit * (most + 1))


def test_symbols_in_strings_are_not_counted() -> None:
    JsonMeter().feed(b'{"text": "' + b'well, [so] {it}: \\"goes\\", on' * 200_000 + b'"}')
