"""YAML as far as it says what JSON could: nothing surprising, nothing that runs."""

import re
from typing import Any, ClassVar

import orjson
import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Plain words are text, but for the few that YAML 1.2 and JSON take for something else; so
    `off` stays a word, and 12:30 is no number."""

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
    """The one document. Raises `ValueError` for what is not YAML, or has no JSON."""
    try:
        return orjson.loads(orjson.dumps(_Loader(raw).get_single_data()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"{error.problem}{where}") from None
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
