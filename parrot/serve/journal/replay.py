"""From a session's records back to what they tell of its graph."""

from typing import Any

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import ParrotError, error_from_payload
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    CompletionState,
    Piece,
    PieceKind,
    RunStats,
    TextPiece,
    VariablePiece,
)
from parrot.serve.graph.variable import SemanticVariable, TokenizedText
from parrot.serve.journal.history import LOGPROBS
from parrot.serve.journal.record import Payload
from parrot.utils.clock import Clock


def replay_settled(graph: SessionGraph, fields: Payload) -> SemanticVariable:
    """Settle a variable as it was, with all that follows. One that was cancelled while an input's
    failure was on its way may have failed by that: its own error is what was told."""
    variable = graph.variable(fields["variable"])
    task = variable.producer
    if variable.is_settled:
        if task is not None and variable.origin is not None:
            task.state = CompletionState(fields["state"])
            variable.error, variable.origin = _error(fields), None
        return variable
    if task is not None:
        if isinstance(task, Completion):
            task.stats = _stats(fields["stats"])
        if all(output.is_settled for output in task.outputs if output is not variable):
            task.state = CompletionState(fields["state"])
    if "error" in fields:
        variable.fail(_error(fields))
    else:
        ids = fields.get("ids")
        tokenized = None if ids is None else TokenizedText(fields["tokenizer"], tuple(ids))
        variable.set(fields["text"], tokenized)
    return variable


def replay_attempt(graph: SessionGraph, fields: Payload, clock: Clock) -> None:
    """The next attempt will have a higher number."""
    completion = _completion(graph, fields["request"], fields["task"])
    completion.stats.attempts = fields["number"]
    completion.stats.engine_name = fields["engine"]
    completion.times.started = clock.now()


def recorded_prompt(graph: SessionGraph, fields: Payload) -> Prompt:
    options, previous = fields["options"], fields["previous"]
    own = {"models": tuple(options["models"]), "cache_salt": graph.cache_salt}
    return Prompt(
        fill=tuple(_piece(graph, piece) for piece in fields["fill"]),
        samplings=[SamplingConfig.model_validate(given) for given in fields["samplings"]],
        options=CallOptions(**options | own),
        previous=None if previous is None else _completion(graph, *previous),
        output=None if fields["output"] is None else graph.variable(fields["output"]),
        is_held=fields["is_held"],
        conversation=fields["conversation"],
    )


def recorded_completion(graph: SessionGraph, fields: Payload) -> Completion:
    return _completion(graph, fields["request"], fields["task"])


def _completion(graph: SessionGraph, request_id: int, task_id: int) -> Completion:
    for task in graph.calls[request_id].tasks:
        if task.id == task_id:
            assert isinstance(task, Completion), task
            return task
    raise KeyError(f"no task {task_id} of request {request_id}")


def _piece(graph: SessionGraph, fields: list[Any]) -> Piece:
    if len(fields) == 1:
        return VariablePiece(graph.variable(fields[0]))
    kind, text, *tokens = fields
    tokenized = TokenizedText(tokens[0], tuple(tokens[1])) if tokens else None
    return TextPiece(text, PieceKind(kind.encode()), tokenized)


def _stats(fields: Payload) -> RunStats:
    stats = RunStats(**fields)
    if stats.finish_reason is not None:
        stats.finish_reason = FinishReason(stats.finish_reason)
    if "logprobs" in fields:
        stats.logprobs = LOGPROBS.validate_python(fields["logprobs"])
    return stats


def _error(fields: Payload) -> ParrotError:
    """The error and those that caused it."""
    root: ParrotError | None = None
    last: ParrotError | None = None
    level: Payload | None = fields["error"]
    while level is not None:
        error = error_from_payload(level, level["status"])
        if last is not None:
            last.__cause__ = error
        root, last, level = root or error, error, level.get("cause")
    assert root is not None
    return root
