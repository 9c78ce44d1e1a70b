"""The parts of a semantic function: parameters, and a template cut into pieces."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import Text, parse_template, placeholder

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class ParamType(Enum):
    """The role of a parameter: `INPUT_LOC` and `OUTPUT_LOC` as `P.Input` and `P.Output` say, or
    `INPUT_PYOBJ`, a Python object whose `str()` is inserted."""

    INPUT_LOC = 0
    OUTPUT_LOC = 1
    INPUT_PYOBJ = 2


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function. An output without `sampling_config` has the default one; a
    parameter without `default` must be given in every call. `model`: what reading an output gives
    an object of, instead of its text."""

    name: str
    typ: ParamType
    sampling_config: SamplingConfig | None = None
    default: Any = inspect.Parameter.empty
    model: type[BaseModel] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"`{self.name}` cannot be the name of a parameter")
        if not isinstance(self.typ, ParamType):
            raise TypeError(f"the type of parameter `{self.name}` must be a ParamType")
        if self.is_output and self.default is not inspect.Parameter.empty:
            raise ValueError(f"output `{self.name}` cannot have a default value")
        if not self.is_output and self.sampling_config is not None:
            raise ValueError(f"`{self.name}` is no output, it cannot have a sampling_config")
        if not self.is_output and self.model is not None:
            raise ValueError(f"`{self.name}` is no output, it cannot have a model")

    @property
    def is_output(self) -> bool:
        """Whether a call generates it."""
        return self.typ is ParamType.OUTPUT_LOC

    @property
    def is_required(self) -> bool:
        """Whether each call must give it."""
        return not self.is_output and self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Constant:
    """`idx` is its place in the body."""

    idx: int
    text: str


@dataclass(frozen=True)
class ParameterLoc:
    """The place of an input or an output."""

    idx: int
    param: Parameter

    @property
    def text(self) -> str:
        return placeholder(self.param.name)


FuncBodyPiece = Constant | ParameterLoc


def parse_body(template: str, params: dict[str, Parameter]) -> list[FuncBodyPiece]:
    """Cut a template into pieces. Raises `ValueError` for a placeholder that is no parameter."""
    body: list[FuncBodyPiece] = []
    for idx, piece in enumerate(parse_template(template)):
        if isinstance(piece, Text):
            body.append(Constant(idx, piece.text))
        elif piece.name in params:
            body.append(ParameterLoc(idx, params[piece.name]))
        else:
            raise ValueError(f"the template names `{piece.name}`, which is no parameter")
    return body


def check_body(body: Iterable[FuncBodyPiece], params: Iterable[Parameter]) -> None:
    """Raise `ValueError` unless every output has exactly one place, with something before it that
    is not an output."""
    places = _output_places(body)
    names = [place.param.name for place in places]
    if places and places[0].idx == 0:
        raise ValueError(f"output `{names[0]}` is at the very beginning: nothing to go on")
    for before, place in pairwise(places):
        if place.idx == before.idx + 1:
            raise ValueError(f"outputs `{before.param.name}` and `{place.param.name}` are adjacent")
    for param in params:
        if param.is_output and names.count(param.name) != 1:
            problem = "is filled twice" if param.name in names else "has no place in the template"
            raise ValueError(f"output `{param.name}` {problem}")


def without_pure_fill(body: list[FuncBodyPiece]) -> list[FuncBodyPiece]:
    """The body up to its last output; all of it if there is none."""
    places = _output_places(body)
    return body[: places[-1].idx + 1] if places else body


def _output_places(body: Iterable[FuncBodyPiece]) -> list[ParameterLoc]:
    return [piece for piece in body if isinstance(piece, ParameterLoc) and piece.param.is_output]
