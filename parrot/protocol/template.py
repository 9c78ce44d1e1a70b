"""The parser of prompt templates: text with `{{name}}` placeholders."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PLACEHOLDER = re.compile(r"\{\{([a-zA-Z_][a-zA-Z0-9_]*)\}\}")


@dataclass(frozen=True, slots=True)
class TemplateText:
    text: str


@dataclass(frozen=True, slots=True)
class Placeholder:
    name: str


def parse_template(template: str) -> Iterator[TemplateText | Placeholder]:
    """Yield texts and placeholders in order. Texts are not empty, and no two texts are adjacent."""
    end = 0
    for match in _PLACEHOLDER.finditer(template):
        if match.start() > end:
            yield TemplateText(template[end : match.start()])
        yield Placeholder(match.group(1))
        end = match.end()
    if end < len(template):
        yield TemplateText(template[end:])


def placeholder(name: str) -> str:
    """The text of a placeholder in a template."""
    return "{{" + name + "}}"
