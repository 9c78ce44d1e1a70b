"""The parts of a semantic function: its parameters and the pieces of its template."""

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

from parrot.frontend.pfunc.template_errors import TemplateError
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import TemplateText, parse_template, placeholder

# Text similar to a placeholder: a name in any number of braces, with optional spaces.
_BRACES = re.compile(r"\{+\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*\}+")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class ParamType(Enum):
    """The role of a parameter. `INPUT_LOC` is `P.Input`, `OUTPUT_LOC` is `P.Output`, and
    `INPUT_PYOBJ` is a Python object whose `str()` is inserted."""

    INPUT_LOC = 0
    OUTPUT_LOC = 1
    INPUT_PYOBJ = 2


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function. An output without `sampling_config` uses `P.SamplingConfig()`.
    An input without `default` is required in every call. `model` is the type of the object that
    `get` returns for an output; None: `get` returns the text."""

    name: str
    typ: ParamType
    sampling_config: SamplingConfig | None = None
    default: Any = inspect.Parameter.empty
    model: Any = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"`{self.name}` cannot be the name of a parameter")
        if not isinstance(self.typ, ParamType):
            raise TypeError(f"the type of parameter `{self.name}` must be a ParamType")
        if self.is_output and self.default is not inspect.Parameter.empty:
            raise ValueError(f"output `{self.name}` cannot have a default value")
        if not self.is_output and self.sampling_config is not None:
            raise ValueError(f"`{self.name}` is not an output and cannot have a sampling_config")
        if not self.is_output and self.model is not None:
            raise ValueError(f"`{self.name}` is not an output and cannot have a model")

    @property
    def is_output(self) -> bool:
        """Whether the parameter is an output."""
        return self.typ is ParamType.OUTPUT_LOC

    @property
    def is_required(self) -> bool:
        """Whether every call needs an argument for the parameter."""
        return not self.is_output and self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Constant:
    """A constant text of a template. `idx` is its index in the body."""

    idx: int
    text: str


@dataclass(frozen=True)
class ParameterLoc:
    """The placeholder of an input or an output."""

    idx: int
    param: Parameter

    @property
    def text(self) -> str:
        return placeholder(self.param.name)


FuncBodyPiece = Constant | ParameterLoc


def output_names(template: str, inputs: Sequence[str], number: int) -> list[str]:
    """The names of outputs: the distinct placeholders that are not inputs, in order. Raises
    `TemplateError` unless there are `number` of them."""
    places: dict[str, int] = {}
    start = 0
    for piece in parse_template(template):
        if isinstance(piece, TemplateText):
            start += len(piece.text)
            continue
        if piece.name not in inputs:
            places.setdefault(piece.name, start)
        start += len(placeholder(piece.name))
    if len(places) == number:
        return list(places)
    found = ", ".join(f"`{name}`" for name in places) or "none"
    problem = (
        f"P.Returns has {number} output{'s' * (number > 1)}, so the template needs {number} "
        f"placeholder{'s' * (number > 1)} without a parameter; it has {found}"
    )
    wrong = (name for name in places if get_close_matches(name, inputs, 1))
    name = next(wrong, next(reversed(places), ""))
    if name not in places:
        raise TemplateError(problem, template, len(template), len(template))
    if close := get_close_matches(name, inputs, 1):
        problem += f": did you mean `{close[0]}`?"
    start = places[name]
    raise TemplateError(problem, template, start, start + len(placeholder(name)))


def parse_body(template: str, params: dict[str, Parameter]) -> list[FuncBodyPiece]:
    """Split a template into pieces. Raises `TemplateError` for an unknown placeholder."""
    body: list[FuncBodyPiece] = []
    start = 0
    for idx, piece in enumerate(parse_template(template)):
        if isinstance(piece, TemplateText):
            body.append(Constant(idx, piece.text))
        elif piece.name in params:
            body.append(ParameterLoc(idx, params[piece.name]))
        else:
            end = start + len(placeholder(piece.name))
            problem = f"the function {no_parameter(piece.name, params)}"
            raise TemplateError(problem, template, start, end)
        start += len(body[-1].text)
    return body


def check_body(body: Sequence[FuncBodyPiece], params: Iterable[Parameter]) -> None:
    """Raises `TemplateError` unless each output has exactly one placeholder, directly after an
    input or a constant. Also raises it for a parameter in single or triple braces."""
    template = "".join(piece.text for piece in body)
    ends = list(accumulate(len(piece.text) for piece in body))

    def wrong(problem: str, place: ParameterLoc) -> TemplateError:
        end = ends[place.idx]
        return TemplateError(problem, template, end - len(place.text), end)

    places = _output_places(body)
    if places and places[0].idx == 0:
        name = places[0].param.name
        raise wrong(
            f"output `{name}` is at the start of the prompt: there must be text before it",
            places[0],
        )
    for before, place in pairwise(places):
        if place.idx == before.idx + 1:
            names = f"`{before.param.name}` and `{place.param.name}`"
            raise wrong(f"outputs {names} are adjacent: there must be text between them", place)
    filled: set[str] = set()
    for place in places:
        if place.param.name in filled:
            raise wrong(f"output `{place.param.name}` occurs twice in the template", place)
        filled.add(place.param.name)
    used = {piece.param.name for piece in body if isinstance(piece, ParameterLoc)}
    for param in params:
        if param.name not in used:
            _check_unused(param, template)


def _check_unused(param: Parameter, template: str) -> None:
    """Raises `TemplateError` for an output without a placeholder, and for a parameter in other
    braces than two. An unused input is allowed and has no effect."""
    right = placeholder(param.name)
    for found in _BRACES.finditer(template):
        if found[1] == param.name:
            problem = f"`{found[0]}` is not a placeholder: write {right}"
            raise TemplateError(problem, template, *found.span())
    if param.is_output:
        problem = f"output `{param.name}` is not in the template: write {right} at its position"
        raise TemplateError(problem, template, parameter=param.name)


def no_parameter(name: str, params: Iterable[str]) -> str:
    """The end of an error message about an unknown parameter, with a suggestion."""
    for close in get_close_matches(name, params, 1):
        return f"has no parameter `{name}`: did you mean `{close}`?"
    return f"has no parameter `{name}`, only {', '.join(f'`{one}`' for one in params) or 'none'}"


def without_pure_fill(body: list[FuncBodyPiece]) -> list[FuncBodyPiece]:
    """The body up to its last output, or the whole body without an output."""
    places = _output_places(body)
    return body[: places[-1].idx + 1] if places else body


def _output_places(body: Iterable[FuncBodyPiece]) -> list[ParameterLoc]:
    return [piece for piece in body if isinstance(piece, ParameterLoc) and piece.param.is_output]


class Signature:
    """A function's name and parameters."""

    def __init__(self, name: str, params: Sequence[Parameter]) -> None:
        self.name = name
        self.params = list(params)
        self.params_map = {param.name: param for param in self.params}
        if len(self.params_map) < len(self.params):
            raise ValueError(f"function `{name}` has two parameters of the same name")
        self.inputs = [param for param in self.params if not param.is_output]
        self.outputs = [param for param in self.params if param.is_output]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.display_signature()}>"

    def display_signature(self) -> str:
        return f"{self.name}({', '.join(f'{p.name}: {p.typ.name}' for p in self.params)})"

    def line_of(self, param: Parameter) -> str:
        """The source line with the parameter, after a line break. Empty if unknown."""
        return ""
