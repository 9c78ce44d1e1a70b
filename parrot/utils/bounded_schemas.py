"""Bounds JSON schemas, so that a model's value ends within a number of tokens.

    {"type": "string"}      {"type": "string", "maxLength": 113}
    {"type": "integer"}     {"type": "integer", "minimum": -999999999999999, ...}
    {"type": "array"}       {"type": "array", "maxItems": 8, "items": ...}

A bounded schema allows a subset of the original's values. Bounds that the schema has are kept."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from parrot.utils.json_schemas import Json

_MIN_LENGTH = 16  # Characters that a free string may always have. More exceeds small limits.
_USUAL_LENGTH = 64  # Below this length arrays become shorter first. Larger: arrays are shorter.
_MAX_ITEMS = 16  # Items of a free array. More leave less space for strings.
_TOKENS_PER_ITEM = 50  # An array may have one item for this number of tokens of the limit.
_ITEM_SHARE = 4  # A string inside an array is this much shorter than one outside.
_NUM_LENGTHS = 32  # Lengths that are tried, for up to 180 strings. More take longer.
_LENGTH_RATIO = 0.85  # Of a length and the one that is tried before it.
_MAX_NUMBER = 10**15 - 1  # The largest free number. Larger ones are not exact in all clients.
_STEP = 1e-6  # Free numbers are multiples of this value. Otherwise their digits have no end.
_CHARS_PER_TOKEN = 2  # Of keys and other text that the schema determines.
_PATTERN_TOKENS = 40  # Assumed tokens of a string with a pattern or format, which has no bound.
_INTEGER_TOKENS = 16
_NUMBER_TOKENS = 24
_KEY_LENGTH = 16  # Characters of a key that the schema does not name.
_KEY = f"^[A-Za-z0-9_.-]{{1,{_KEY_LENGTH}}}$"

_SCALARS = ["string", "number", "boolean", "null"]
_ALL = [*_SCALARS, "array", "object"]
_OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "maxProperties"}
)
_KINDS = {
    "object": _OF_OBJECTS,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}
_CHOICES = frozenset({"anyOf", "oneOf", "$ref"})
_VALUES = frozenset({"enum", "const"})
_DEFINITIONS = ("$defs", "definitions")


class _Limits(NamedTuple):
    length: int  # characters of a free string outside arrays
    items: int  # items of a free array, and properties of a free object


def bounded_schema(schema: Json, max_tokens: int) -> Json:
    """The schema with bounds for strings, numbers, arrays and objects that have none. A value has
    about `max_tokens` tokens at most, if one token of a string has at least one character.

    Patterns, formats and recursive references stay without a bound. A malformed schema is returned
    unchanged."""
    try:
        return _bounded(schema, max_tokens)
    except (AttributeError, TypeError, ValueError):
        return schema


def _bounded(schema: Json, max_tokens: int) -> Json:
    closes = not any(_is_merged(node) for node in _nodes(schema))
    items = max(1, min(max_tokens // _TOKENS_PER_ITEM, _MAX_ITEMS))
    lengths = [int(max_tokens * _LENGTH_RATIO**i) for i in range(_NUM_LENGTHS)]
    tried = [_Limits(length, items) for length in lengths if length > _USUAL_LENGTH]
    while items:
        tried.append(_Limits(_USUAL_LENGTH, items))
        items //= 2
    tried += [_Limits(length, 1) for length in lengths if _MIN_LENGTH < length < _USUAL_LENGTH]
    tried.append(_Limits(_MIN_LENGTH, 1))

    def made(limits: _Limits) -> Json:
        bounded: Json = _Bounds(limits, closes=closes).schema(schema, limits.length)
        return bounded

    def fits(limits: _Limits) -> bool:
        return _Cost(made(limits)).of_schema() <= max_tokens

    longest = bisect_left(tried, True, hi=len(tried) - 1, key=fits)
    return made(tried[longest])


def _nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _nodes(inner)


def _is_merged(node: Json) -> bool:
    """Whether several schemas apply to the same value. Then a property that one of them does not
    name must stay possible."""
    several = node.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    return not _CHOICES.isdisjoint(node) and not _OF_OBJECTS.isdisjoint(node)


def _kinds(node: Json) -> list[str]:
    """The types of a schema's values; empty if other keywords determine them."""
    given = node.get("type")
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    if not (_CHOICES | _VALUES | {"allOf"}).isdisjoint(node):
        return []
    return [kind for kind, keywords in _KINDS.items() if not keywords.isdisjoint(node)][:1] or _ALL


def _numbers(node: Json, *keywords: str) -> list[float]:
    values = [node.get(keyword) for keyword in keywords]
    return [value for value in values if isinstance(value, int | float)]


class _Bounds:
    """Adds the bounds. `closes`: objects allow no properties that their schema does not name."""

    def __init__(self, limits: _Limits, *, closes: bool) -> None:
        self._item_length = max(limits.length // _ITEM_SHARE, _MIN_LENGTH)
        self._items = limits.items
        self._closes = closes

    def schema(self, node: Any, length: int, free: list[str] = _ALL) -> Any:
        """`length`: characters of a free string. `free`: the types of a value without a schema."""
        if node is True:
            node = {}
        if not isinstance(node, dict):
            return node
        made = node | self._parts(node, length)
        kinds = _kinds(node)
        if not _VALUES.isdisjoint(node) or (not self._closes and "type" not in node):
            return made
        if kinds:
            kinds = free if kinds is _ALL else kinds
            made["type"] = kinds[0] if len(kinds) == 1 else kinds
        if "string" in kinds and _VALUES.union(("pattern", "format")).isdisjoint(node):
            made.setdefault("maxLength", max(length, node.get("minLength", 0)))
        if "number" in kinds or "integer" in kinds:
            self._number(made, is_integer="number" not in kinds)
        if "array" in kinds:
            self._array(made)
        if "object" in kinds:
            self._object(made, length)
        return made

    def _parts(self, node: Json, length: int) -> Json:
        """The schemas that a schema combines or defines."""
        parts: Json = {}
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in node:
                parts[keyword] = [self.schema(inner, length) for inner in node[keyword]]
        for keyword in _DEFINITIONS:
            if keyword in node:
                parts[keyword] = self._by_name(node[keyword], length)
        return parts

    def _by_name(self, schemas: Json, length: int) -> Json:
        return {name: self.schema(inner, length) for name, inner in schemas.items()}

    def _item(self, node: Any) -> Any:
        return self.schema(node, self._item_length, _SCALARS)

    def _number(self, made: Json, *, is_integer: bool) -> None:
        lower = _numbers(made, "minimum", "exclusiveMinimum")
        upper = _numbers(made, "maximum", "exclusiveMaximum")
        if not lower and all(value > -_MAX_NUMBER for value in upper):
            made["minimum"] = -_MAX_NUMBER
        if not upper and all(value < _MAX_NUMBER for value in lower):
            made["maximum"] = _MAX_NUMBER
        # A narrow range may have no multiple.
        is_wide = not (lower and upper) or min(upper) - max(lower) >= 1
        if is_wide and not is_integer:
            made.setdefault("multipleOf", _STEP)

    def _array(self, made: Json) -> None:
        items = made.get("items", True)
        made["items"] = [*map(self._item, items)] if isinstance(items, list) else self._item(items)
        first = made.get("prefixItems", ())
        if first:
            made["prefixItems"] = [*map(self._item, first)]
        made.setdefault("maxItems", max(self._items, made.get("minItems", 0), len(first)))

    def _object(self, made: Json, length: int) -> None:
        named, by_pattern = made.get("properties"), made.get("patternProperties")
        if named:
            made["properties"] = self._by_name(named, length)
        if by_pattern:
            made["patternProperties"] = {k: self._item(inner) for k, inner in by_pattern.items()}
        if not self._closes or any(name not in (named or {}) for name in made.get("required", ())):
            return
        others = made.get("additionalProperties", True)
        made["additionalProperties"] = False
        if named is None and not by_pattern and others is not False:
            made["patternProperties"] = by_pattern = {_KEY: self._item(others)}
        if by_pattern:
            least = max(self._items, made.get("minProperties", 0)) + len(named or ())
            made.setdefault("maxProperties", least)


class _Cost:
    """Estimates the tokens of the longest value of a bounded schema."""

    def __init__(self, schema: Json) -> None:
        self._schema = schema
        self._by_reference: dict[str, int] = {}

    def of_schema(self) -> int:
        return self._of(self._schema)

    def _of(self, node: Any) -> int:
        if not isinstance(node, dict):
            return 0
        for keyword in ("const", "enum"):
            if keyword in node:
                values = node[keyword] if keyword == "enum" else [node[keyword]]
                return max((_tokens(json.dumps(value)) for value in values), default=0)
        costs = [self._of_kind(kind, node) for kind in _kinds(node)]
        for keyword in ("anyOf", "oneOf"):
            costs += [self._of(inner) for inner in node.get(keyword, ())]
        if isinstance(reference := node.get("$ref"), str):
            costs.append(self._of_reference(reference))
        return max(costs, default=0) + sum(self._of(inner) for inner in node.get("allOf", ()))

    def _of_reference(self, reference: str) -> int:
        if reference not in self._by_reference:
            self._by_reference[reference] = 0  # A recursive reference is not counted again.
            name = reference.rpartition("/")[2]
            found = [self._schema[key].get(name) for key in _DEFINITIONS if key in self._schema]
            self._by_reference[reference] = max(map(self._of, found), default=0)
        return self._by_reference[reference]

    def _of_kind(self, kind: str, node: Json) -> int:
        match kind:
            case "string":
                length: int = node.get("maxLength", _PATTERN_TOKENS)
                return length + 2
            case "integer":
                bounds = [node.get("minimum", _MAX_NUMBER), node.get("maximum", _MAX_NUMBER)]
                return min(max(len(str(bound)) for bound in bounds), _INTEGER_TOKENS)
            case "number":
                return _NUMBER_TOKENS
            case "array":
                items = node.get("items")
                inner = [*items] if isinstance(items, list) else [items]
                longest = max(map(self._of, [*inner, *node.get("prefixItems", ())]), default=0)
                return int(node.get("maxItems", 0)) * (longest + 1) + 2
            case "object":
                return 2 + self._of_properties(node)
        return 2

    def _of_properties(self, node: Mapping[str, Any]) -> int:
        named = node.get("properties") or {}
        cost = sum(_tokens(name) + 3 + self._of(inner) for name, inner in named.items())
        if others := node.get("patternProperties"):
            longest = _KEY_LENGTH + 4 + max(map(self._of, others.values()))
            cost += int(node.get("maxProperties", 0)) * longest
        return cost


def _tokens(text: str) -> int:
    return -(-len(text) // _CHARS_PER_TOKEN)
