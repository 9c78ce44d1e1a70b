"""From a call's template and parameters to the completions it runs as. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from parrot.protocol.errors import CyclicGraph, InvalidRequest
from parrot.protocol.public import CallParameter, SemanticCallRequest
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
    the only one. `allows_background`: without a reader it runs in the background, unless the
    session runs calls on demand. `conversation`: see `GenerateRequest`."""

    fill: tuple[Piece, ...]
    samplings: Sequence[SamplingConfig]
    options: CallOptions
    previous: Completion | None = None
    output: SemanticVariable | None = None
    allows_background: bool = False
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


def _parse(template: str) -> tuple[TemplateText | Placeholder, ...]:
    """Programs send the same templates again and again. Raises `InvalidRequest`."""
    is_short = len(template) <= _MAX_CACHED_TEMPLATE
    return _parse_cached(template) if is_short else _parse_any(template)


@lru_cache(maxsize=256)
def _parse_cached(template: str) -> tuple[TemplateText | Placeholder, ...]:
    return _parse_any(template)


def _parse_any(template: str) -> tuple[TemplateText | Placeholder, ...]:
    pieces: list[TemplateText | Placeholder] = []
    num_placeholders = 0
    for piece in parse_template(template):
        num_placeholders += isinstance(piece, Placeholder)
        if num_placeholders > MAX_PLACEHOLDERS:
            message = f"the template has more than {MAX_PLACEHOLDERS} placeholders"
            raise InvalidRequest(message, param="template")
        pieces.append(piece)
    return tuple(pieces)


_MAX_NAMED = 16  # of each end of a cycle


def link(tasks: Sequence[Task]) -> None:
    """Link the tasks of one call, or none of them and raise `CyclicGraph`."""
    for count, task in enumerate(tasks, start=1):
        _link(task)
        if _is_cyclic(task):
            error = _cyclic(_cycle(task))
            for linked in tasks[:count]:
                _unlink(linked)
            raise error


def link_all(tasks: Sequence[Task]) -> list[Task]:
    """Link the tasks of many calls, or none of them and raise `CyclicGraph`. Returns them with
    producers before consumers. Where a path leads from one of them to another through tasks that
    were there, looks once at each task below them."""
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
    """Whether a task that is already linked closes a cycle.

    Everything but `task` is acyclic, so either search alone would find a cycle: downwards from its
    outputs and upwards from its inputs. Whichever ends first without meeting `task` proves that
    there is none, so the cost is that of the smaller side. A task whose outputs nobody consumes,
    the usual case, costs nothing."""
    if not any(output.consumers for output in task.outputs):
        return False
    return _either_finds(_search([task], {task}, down=True), _search([task], {task}, down=False))


def _are_connected(new: Set[Task]) -> bool:
    """Whether a path leads from one of the tasks, which are linked, to one of them, through others
    alone. All others are acyclic, so again the cost is that of the smaller side."""
    sides = []
    for down in (True, False):
        nearest = {other for task in new for other in _neighbours(task, down=down)}
        sides.append(_search(nearest - new, new, down=down))
    return _either_finds(*sides)


def _either_finds(*searches: Iterator[bool]) -> bool:
    """Whether the first search that ends, of all that go on in turns, has found something."""
    while True:
        for search in searches:
            is_found = next(search, None)
            if is_found is not False:
                return is_found is True


def _search(starts: Iterable[Task], goals: Set[Task], *, down: bool) -> Iterator[bool]:
    """One step a task: True when it has come to one of `goals`."""
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
    """The variables along a shortest cycle through `start`, which has one."""
    came_by: dict[Task, SemanticVariable] = {}
    queue = [start]
    for task in queue:
        for output in task.outputs:
            for consumer in output.consumers:
                if consumer not in came_by:
                    came_by[consumer] = output
                    queue.append(consumer)
        if start in came_by:
            break
    path = [came_by[start]]
    while (producer := path[-1].producer) is not start:
        assert producer is not None, path
        path.append(came_by[producer])
    path.reverse()
    return path
