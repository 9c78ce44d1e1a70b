"""Records the requests of programs, to replay them with other settings (`parrot simulate`)."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import orjson

from parrot.protocol import trace
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    ParameterInfo,
    SemanticCallRequest,
    SessionScoped,
)
from parrot.protocol.template import TemplateText, parse_template, placeholder
from parrot.serve.events import (
    CallAdded,
    CancelRequested,
    CoreClosed,
    EngineJoined,
    PromptAdded,
    ReadBegan,
    ReadEnded,
    SessionBegan,
    SessionDeleted,
    SessionEnded,
    Sink,
    VariableCreated,
    VariableSet,
)
from parrot.serve.graph.nodes import Completion, NativeCall, Piece, TextPiece, VariableState
from parrot.serve.sessions import Session
from parrot.serve.views import session_steps, session_view
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError
from parrot.utils.private_files import open_private

logger = logging.getLogger(__name__)

_ID_BYTES = 8  # Bytes of a text chunk's hash.
_SCOPE = {"session_id", "session_auth", "idempotency_key"}


class TraceFile:
    """A `TraceSink` that writes a file. When a session ends, its events are flushed to the file."""

    def __init__(self, path: str) -> None:
        """Creates or truncates the file. Raises `ConfigError` if it cannot be written."""
        try:
            self._file = open_private(path, is_new=True)
        except OSError as error:
            raise ConfigError(f"trace_path: {path}: {error.strerror}") from None

    def __call__(self, event: trace.TraceEvent) -> None:
        """Raises `OSError`, for example when the disk is full."""
        payload = event.model_dump(mode="json", exclude_defaults=True) | {"event": event.event}
        self._file.write(orjson.dumps(payload) + b"\n")
        if isinstance(event, trace.EndLine | trace.TraceHeader):
            self._file.flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.error("the end of the trace is lost: %s", error)


class Recorder:
    """Converts ServeCore's events to trace events. Texts become lengths and salted hashes."""

    def __init__(self, sink: trace.TraceSink, clock: Clock) -> None:
        self._write = sink
        self._clock = clock
        self._began = clock.now()
        self._salt = secrets.token_bytes(16)
        self._known: set[int] = set()  # sessions that began during the recording
        sink(trace.TraceHeader())

    @property
    def sink(self) -> Sink:
        return {
            EngineJoined: self._engine_joined,
            SessionBegan: self._session_began,
            SessionDeleted: self._session_deleted,
            SessionEnded: self._session_ended,
            CallAdded: self._call_added,
            PromptAdded: self._prompt_added,
            VariableCreated: self._variable_created,
            VariableSet: self._variable_set,
            CancelRequested: self._cancel_requested,
            ReadBegan: self._read_began,
            ReadEnded: self._read_ended,
            CoreClosed: self._core_closed,
        }

    def _engine_joined(self, event: EngineJoined) -> None:
        self._write(trace.EngineLine(at=self._at(), engine=event.info))

    def _session_began(self, event: SessionBegan) -> None:
        session = event.session
        self._known.add(session.id)
        tenant = self._text(session.tenant).ids[0]
        self._note(trace.SessionLine, session, tenant=tenant, on_demand=event.on_demand)

    def _session_deleted(self, event: SessionDeleted) -> None:
        self._note(trace.DeleteLine, event.session)

    def _session_ended(self, event: SessionEnded) -> None:
        session = event.session
        native_outputs = [
            variable
            for call in session.graph.calls.values()
            for task in call.tasks
            if isinstance(task, NativeCall)
            for variable in task.outputs
        ]
        self._note(
            trace.EndLine,
            session,
            calls=session_view(session_steps(session, self._clock.now(), 0.0)).calls,
            native_texts={
                variable.id: self._text(variable.text)
                for variable in native_outputs
                if variable.state is VariableState.READY
            },
        )
        self._known.discard(session.id)

    def _prompt_added(self, event: PromptAdded) -> None:
        for completion in event.completions:
            call = _as_call(event.session, completion, is_bound=event.is_bound)
            self._call_added(CallAdded(event.session, *call))

    def _call_added(self, event: CallAdded) -> None:
        session, request, response = event
        fields: dict[str, Any] = {
            "request_id": response.request_id,
            "parameters": self._parameters(request.parameters, response),
        }
        if isinstance(request, SemanticCallRequest):
            options = _options(request, "template", "parameters", "system")
            pieces = self._pieces(request)
            self._note(trace.CallLine, session, **fields, pieces=pieces, options=options)
        else:
            options = _options(request, "func_name", "func_source", "parameters")
            name = request.func_name
            self._note(trace.NativeLine, session, **fields, func_name=name, options=options)

    def _variable_created(self, event: VariableCreated) -> None:
        session, var_id, name, content = event
        value = None if content is None else self._text(content)
        self._note(trace.VariableLine, session, var_id=var_id, name=name, value=value)

    def _variable_set(self, event: VariableSet) -> None:
        value = self._text(event.content)
        self._note(trace.SetLine, event.session, var_id=event.var_id, value=value)

    def _cancel_requested(self, event: CancelRequested) -> None:
        session, request_id, var_id = event
        self._note(trace.CancelLine, session, request_id=request_id, var_id=var_id)

    def _read_began(self, event: ReadBegan) -> None:
        self._note(
            trace.ReadLine,
            event.session,
            read_id=event.read_id,
            var_ids=list(event.var_ids),
            k=event.k,
            is_stream=event.is_stream,
            options=_options(event.options, "var_ids", "k"),
        )

    def _read_ended(self, event: ReadEnded) -> None:
        outcome, error = None, event.error
        if isinstance(error, ParrotError):
            outcome = error.type
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = trace.WITHDRAWN
        self._note(trace.AnswerLine, event.session, read_id=event.read_id, error=outcome)

    def _core_closed(self, event: CoreClosed) -> None:
        self._write(trace.TraceEnded(at=self._at(), **event._asdict()))

    def _note(self, kind: type[trace.SessionEvent], session: Session, **fields: Any) -> None:
        if session.id in self._known:
            self._write(kind(at=self._at(), session_id=session.id, **fields))

    def _at(self) -> float:
        return self._clock.now() - self._began

    def _text(self, text: str) -> trace.TraceText:
        digest = hashlib.blake2b(key=self._salt, digest_size=_ID_BYTES)
        ids = []
        for start in range(0, len(text), trace.CHUNK_CHARS):
            chunk = text[start : start + trace.CHUNK_CHARS]
            digest.update(chunk.encode("utf-8", "surrogatepass"))
            ids.append(digest.hexdigest())
        return trace.TraceText(chars=len(text), ids=ids)

    def _pieces(self, request: SemanticCallRequest) -> list[trace.TraceText | str]:
        system = [] if request.system is None else [self._text(request.system)]
        return system + [
            self._text(piece.text) if isinstance(piece, TemplateText) else piece.name
            for piece in parse_template(request.template)
        ]

    def _parameters(
        self, parameters: Sequence[CallParameter], response: CallResponse
    ) -> list[trace.TraceParameter]:
        var_ids = {info.parameter_name: info.var_id for info in response.param_info}
        return [
            trace.TraceParameter(
                name=parameter.name,
                var_id=var_ids[parameter.name],
                is_output=parameter.is_output,
                was_bound=parameter.var_id is not None,
                value=None if parameter.value is None else self._text(parameter.value),
                sampling_config=None
                if parameter.sampling_config is None
                else parameter.sampling_config.model_dump(mode="json", exclude_defaults=True),
            )
            for parameter in parameters
        ]


def _options(request: SessionScoped, *apart: str) -> dict[str, Any]:
    """The fields that differ from their defaults, without the session's and those in `apart`."""
    return request.model_dump(mode="json", exclude_defaults=True, exclude=_SCOPE | set(apart))


def _as_call(
    session: Session, completion: Completion, *, is_bound: bool
) -> tuple[SemanticCallRequest, CallResponse]:
    """The completion as a submitted call. Its texts become values, because a text in a template
    could be parsed as a placeholder."""
    parameters: list[CallParameter] = []
    described: list[ParameterInfo] = []

    def add(name: str, var_id: str, parameter: CallParameter) -> None:
        parameters.append(parameter)
        described.append(
            ParameterInfo(
                parameter_name=name,
                is_output=parameter.is_output,
                var_name=name,
                var_id=var_id,
            )
        )

    for i, piece in enumerate(_merged(completion.fill)):
        name = f"piece_{i}"
        if isinstance(piece, TextPiece):
            add(name, "", CallParameter(name=name, value=piece.text))
        else:
            var_id = piece.variable.id
            add(name, var_id, CallParameter(name=name, var_id=var_id))
    output = completion.output
    bound_id = output.id if is_bound else None
    sampling = completion.sampling
    add(
        "answer",
        output.id,
        CallParameter(name="answer", is_output=True, var_id=bound_id, sampling_config=sampling),
    )
    call = SemanticCallRequest(
        session_id=session.id,
        template="".join(placeholder(parameter.name) for parameter in parameters),
        parameters=parameters,
        func_name=completion.options.func_name,
        models=list(completion.options.models),
        cache_prefix=completion.options.cache_prefix,
        on_demand=not completion.allows_background,
        successor_of=None if completion.previous is None else completion.previous.request_id,
    )
    return call, CallResponse(request_id=completion.request_id, param_info=described)


def _merged(fill: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, with consecutive texts merged."""
    for is_text, pieces in groupby(fill, key=lambda piece: isinstance(piece, TextPiece)):
        if is_text:
            yield TextPiece("".join(p.text for p in pieces if isinstance(p, TextPiece)))
        else:
            yield from pieces
