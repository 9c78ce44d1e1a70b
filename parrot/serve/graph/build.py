"""Builds the completions of a call from its template and parameters, and links tasks into the
graph."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from parrot.protocol.errors import CyclicGraph, InvalidRequest
from parrot.protocol.public import MAX_BRACES, CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import Placeholder, TemplateText, parse_template
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Piece,
    PieceKind,
    SemanticVariable,
    Task,
    TextPiece,
    VariablePiece,
)

# Placeholders that a template may have. A template with more is rejected.
MAX_PLACEHOLDERS = 4096
_DEFAULT_SAMPLING = SamplingConfig()
# Longest template, in characters, whose parsed form is cached.
_MAX_CACHED_TEMPLATE = 16384


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The point from which a stateful call continues."""

    last: Completion | None = None  # The last completion of the predecessor.
    tail: tuple[Piece, ...] = ()  # The predecessor's template after its last output.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A call without a template: a prompt, and one output for each of `samplings`."""

    fill: tuple[Piece, ...]
    samplings: Sequence[SamplingConfig]
    options: CallOptions
    previous: Completion | None = None  # The prompt continues after this completion's output.
    output: SemanticVariable | None = None  # An unset variable for the single output.
    # The call may run without a reader, except if the session runs calls on demand.
    allows_background: bool = False
    conversation: dict[str, Any] | None = None  # See `GenerateRequest`.
    conversation_inputs: Mapping[str, SemanticVariable] | None = None  # See `Completion`.


def index_parameters(parameters: Sequence[CallParameter]) -> dict[str, CallParameter]:
    """Return the parameters by name. Raises `InvalidRequest` if a name occurs twice."""
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
    """Split the template at its outputs into completions, and bind its placeholders to variables.
    Also returns the point from which a successor continues. Raises `InvalidRequest` with the
    parameter."""
    _check_system(request)
    parameters = {parameter.name: parameter for parameter in request.parameters}
    system = () if request.system is None else (TextPiece(request.system, PieceKind.SYSTEM),)
    completions: list[Completion] = []
    filled: set[str] = set()
    previous, fill = ancestor.last, list(ancestor.tail)
    for piece in _parse(request.template):
        if isinstance(piece, TemplateText):
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
    """The messages before an answer of a chat. White space at the edges of the user's message is
    removed, because it only separates placeholders in the template. Empty pieces are removed, but
    at least one piece is left."""
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
        raise InvalidRequest("`system` needs `chat: true`", param="system")
    if request.successor_of is not None:
        message = "`system` belongs to the first call of a chat, and this call continues one"
        raise InvalidRequest(message, param="system")


def _check_output_place(name: str, filled: set[str], *, has_text: bool) -> None:
    if name in filled:
        raise InvalidRequest(f"output `{name}` occurs twice in the template", param=name)
    if not has_text:
        reason = "directly follows another output" if filled else "is the very first piece"
        raise InvalidRequest(f"output `{name}` {reason} of the template", param=name)


def _parse(template: str) -> tuple[TemplateText | Placeholder, ...]:
    """Parse a template. Raises `InvalidRequest`."""
    # Short templates are cached, because programs send the same templates many times.
    is_short = len(template) <= _MAX_CACHED_TEMPLATE
    return _parse_cached(template) if is_short else _parse_any(template)


@lru_cache(maxsize=256)
def _parse_cached(template: str) -> tuple[TemplateText | Placeholder, ...]:
    return _parse_any(template)


def _parse_any(template: str) -> tuple[TemplateText | Placeholder, ...]:
    pieces: list[TemplateText | Placeholder] = []
    num_placeholders = 0
    if template.count("{{") > MAX_BRACES:  # The parser would take too long.
        message = f"the template has more than {MAX_PLACEHOLDERS} placeholders, or `{{{{`"
        raise InvalidRequest(message, param="template")
    for piece in parse_template(template):
        num_placeholders += isinstance(piece, Placeholder)
        if num_placeholders > MAX_PLACEHOLDERS:
            message = f"the template has more than {MAX_PLACEHOLDERS} placeholders"
            raise InvalidRequest(message, param="template")
        pieces.append(piece)
    return tuple(pieces)


# Variables at each end of a cycle that its error message names.
_MAX_NAMED = 16


def link(tasks: Sequence[Task]) -> None:
    """Link the tasks of one call. If they close a cycle, link none and raise `CyclicGraph`."""
    for count, task in enumerate(tasks, start=1):
        _link(task)
        if _is_cyclic(task):
            error = _cyclic(_cycle(task))
            for linked in tasks[:count]:
                _unlink(linked)
            raise error


def link_all(tasks: Sequence[Task]) -> list[Task]:
    """Link the tasks of many calls. Returns them with producers before consumers. If the tasks
    close a cycle, link none and raise `CyclicGraph`.

    If existing tasks connect the new tasks, this visits each task downstream of them once."""
    for task in tasks:
        _link(task)
    below: TopologicalSorter[Task] = TopologicalSorter()
    new = set(tasks)
    through_others = _are_connected(new)
    reached = dict.fromkeys(tasks)
    stack = list(tasks)
    for task in stack:
        below.add(task)
        for consumer in _neighbours(task, down=True):
            if not through_others and consumer not in new:
                continue
            below.add(consumer, task)
            if consumer not in reached:
                reached[consumer] = None
                stack.append(consumer)
    try:
        return [task for task in below.static_order() if task in new]
    except CycleError as found:
        error = _cyclic(_cycle(found.args[1][0]))
    for task in tasks:
        _unlink(task)
    raise error


def _link(task: Task) -> None:
    for variable in task.inputs:
        variable.consumers.append(task)
        task.missing += not variable.is_settled
    for variable in task.outputs:
        variable.producer = task


def _cyclic(path: Sequence[SemanticVariable]) -> CyclicGraph:
    found = [f"`{variable.name}`" for variable in [*path, path[0]]]
    if len(found) > 2 * _MAX_NAMED:
        found[_MAX_NAMED:-_MAX_NAMED] = [f"... ({len(found) - 2 * _MAX_NAMED} more)"]
    names = " -> ".join(found)
    return CyclicGraph(f"the call would close a cycle: {names}")


def _unlink(task: Task) -> None:
    for variable in task.inputs:
        variable.consumers.remove(task)
    for variable in task.outputs:
        variable.producer = None


def _is_cyclic(task: Task) -> bool:
    """Whether a linked task closes a cycle.

    The graph without `task` is acyclic. So a search downstream from its outputs and a search
    upstream from its inputs both find a cycle, if there is one. They run in turns, and the first
    search that ends decides. The cost is proportional to the smaller side."""
    # The usual case: the outputs of a new task have no consumers.
    if not any(output.consumers for output in task.outputs):
        return False
    return _first_result(_search([task], {task}, down=True), _search([task], {task}, down=False))


def _are_connected(new: Set[Task]) -> bool:
    """Whether a path through other tasks connects two of the new, linked tasks. The cost is
    proportional to the smaller side, as in `_is_cyclic`."""
    sides = []
    for down in (True, False):
        nearest = {other for task in new for other in _neighbours(task, down=down)}
        sides.append(_search(nearest - new, new, down=down))
    return _first_result(*sides)


def _first_result(*searches: Iterator[bool]) -> bool:
    """Run the searches in turns. Returns the result of the first search that ends."""
    while True:
        for search in searches:
            is_found = next(search, None)
            if is_found is not False:
                return is_found is True


def _search(starts: Iterable[Task], goals: Set[Task], *, down: bool) -> Iterator[bool]:
    """Visit one task per step. Yields True when the search reaches one of `goals`, else False."""
    seen: set[Task] = set()
    stack = list(starts)
    while stack:
        for other in _neighbours(stack.pop(), down=down):
            if other in goals:
                yield True
            elif other not in seen:
                seen.add(other)
                stack.append(other)
        yield False


def _neighbours(task: Task, *, down: bool) -> Iterator[Task]:
    if down:
        for output in task.outputs:
            yield from output.consumers
    else:
        for variable in task.inputs:
            if variable.producer is not None:
                yield variable.producer


def _cycle(start: Task) -> list[SemanticVariable]:
    """The variables along a shortest cycle through `start`. `start` must be part of a cycle."""
    reached_by: dict[Task, SemanticVariable] = {}
    queue = [start]
    for task in queue:
        for output in task.outputs:
            for consumer in output.consumers:
                if consumer not in reached_by:
                    reached_by[consumer] = output
                    queue.append(consumer)
        if start in reached_by:
            break
    path = [reached_by[start]]
    while (producer := path[-1].producer) is not start:
        assert producer is not None, path
        path.append(reached_by[producer])
    path.reverse()
    return path
