"""From a call's template and parameters to the completions it runs as. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from parrot.protocol.errors import InvalidRequest
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import Placeholder, Text, parse_template
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Piece,
    PieceKind,
    TextPiece,
    VariablePiece,
)
from parrot.serve.graph.variable import SemanticVariable

MAX_PLACEHOLDERS = 4096
_DEFAULT_SAMPLING = SamplingConfig()
_MAX_CACHED_TEMPLATE = 16384  # characters


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Where a stateful call continues: the last completion of its predecessor, and what the
    predecessor's template says after it."""

    last: Completion | None = None
    tail: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that comes whole, and what is to be generated behind it, or behind the output of
    `previous` and then it: an output for each of `samplings`. `output`: an unset variable that is
    the only one. `is_held`: without a reader it runs in the background, unless the session runs
    calls on demand. `conversation`: see `GenerateRequest`."""

    fill: tuple[Piece, ...]
    samplings: Sequence[SamplingConfig]
    options: CallOptions
    previous: Completion | None = None
    output: SemanticVariable | None = None
    is_held: bool = False
    conversation: dict[str, Any] | None = None


def index_parameters(parameters: Sequence[CallParameter]) -> dict[str, CallParameter]:
    """Map the parameters by their names. Raises `InvalidRequest` if a name occurs twice."""
    by_name = {parameter.name: parameter for parameter in parameters}
    if len(by_name) < len(parameters):
        names = [parameter.name for parameter in parameters]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"parameter `{twice}` is given twice", param=twice)
    return by_name


def build_completions(
    request: SemanticCallRequest,
    variables: Mapping[str, SemanticVariable],
    ancestor: Ancestor,
    *,
    options: CallOptions,
    session_id: int,
    request_id: int,
    next_id: Callable[[], int],
) -> tuple[list[Completion], Ancestor]:
    """Cut the template at its outputs, and bind it to the variables of its parameters. Returns also
    where a successor continues. Raises `InvalidRequest` naming the parameter."""
    _check_system(request)
    parameters = {parameter.name: parameter for parameter in request.parameters}
    system = () if request.system is None else (TextPiece(request.system, PieceKind.SYSTEM),)
    completions: list[Completion] = []
    filled: set[str] = set()
    previous, fill = ancestor.last, list(ancestor.tail)
    for piece in _parse(request.template):
        if isinstance(piece, Text):
            fill.append(TextPiece(piece.text))
            continue
        parameter = parameters.get(piece.name)
        if parameter is None:
            raise InvalidRequest(f"placeholder `{piece.name}` has no parameter", param=piece.name)
        if not parameter.is_output:
            fill.append(VariablePiece(variables[piece.name]))
            continue
        _check_output_place(piece.name, filled, has_text=bool(fill))
        filled.add(piece.name)
        previous = Completion(
            id=next_id(),
            request_id=request_id,
            session_id=session_id,
            options=options,
            fill=system + (_message(fill) if options.chat else tuple(fill)),
            output=variables[piece.name],
            sampling=parameter.sampling_config or _DEFAULT_SAMPLING,
            previous=previous,
        )
        completions.append(previous)
        system, fill = (), []
    for parameter in request.parameters:
        if parameter.is_output and parameter.name not in filled:
            raise InvalidRequest(
                f"output `{parameter.name}` does not occur in the template", param=parameter.name
            )
    if completions and request.remove_pure_fill:
        fill = []
    return completions, Ancestor(previous, (*system, *fill))


def _message(fill: Sequence[Piece]) -> tuple[Piece, ...]:
    """The messages before an answer of a chat. The user's has no white space at its edges, which
    only sets the template's placeholders apart. Pieces that are empty then go, but for the last."""
    if fill and isinstance(first := fill[0], TextPiece) and (first.kind is PieceKind.SYSTEM):
        return (first, *_message(fill[1:]))
    pieces = list(fill)
    for edge, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while pieces and isinstance(piece := pieces[edge], TextPiece):
            if text := strip(piece.text):
                pieces[edge] = piece if text == piece.text else TextPiece(text)
                break
            del pieces[edge]
    return tuple(pieces) or (TextPiece(""),)


def _check_system(request: SemanticCallRequest) -> None:
    if request.system is None:
        return
    if not request.chat:
        raise InvalidRequest("only a chat has a system message", param="system")
    if request.successor_of is not None:
        raise InvalidRequest("the chat that the call continues has begun", param="system")


def _check_output_place(name: str, filled: set[str], *, has_text: bool) -> None:
    if name in filled:
        raise InvalidRequest(f"output `{name}` occurs twice in the template", param=name)
    if not has_text:
        reason = "directly follows another output" if filled else "is the very first piece"
        raise InvalidRequest(f"output `{name}` {reason} of the template", param=name)


def _parse(template: str) -> tuple[Text | Placeholder, ...]:
    """Programs send the same templates again and again. Raises `InvalidRequest`."""
    is_short = len(template) <= _MAX_CACHED_TEMPLATE
    return _parse_cached(template) if is_short else _parse_any(template)


@lru_cache(maxsize=256)
def _parse_cached(template: str) -> tuple[Text | Placeholder, ...]:
    return _parse_any(template)


def _parse_any(template: str) -> tuple[Text | Placeholder, ...]:
    pieces: list[Text | Placeholder] = []
    num_placeholders = 0
    for piece in parse_template(template):
        num_placeholders += isinstance(piece, Placeholder)
        if num_placeholders > MAX_PLACEHOLDERS:
            message = f"the template has more than {MAX_PLACEHOLDERS} placeholders"
            raise InvalidRequest(message, param="template")
        pieces.append(piece)
    return tuple(pieces)
