"""From a call's template and parameters to the completions it runs as. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from parrot.protocol.errors import InvalidRequest
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import Placeholder, Text, parse_template
from parrot.serve.graph.nodes import CallOptions, Completion, Piece, TextPiece, VariablePiece
from parrot.serve.graph.variable import SemanticVariable

_DEFAULT_SAMPLING = SamplingConfig()

PlannedPiece = TextPiece | CallParameter


@dataclass(frozen=True, slots=True)
class PlannedCompletion:
    fill: tuple[PlannedPiece, ...]
    output: CallParameter


@dataclass(frozen=True, slots=True)
class CallPlan:
    """`tail`: what follows the last output; only a stateful successor ever sees it."""

    completions: tuple[PlannedCompletion, ...]
    tail: tuple[PlannedPiece, ...]


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Where a stateful call continues: the last completion of its predecessor, and what the
    predecessor's template says after it."""

    last: Completion | None = None
    tail: tuple[Piece, ...] = ()


NO_ANCESTOR = Ancestor()


def plan_call(request: SemanticCallRequest, *, follows_text: bool = False) -> CallPlan:
    """Cut the template at its outputs. `follows_text`: the context it continues ends with text, so
    an output may come first. Raises `InvalidRequest` naming the parameter."""
    _check_system(request)
    parameters = index_parameters(request.parameters)
    completions: list[PlannedCompletion] = []
    fill: list[PlannedPiece] = []
    filled: set[str] = set()
    for piece in _parse(request.template):
        if isinstance(piece, Text):
            fill.append(TextPiece(piece.text))
            continue
        parameter = parameters.get(piece.name)
        if parameter is None:
            raise InvalidRequest(f"placeholder `{piece.name}` has no parameter", param=piece.name)
        if not parameter.is_output:
            fill.append(parameter)
            continue
        _check_output_place(piece.name, filled, bool(fill) or (follows_text and not filled))
        filled.add(piece.name)
        completions.append(PlannedCompletion(tuple(fill), parameter))
        fill = []
    for parameter in request.parameters:
        if parameter.is_output and parameter.name not in filled:
            raise InvalidRequest(
                f"output `{parameter.name}` does not occur in the template", param=parameter.name
            )
    tail = [] if request.remove_pure_fill and completions else fill
    if request.system is not None:
        system = TextPiece(request.system, is_system=True)
        if completions:
            completions[0] = replace(completions[0], fill=(system, *completions[0].fill))
        else:
            tail.insert(0, system)
    return CallPlan(tuple(completions), tuple(tail))


def index_parameters(parameters: Sequence[CallParameter]) -> dict[str, CallParameter]:
    """Map the parameters by their names. Raises `InvalidRequest` if a name occurs twice."""
    by_name = {parameter.name: parameter for parameter in parameters}
    if len(by_name) < len(parameters):
        names = [parameter.name for parameter in parameters]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"parameter `{twice}` is given twice", param=twice)
    return by_name


def build_completions(
    plan: CallPlan,
    variables: dict[str, SemanticVariable],
    ancestor: Ancestor,
    *,
    options: CallOptions,
    session_id: int,
    request_id: int,
    next_id: Callable[[], int],
) -> list[Completion]:
    """Bind the plan to its variables (by parameter name)."""
    completions: list[Completion] = []
    previous, before = ancestor.last, ancestor.tail
    for planned in plan.completions:
        fill = before + bind_pieces(planned.fill, variables)
        if options.chat:
            fill = _message(fill)
        previous = Completion(
            id=next_id(),
            request_id=request_id,
            session_id=session_id,
            options=options,
            fill=fill,
            output=variables[planned.output.name],
            sampling=planned.output.sampling_config or _DEFAULT_SAMPLING,
            previous=previous,
        )
        before = ()
        completions.append(previous)
    return completions


def bind_pieces(
    pieces: Sequence[PlannedPiece], variables: dict[str, SemanticVariable]
) -> tuple[Piece, ...]:
    return tuple(
        piece if isinstance(piece, TextPiece) else VariablePiece(variables[piece.name])
        for piece in pieces
    )


def _message(fill: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The messages before an answer of a chat. The user's has no white space at its edges, which
    only sets the template's placeholders apart. Pieces that are empty then go, but for the last."""
    if fill and isinstance(first := fill[0], TextPiece) and first.is_system:
        return (first, *_message(fill[1:]))
    pieces = list(fill)
    for edge, strip in ((0, str.lstrip), (-1, str.rstrip)):
        while pieces and isinstance(piece := pieces[edge], TextPiece):
            if text := strip(piece.text):
                pieces[edge] = piece if text == piece.text else TextPiece(text)
                break
            del pieces[edge]
    return tuple(pieces) or (TextPiece(""),)


def continue_from(
    plan: CallPlan,
    completions: Sequence[Completion],
    variables: dict[str, SemanticVariable],
    ancestor: Ancestor,
) -> Ancestor:
    """Where a successor of this call continues."""
    tail = bind_pieces(plan.tail, variables)
    if completions:
        return Ancestor(completions[-1], tail)
    return Ancestor(ancestor.last, ancestor.tail + tail)


def _check_system(request: SemanticCallRequest) -> None:
    if request.system is None:
        return
    if not request.chat:
        raise InvalidRequest("only a chat has a system message", param="system")
    if request.successor_of is not None:
        raise InvalidRequest("the chat that the call continues has begun", param="system")


def _check_output_place(name: str, filled: set[str], has_text: bool) -> None:
    if name in filled:
        raise InvalidRequest(f"output `{name}` occurs twice in the template", param=name)
    if not has_text:
        reason = "directly follows another output" if filled else "is the very first piece"
        raise InvalidRequest(f"output `{name}` {reason} of the template", param=name)


@lru_cache(maxsize=256)
def _parse_short(template: str) -> tuple[Text | Placeholder, ...]:
    return tuple(parse_template(template))


_MAX_CACHED_TEMPLATE = 16384  # characters


def _parse(template: str) -> tuple[Text | Placeholder, ...]:
    """Programs send the same templates again and again."""
    if len(template) <= _MAX_CACHED_TEMPLATE:
        return _parse_short(template)
    return tuple(parse_template(template))
