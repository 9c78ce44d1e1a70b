"""Write the signatures and docstrings of the names in `parrot.P` into docs/python_api.md.

    python docs/generate_pfunc_reference.py

The script keeps the first part of the page, which has the tables of options and errors."""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from parrot import P
from parrot.frontend.pfunc.function import PyNativeFunction, SemanticFunction

_WIDTH = 90
PAGE = Path(__file__).parent / "python_api.md"
# The text above this line of the page is written by hand.
MARK = (
    "<!-- Generated below this line by docs/generate_pfunc_reference.py: change the docstrings. -->"
)
# Each name of `P.__all__` is in one section.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Making functions": (
        "semantic_function",
        "native_function",
        "Input",
        "Output",
        "Returns",
        "SamplingConfig",
        "Parameter",
        "ParamType",
    ),
    "Prompts": ("standard_formatter", "allowing_newline", "chat_template", "vicuna_template"),
    "Variables": ("SemanticVariable", "variable", "PerformanceCriteria"),
    "Many variables": (
        "gather",
        "agather",
        "as_completed",
        "aas_completed",
        "first_k",
        "afirst_k",
        "any_of",
        "aany_of",
    ),
    "Sessions": ("VirtualMachine",),
    "Tools": ("tool", "Tool", "Agent", "AgentRun", "ToolCall", "MaxTurnsExceeded"),
    "Errors": ("errors",),
}
# The classes that the decorators return have no name in `P`, but programs call their methods.
MADE = {"semantic_function": SemanticFunction, "native_function": PyNativeFunction}
# Instances of one class, which cannot have docstrings of their own.
VALUES = {
    "standard_formatter": "The default formatter. It removes the indentation of the docstring and "
    "joins its lines to one line.",
    "allowing_newline": "A formatter that removes the indentation and keeps the lines.",
}
# Methods that only the front end calls.
INTERNAL = {"attach", "settle", "live_session", "registered_id", "session", "with_template"}
INTERNAL |= {
    "with_metadata",
    "locations",
    "to_template_str",
    "transform",
    "display_signature",
    "line_of",
    "turns",
}


def pages() -> dict[Path, str]:
    """The path of the page and its current text."""
    return {PAGE: page()}


def page() -> str:
    missing = set(P.__all__).symmetric_difference(name for s in SECTIONS.values() for name in s)
    if missing:
        raise KeyError(f"in only one of P and SECTIONS: {sorted(missing)}")
    head, mark, _ = PAGE.read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} has no line {MARK!r}")
    parts = [head + MARK + "\n"]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += entry(name, getattr(P, name))
    return "\n".join(parts)


def entry(name: str, value: Any) -> Iterator[str]:
    """The paragraphs about one name of `P`."""
    yield f"### `P.{name}`\n"
    if inspect.ismodule(value):
        yield "The module `parrot.errors`: the [error classes](#error-classes).\n"
    elif inspect.isfunction(value):
        yield from callable_entry(f"P.{name}", value)
        if name in MADE:
            yield "The function has these methods:\n"
            yield methods(MADE[name])
    elif isinstance(value, type):
        yield from class_entry(name, value)
    else:
        yield VALUES.get(name, text_of(type(value))) + "\n"


def class_entry(name: str, cls: type) -> Iterator[str]:
    yield text_of(cls) + "\n"
    if issubclass(cls, Enum):
        yield ", ".join(f"`P.{name}.{member.name}`" for member in cls) + "\n"
    elif issubclass(cls, BaseModel):
        fields = "\n".join(f"{key}: {default_of(cls, key)}" for key in cls.model_fields)
        yield f"Its fields, with their defaults:\n\n```\n{fields}\n```\n"
    elif "__init__" in vars(cls):
        made: Any = vars(cls)["__init__"]
        yield from callable_entry(f"P.{name}", made)
        if found := methods(cls):
            yield found


def callable_entry(name: str, function: Any) -> Iterator[str]:
    yield f"```\n{signature(name, function)}\n```\n"
    if text := text_of(function):
        yield text + "\n"


def methods(cls: type) -> str:
    """A table of the public methods and properties, including inherited ones, in source order."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        if base.__module__.startswith("parrot."):
            found.update(vars(base))
    rows = [
        f"| `{heading(name, value)}` | {cell(text_of(value))} |"
        for name, value in found.items()
        if not name.startswith("_")
        and name not in INTERNAL
        and (isinstance(value, property) or inspect.isfunction(value))
    ]
    return "\n".join(["| method | |", "| --- | --- |", *rows]) + "\n" if rows else ""


def heading(name: str, value: Any) -> str:
    return cell(name if isinstance(value, property) else signature(name, value, types=False))


def signature(name: str, function: Any, *, types: bool = True) -> str:
    """The call without `self`. A long call has one parameter per line."""
    form = inspect.signature(function)
    shown = [param for key, param in form.parameters.items() if key != "self"]
    if not types:
        shown = [param.replace(annotation=inspect.Parameter.empty) for param in shown]
    parts = [readable(str(param)) for param in _with_marks(shown)]
    end = ""
    if types and form.return_annotation not in (inspect.Signature.empty, None):
        end = " -> " + readable(inspect.formatannotation(form.return_annotation)).strip("'")
    name = "await " * inspect.iscoroutinefunction(function) + name
    line = f"{name}({', '.join(parts)}){end}"
    if not types or len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def _with_marks(shown: list[inspect.Parameter]) -> Iterator[Any]:
    """The parameters, with `*` before the first keyword-only parameter."""
    is_marked = False
    for param in shown:
        if param.kind is param.VAR_POSITIONAL:
            is_marked = True
        if param.kind is param.KEYWORD_ONLY and not is_marked:
            is_marked = True
            yield "*"
        yield param


def readable(text: str) -> str:
    """Annotations and defaults as in source code."""
    text = re.sub(r"^(\w+: )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<\w+\.(\w+): [^>]*>", r"\1", text)
    text = re.sub(r"<[\w.]+ object at 0x\w+>", "...", text)
    text = re.sub(r"[~+](?=[A-Z])", "", text)  # The sign of a TypeVar.
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)


def default_of(model: type[BaseModel], key: str) -> str:
    return repr(model.model_fields[key].default)


def text_of(value: Any) -> str:
    """The value's own docstring, with lines joined to paragraphs."""
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    is_generic = own == object.__init__.__doc__
    doc = "" if own is None or is_generic else inspect.cleandoc(own)
    return "\n\n".join(" ".join(part.split()) for part in doc.split("\n\n"))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
