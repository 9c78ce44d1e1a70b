"""Rewrites JSON schemas so that llguidance enforces them exactly, or rejects them.

llguidance rejects keywords that it does not know, but enforces some known ones only loosely. This
module rewrites or rejects those:

    keys with escapes     {"\\u0061": 1} equals {"a": 1} but would bypass `properties`: forbidden
    `minProperties`       llguidance counts a repeated key twice: rejected beyond `required`
    exclusive bounds      0 would pass `exclusiveMinimum: 0` with `maximum: 0.5`: rejected
    dates and times       30 February and any leap second would pass: replaced by exact patterns
    `pattern`             ECMA's `.`, `\\s` and `[a[b]` differ in Rust: rewritten
    `x-guidance`          would switch the enforcement off: rejected

White space between JSON tokens is limited to one space, or a line break with its indentation.
Otherwise an uncertain model could generate spaces until the maximum output length."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_DEPTH = 64

Json = dict[str, Any]

_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)

_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_EXCLUDING = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# Characters that JSON can only write as \\uXXXX.
_UNWRITTEN = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01][0-9a-f]|7f)")

_SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_AS_RUST = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_ANY = r"[^\n\r\u2028\u2029]"
_GAP = r"( |\r?\n[ \t]{0,32})"
_LOOSE: Json = {"whitespace_pattern": _GAP}
_TIGHT: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PART = re.compile(r"\\.|\(\?[a-zA-Z-]+[:)]|\[\^?|.", re.DOTALL)


def exact_schema(
    schema: Mapping[str, Any], max_values: int, *, lenient: bool = False, is_tight: bool = False
) -> Json:
    """A schema for the same values, or a subset, that llguidance enforces exactly.

    `lenient`: drop keywords that llguidance cannot enforce. `is_tight`: white space is as in
    `json.dumps`. Raises `ValueError` with the keyword if the schema cannot be enforced, and for a
    schema of more than `max_values` values."""
    check_size(schema, max_values)
    if "x-guidance" in schema:
        raise ValueError("`x-guidance` is not a keyword of schemas")
    options: Json = {"json_allowed_escapes": 'bfnrt"\\', **(_TIGHT if is_tight else _LOOSE)}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
        return {**_lenient(schema), "x-guidance": options}
    _check_bounds(schema)
    return {**_exact(schema), "x-guidance": options}


def check_size(value: Any, max_values: int) -> None:
    """Raises `ValueError` if the JSON is nested more than `MAX_DEPTH` levels deep, or has more than
    `max_values` values."""
    level: Sequence[Any] = [value]
    num_values = 0
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        num_values += len(level)
        if num_values > max_values:
            raise ValueError(f"it has more than {max_values} values")
        level = [inner for outer in level for inner in _inner(outer)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _inner(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_bounds(schema: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an exclusive bound less than 1 from another bound, because llguidance
    would accept the excluded bound. Where schemas are combined, all bounds are compared."""
    nodes = [*_nodes(schema)]
    together = any(not _COMBINING.isdisjoint(node) for node in nodes)
    for group in [nodes] if together else [[node] for node in nodes]:
        for keyword, others in _EXCLUDING.items():
            for bound in _numbers(group, (keyword,)):
                if any(abs(bound - other) < 1 for other in _numbers(group, others)):
                    raise ValueError(f"`{keyword}` must differ from other bounds by at least 1")


def _nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
    for inner in _inner(value):
        yield from _nodes(inner)


def _numbers(nodes: Sequence[Json], keywords: Sequence[str]) -> list[float]:
    found = [node.get(keyword) for node in nodes for keyword in keywords]
    return [value for value in found if isinstance(value, int | float)]


def _exact(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return [_exact(inner) for inner in schema] if isinstance(schema, list) else schema
    made = _rewritten(schema, _exact)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        made["pattern"] = rust_pattern(pattern)
    by_pattern = made.get("patternProperties")
    if isinstance(by_pattern, dict):
        made["patternProperties"] = {rust_pattern(key): by_pattern[key] for key in by_pattern}
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > (len(required) if isinstance(required, list) else 0):
        raise ValueError("`minProperties` is not supported beyond the `required` properties")
    for keyword in ("enum", "const"):
        if _UNWRITTEN.search(json.dumps(schema.get(keyword))):
            raise ValueError(f"`{keyword}` has a control character")
    if schema.get("enum") == []:
        raise ValueError("`enum` is empty")
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        del made["format"]
        also = made.get("allOf")
        exact = {"pattern": _FORMATS[form]}
        made["allOf"] = [*also, exact] if isinstance(also, list) else [exact]
    return made


def _lenient(schema: Any) -> Any:
    """The schema without keywords that llguidance enforces only partly."""
    if not isinstance(schema, dict):
        return [_lenient(inner) for inner in schema] if isinstance(schema, list) else schema
    made = _rewritten(schema, _lenient)
    for keyword in ("pattern", "patternProperties", "format", "minProperties", "maxProperties"):
        made.pop(keyword, None)
    return made


def _rewritten(schema: Json, rewrite: Callable[[Any], Any]) -> Json:
    """The schema with all inner schemas rewritten."""
    made: Json = {}
    for key, value in schema.items():
        if key in _DATA:
            made[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            made[key] = {name: rewrite(inner) for name, inner in value.items()}
        else:
            made[key] = rewrite(value)
    return made


def rust_pattern(pattern: str) -> str:
    """An ECMA regular expression in the syntax of Rust's `regex`. Raises `ValueError` for syntax
    that has another meaning in Rust and is not translated."""
    made: list[str] = []
    is_class = False
    parts = _PART.findall(pattern)
    for i, part in enumerate(parts):
        following = parts[i + 1] if i + 1 < len(parts) else ""
        if part in (r"\A", r"\z", r"\a") or (part[:2] == "(?" and part[2:-1] != "i"):
            raise ValueError(f"`pattern` has `{part}`, which is not ECMA's")
        if part[0] == "\\":
            made.append(_AS_RUST.get(part, part))
        elif not is_class:
            is_class = part[0] == "["
            if is_class and following == "]":
                raise ValueError("`pattern` has a class that begins with `]`")
            made.append(_ANY if part == "." else part)
        elif part == "-" and following == "-":
            raise ValueError("`pattern` has `--` in a class")
        else:
            is_class = part != "]"
            escaped = {"[": r"\[", "[^": r"\[\^", "&": r"\&", "~": r"\~"}
            made += escaped.get(part, part)
    return "".join(made)
