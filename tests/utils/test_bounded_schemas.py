"""Bounds of schemas: a bounded schema allows a subset of the original's values."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.utils.bounded_schemas import bounded_schema

STRING: dict[str, Any] = {"type": "string"}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": STRING, "inner": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
}


def of(schema: dict[str, Any], max_tokens: int = 300) -> Any:
    """Return the bounded schema of one property."""
    whole = {"type": "object", "properties": {"it": schema}, "$defs": {"node": NODE}}
    return bounded_schema(whole, max_tokens)["properties"]["it"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 5000},
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "email"},
        {"enum": ["a" * 100, 1]},
        {"const": [1, 2]},
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 3},
        {"type": "number", "minimum": 0.25, "maximum": 0.5},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"$ref": "#/$defs/node"},
    ],
)
def test_a_bound_that_exists_is_kept(schema: dict[str, Any]) -> None:
    assert of(schema) == schema


def test_free_values_receive_bounds() -> None:
    assert 200 < of(STRING)["maxLength"] < 300
    assert of({"type": "string", "minLength": 999})["maxLength"] == 999
    assert of({"type": "integer", "minimum": 10**20}) == {"type": "integer", "minimum": 10**20}
    many = of({"type": "array", "items": STRING, "minItems": 40})
    assert many["maxItems"] == 40
    assert many["items"]["maxLength"] == 16
    assert of({"type": "object", "properties": {"a": STRING}})["additionalProperties"] is False
    assert of({"type": ["string", "null"]})["maxLength"]
    assert of({"anyOf": [STRING, {"type": "null"}]})["anyOf"][0]["maxLength"]


def test_properties_of_merged_schemas_stay_possible() -> None:
    parts = [{"type": "object", "properties": {name: STRING}} for name in "ab"]
    assert all("additionalProperties" not in part for part in of({"allOf": parts})["allOf"])


@pytest.mark.parametrize("max_tokens", [1, 30, 100, 400, 16384])
@pytest.mark.parametrize("num_strings", [1, 5, 100])
def test_the_limit_is_shared_by_all_strings(num_strings: int, max_tokens: int) -> None:
    properties = {f"p{i}": STRING for i in range(num_strings)}
    bounded = bounded_schema({"type": "object", "properties": properties}, max_tokens)
    lengths = {inner["maxLength"] for inner in bounded["properties"].values()}
    (length,) = lengths
    assert length == 16 or (length + 6) * num_strings <= max_tokens


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": "x"},
        {"type": 3},
        {"properties": [1]},
        {"enum": 3},
        {"type": "object", "required": 3},
        {"$defs": 3},
        {"$ref": {}},
    ],
)
def test_a_malformed_schema_is_left_to_the_engine(schema: dict[str, Any]) -> None:
    bounded_schema(schema, 100)


BASE = st.sampled_from(
    [STRING, {"type": "integer"}, {"type": "number"}, {"enum": ["a", 1]}, {"type": "boolean"}, {}]
)
SCHEMAS = st.recursive(
    BASE,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(
            lambda named: {"type": "object", "properties": named},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        st.builds(lambda value: {"type": "object", "additionalProperties": value}, inner),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.text(max_size=40), st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(SCHEMAS, VALUES, st.integers(1, 500))
def test_a_bounded_schema_allows_a_subset(
    schema: dict[str, Any], value: Any, max_tokens: int
) -> None:
    bounded = bounded_schema(schema, max_tokens)
    jsonschema.Draft202012Validator.check_schema(bounded)
    if jsonschema.Draft202012Validator(bounded).is_valid(value):
        jsonschema.validate(value, schema)
