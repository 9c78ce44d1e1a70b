"""Random JSON schemas with most keywords of the standard."""

import random
from typing import Any

Json = dict[str, Any]

NAMES = [
    "a",
    "b",
    "name",
    "größe",
    "名前",
    'quo"te',
    "back\\slash",
    "two words",
    "$ref",
    "a.b",
    "😀",
]
TEXTS = ["", "x", "ja", "zwölf", "🟦", 'say "no"', "a\\b", "line\nbreak", "\t", "<tool_call>"]
PATTERNS = ["^[A-Z]{2}-[0-9]{3}$", "a+b", "^(yes|no)$", r"^\d{1,4}$", r"^\w+ \S$", "^.{2}$",
            "[é-ü]", "(?=a)b"]  # fmt: skip
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "regex"]
HARD: list[Json] = [
    {"uniqueItems": True},
    {"not": {"type": "string"}},
    {"contains": {"const": 1}},
    {"propertyNames": {"maxLength": 2}},
    {"if": {"type": "object"}, "then": {"required": ["z"]}},
    {"dependentRequired": {"a": ["b"]}},
    {"minProperties": 1},
    {"maxProperties": 2},
    {"enum": []},
    {"unevaluatedProperties": False},
]


class Schemas:
    """Draws random schemas of bounded size."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> Json:
        """A random schema with two definitions that it may use."""
        definitions = {name: self.schema(2, ()) for name in ("d1", "d2")}
        schema = self.schema(4, (*definitions,))
        if self.rng.random() < 0.2:
            schema = self.linked(schema)
        return {**schema, "$defs": {**schema.get("$defs", {}), **definitions}}

    def linked(self, value: Json) -> Json:
        """The schema of a linked list of values, by recursion."""
        rest = {"anyOf": [{"$ref": "#/$defs/l"}, {"const": None}]}
        link = {
            "type": "object",
            "properties": {"value": value, "next": rest},
            "required": ["value", "next"],
        }
        return {"$ref": "#/$defs/l", "$defs": {"l": link}}

    def schema(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        kinds = [self.text, self.number, self.integer, self.constant, self.simple]
        if depth:
            kinds += [self.array, self.object, self.object, self.union] * 2
        if definitions and rng.random() < 0.1:
            return {"$ref": f"#/$defs/{rng.choice(definitions)}"}
        made = rng.choice(kinds)(depth, definitions)
        if rng.random() < 0.03:
            made |= rng.choice(HARD)
        if rng.random() < 0.1:
            made |= {"description": "what it is", "default": {"pattern": "["}, "title": "T"}
        return made

    def simple(self, depth: int, definitions: tuple[str, ...]) -> Json:
        kinds = ["null", "boolean", "string", "integer", "number"]
        return {"type": self.rng.choice([*kinds, self.rng.sample(kinds, 2)])}

    def text(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        made: Json = {"type": "string"}
        match rng.randrange(5):
            case 0:
                made["pattern"] = rng.choice(PATTERNS)
            case 1:
                made["format"] = rng.choice(FORMATS)
            case 2:
                made |= {"minLength": rng.randrange(3), "maxLength": rng.randrange(2, 9)}
            case 3:
                made |= {"pattern": "^[a-z😀]*$", "maxLength": rng.randrange(9)}
        return made

    def number(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        low = rng.choice([-10.5, -1, 0, 0.25, 3])
        high = low + rng.choice([-1, 0, 0.5, 1, 7])
        bounds = {
            rng.choice(["minimum", "exclusiveMinimum"]): low,
            rng.choice(["maximum", "exclusiveMaximum"]): high,
        }
        chosen = rng.sample(sorted(bounds), rng.randrange(3))
        return {"type": "number"} | {key: bounds[key] for key in chosen}

    def integer(self, depth: int, definitions: tuple[str, ...]) -> Json:
        made = self.number(depth, definitions) | {"type": "integer"}
        if self.rng.random() < 0.3:
            made["multipleOf"] = self.rng.choice([2, 3, 10])
        return made

    def constant(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        values: list[Any] = [
            *rng.sample(TEXTS, 3),
            None,
            True,
            -1,
            2.5,
            {"k": [1, "é"]},
            [],
            10**15,
        ]
        if rng.random() < 0.3:
            return {"const": rng.choice(values)}
        return {"enum": rng.sample(values, rng.randrange(1, 5))}

    def array(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        made: Json = {"type": "array", "maxItems": rng.randrange(4)}
        if rng.random() < 0.5:
            made["minItems"] = rng.randrange(3)
        if rng.random() < 0.3:
            made["prefixItems"] = [self.schema(depth - 1, definitions) for _ in range(2)]
        if rng.random() < 0.8:
            made["items"] = rng.choice([False, self.schema(depth - 1, definitions)])
        return made

    def object(self, depth: int, definitions: tuple[str, ...]) -> Json:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(4))
        made: Json = {"type": "object", "properties": {}}
        for name in names:
            made["properties"][name] = self.schema(depth - 1, definitions)
        made["required"] = [name for name in names if rng.random() < 0.7]
        match rng.randrange(6):
            case 0:
                made["additionalProperties"] = self.schema(0, definitions)
            case 1:
                made["patternProperties"] = {"^x_": self.schema(0, definitions)}
            case 2 | 3 | 4:
                made["additionalProperties"] = False
        return made

    def union(self, depth: int, definitions: tuple[str, ...]) -> Json:
        options = [self.schema(depth - 1, definitions) for _ in range(self.rng.randrange(1, 4))]
        return {self.rng.choice(["anyOf", "anyOf", "oneOf", "allOf"]): options}
