"""Encodes commands and facts of sessions as journal records, and decodes the records."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter

from parrot.journal.log import Journal, Kind, Payload
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import ParrotError, error_from_payload
from parrot.protocol.public import GraphRequest, NativeCallRequest, SemanticCallRequest
from parrot.protocol.sampling import Logprobs, SamplingConfig, WireLogprobs
from parrot.serve.graph.build import Prompt
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    CompletionState,
    Piece,
    PieceKind,
    RunStats,
    SemanticVariable,
    TextPiece,
    TokenizedText,
    VariablePiece,
)
from parrot.serve.sessions import (
    AddCall,
    AddGraph,
    AddPrompt,
    Begin,
    Command,
    CreateVariable,
)
from parrot.utils.clock import Clock

LOGPROBS: TypeAdapter[Logprobs] = TypeAdapter(WireLogprobs)
_NO_STATS = [
    (field.name, getattr(RunStats(), field.name))
    for field in fields(RunStats)
    if field.name not in ("extra", "is_streamed")
]
_SECRETS = {"session_auth", "session"}


class JournaledSession:
    """The `SessionLog` of one session, stored in the journal."""

    def __init__(self, journal: Journal, session_id: int) -> None:
        self._journal = journal
        self._subject = str(session_id)

    def began(self, begin: Begin) -> None:
        self._journal.append(self._subject, Kind.SESSION, begin._asdict())

    def ended(self) -> None:
        self._journal.end(self._subject)

    def require_room(self) -> None:
        self._journal.require_room()

    async def stored(self, seq: int) -> None:
        await self._journal.stored(seq)

    def command(
        self, command: Command[Any], upcoming: Sequence[int]
    ) -> AbstractContextManager[None]:
        fields: Payload
        match command:
            case AddCall(request):
                is_native = isinstance(request, NativeCallRequest)
                kind = Kind.NATIVE if is_native else Kind.CALL
                fields = {"request": _request_field(request)}
            case AddGraph(request, _, upcoming):
                kind, fields = Kind.GRAPH, {"request": _request_field(request)}
            case AddPrompt(prompt, usage, is_kept):
                kind, fields = Kind.PROMPT, _prompt_fields(prompt)
                fields |= {"usage": dict(usage), "is_kept": is_kept}
            case CreateVariable(name, content):
                kind, fields = Kind.VARIABLE, {"name": name, "content": content}
            case _:
                return nullcontext()  # its effects are recorded as `SETTLED` facts
        return self._journal.recorded(self._subject, kind, fields | {"upcoming": list(upcoming)})

    def settled(self, variable: SemanticVariable) -> None:
        """Record a variable's value or own error. An error that follows from another variable's
        error is not recorded, because the replay derives it again from earlier records."""
        if variable.origin is not None:
            variable.record_seq = self._journal.last_seq
            return
        fields: Payload = {"variable": variable.id}
        if variable.error is not None:
            fields["error"] = error_fields(variable.error)
        else:
            fields["text"] = variable.text
            if variable.tokenized is not None:
                fields["tokenizer"] = variable.tokenized.tokenizer_id
                fields["ids"] = variable.tokenized.ids
        if (task := variable.producer) is not None:
            fields["state"] = task.state.value
            if isinstance(task, Completion):
                fields["stats"] = _stats_fields(task.stats)
        variable.record_seq = self._journal.append(self._subject, Kind.SETTLED, fields)

    def attempted(self, completion: Completion) -> None:
        fields = {
            "request": completion.request_id,
            "task": completion.id,
            "number": completion.stats.attempts,
            "engine": completion.stats.engine_name,
        }
        self._journal.append(self._subject, Kind.ATTEMPT, fields)

    def was_read(self) -> None:
        self._journal.append(self._subject, Kind.READ, {})

    def note(self, kind: str, fields: Payload) -> None:
        self._journal.append(self._subject, kind, fields)


def recorded_command(kind: Kind, fields: Payload, graph: SessionGraph) -> Command[Any] | None:
    """The command in a record; None if the record is a fact. Also sets the graph's next ids to the
    ids that the command received."""
    if "upcoming" in fields:
        graph.ids.upcoming = fields["upcoming"]
    match kind:
        case Kind.CALL:
            return AddCall(SemanticCallRequest.model_validate(fields["request"]))
        case Kind.NATIVE:
            return AddCall(NativeCallRequest.model_validate(fields["request"]))
        case Kind.GRAPH:
            return AddGraph.of(GraphRequest.model_validate(fields["request"]), graph)
        case Kind.VARIABLE:
            return CreateVariable(fields["name"], fields["content"])
        case Kind.PROMPT:
            return AddPrompt(_prompt(graph, fields), fields["usage"], fields["is_kept"])
        case _:
            return None


def _request_field(request: BaseModel) -> orjson.Fragment:
    return orjson.Fragment(request.model_dump_json(exclude=_SECRETS, exclude_unset=True).encode())


def error_fields(error: ParrotError) -> Payload:
    """The error and its chain of causes."""
    fields: Payload = {**error.to_payload(), "status": error.status}
    if isinstance(error.__cause__, ParrotError):
        fields["cause"] = error_fields(error.__cause__)
    return fields


def _stats_fields(stats: RunStats) -> Payload:
    """The stats that differ from their defaults."""
    changed = {name: value for name, none in _NO_STATS if (value := getattr(stats, name)) != none}
    if stats.logprobs is not None:
        own = Logprobs(stats.logprobs.width, tokens=[])
        own.extend(stats.logprobs)  # Copies the tokens' bytes: the tokenizer may be missing later.
        changed["logprobs"] = LOGPROBS.dump_python(own, mode="json")
    return changed


def _prompt_fields(prompt: Prompt) -> Payload:
    """All fields except the conversation of a request without `conversation_inputs`, which may
    contain megabytes of images. Only a client that is connected waits for the answer, so the call
    does not run again after a restart."""
    previous, inputs = prompt.previous, prompt.conversation_inputs
    kept: Payload = {}
    if inputs is not None:
        marks = {mark: variable.id for mark, variable in inputs.items()}
        kept = {"conversation": prompt.conversation, "marks": marks}
    return {
        **kept,
        "fill": [_piece_fields(piece) for piece in prompt.fill],
        "samplings": [s.model_dump(mode="json", exclude_unset=True) for s in prompt.samplings],
        "options": _options_fields(prompt.options),
        "previous": None if previous is None else [previous.request_id, previous.id],
        "output": None if prompt.output is None else prompt.output.id,
        "is_held": prompt.allows_background,
    }


def _options_fields(options: CallOptions) -> Payload:
    """All options except secrets: the cache salt, which the session knows, and the client's key."""
    fields = asdict(options)
    del fields["cache_salt"], fields["client_key"]
    return fields


def _piece_fields(piece: Piece) -> list[Any]:
    if not isinstance(piece, TextPiece):
        return [piece.variable.id]
    fields: list[Any] = [piece.kind.value.decode(), piece.text]
    if piece.tokenized is not None:
        fields += [piece.tokenized.tokenizer_id, piece.tokenized.ids]
    return fields


def replay_settled(graph: SessionGraph, fields: Payload) -> SemanticVariable:
    """Set or fail a variable as recorded, with all consequences.

    A variable may have failed in the replay because its input failed, although it was cancelled
    first. Then the recorded error replaces the derived one, because clients received it."""
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
    """Restore the attempt's number, so that the next attempt has a higher one."""
    completion = graph.completion(fields["request"], fields["task"])
    completion.stats.attempts = fields["number"]
    completion.stats.engine_name = fields["engine"]
    completion.times.started = clock.now()


def _prompt(graph: SessionGraph, fields: Payload) -> Prompt:
    options, previous = fields["options"], fields["previous"]
    own = {"models": tuple(options["models"]), "cache_salt": graph.cache_salt}
    return Prompt(
        fill=tuple(_piece(graph, piece) for piece in fields["fill"]),
        samplings=[SamplingConfig.model_validate(given) for given in fields["samplings"]],
        options=CallOptions(**options | own),
        previous=None if previous is None else graph.completion(*previous),
        output=None if fields["output"] is None else graph.variable(fields["output"]),
        allows_background=fields["is_held"],
        conversation=fields.get("conversation"),
        conversation_inputs={
            mark: graph.variable(var_id) for mark, var_id in fields.get("marks", {}).items()
        },
    )


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
    """The error and its chain of causes."""
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
