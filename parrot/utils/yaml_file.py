"""YAML files with values that JSON also has. No implicit conversions and no code execution."""

import re
from typing import Any, ClassVar

import orjson
import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types.
    """Plain words are text, except numbers, `true`, `false`, `null` and `~`, as in YAML 1.2. So
    `off` and 12:30 are text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key in keys[:number] and key != "<<":
                mark = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(
                    problem=f"{key!r} is given twice", problem_mark=mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_NUMBER = r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?"
for _tag, _pattern, _starts in (
    ("int", r"[-+]?\d+", "-+0123456789"),
    ("float", _NUMBER, "-+.0123456789"),
    ("bool", "true|false", "tf"),
    ("null", "null|~|", "n~"),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["", *_starts]
    )


def load_yaml(raw: bytes) -> Any:
    """The single document in a YAML file. Raises `ValueError` for invalid YAML and for values that
    JSON does not have."""
    try:
        return orjson.loads(orjson.dumps(_Loader(raw).get_single_data()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"{error.problem}{where}") from None
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
