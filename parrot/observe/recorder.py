"""Recording what programs ask, to replay it under other settings (`parrot simulate`)."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from parrot.protocol import trace
from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionScoped,
)
from parrot.protocol.template import Text, parse_template
from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.graph.nodes import NativeCall
from parrot.serve.graph.variable import VariableState
from parrot.serve.observers import ObservedRead, Observer
from parrot.serve.sessions import Session
from parrot.serve.views import session_steps, session_view
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError
from parrot.utils.private_files import open_private

logger = logging.getLogger(__name__)

_ID_BYTES = 8
_SCOPE = {"session_id", "session_auth", "idempotency_key"}


class TraceFile:
    """A `TraceSink` that writes a file. What happened before a session's end is on disk then."""

    def __init__(self, path: str) -> None:
        """Begins the file anew. Raises `ConfigError` if it cannot be written."""
        try:
            self._file = open_private(path, is_new=True)
        except OSError as error:
            raise ConfigError(f"trace_path: {path}: {error.strerror}") from None

    def __call__(self, event: trace.TraceEvent) -> None:
        """Raises `OSError`, for example when the disk is full."""
        payload = event.model_dump(mode="json", exclude_defaults=True) | {"event": event.event}
        self._file.write(orjson.dumps(payload) + b"\n")
        if isinstance(event, trace.SessionEnded | trace.TraceHeader):
            self._file.flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.error("the end of the trace is lost: %s", error)


class Recorder(Observer):
    """Makes a trace event of whatever it is told. Texts become their lengths and
    salted hashes."""

    def __init__(self, sink: trace.TraceSink, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._began = clock.now()
        self._salt = secrets.token_bytes(16)
        self._known: set[int] = set()  # the sessions that began while it records
        sink(trace.TraceHeader())

    def engine_registered(self, info: EngineInfo) -> None:
        self._sink(trace.EngineJoined(at=self._at(), engine=info))

    def session_created(self, session: Session, request: SessionCreateRequest) -> None:
        self._known.add(session.id)
        tenant = self._text(session.tenant).ids[0]
        self._note(trace.SessionBegan, session, tenant=tenant, on_demand=request.on_demand)

    def session_deleted(self, session: Session) -> None:
        self._note(trace.SessionDeleted, session)

    def session_ended(self, session: Session) -> None:
        native_outputs = [
            variable
            for call in session.graph.calls.values()
            for task in call.tasks
            if isinstance(task, NativeCall)
            for variable in task.outputs
        ]
        self._note(
            trace.SessionEnded,
            session,
            calls=session_view(session_steps(session, self._clock.now(), 0.0)).calls,
            native_texts={
                variable.id: self._text(variable.text)
                for variable in native_outputs
                if variable.state is VariableState.READY
            },
        )
        self._known.discard(session.id)

    def call_submitted(
        self,
        session: Session,
        request: SemanticCallRequest | NativeCallRequest,
        response: CallResponse,
    ) -> None:
        fields: dict[str, Any] = {
            "request_id": response.request_id,
            "parameters": self._parameters(request.parameters, response),
        }
        if isinstance(request, SemanticCallRequest):
            options = _options(request, "template", "parameters", "system")
            pieces = self._pieces(request)
            self._note(trace.CallSubmitted, session, **fields, pieces=pieces, options=options)
        else:
            options = _options(request, "func_name", "func_source", "parameters")
            name = request.func_name
            self._note(trace.NativeSubmitted, session, **fields, func_name=name, options=options)

    def variable_created(
        self, session: Session, var_id: str, name: str, content: str | None
    ) -> None:
        value = None if content is None else self._text(content)
        self._note(trace.VariableCreated, session, var_id=var_id, name=name, value=value)

    def variable_set(self, session: Session, var_id: str, content: str) -> None:
        self._note(trace.VariableSet, session, var_id=var_id, value=self._text(content))

    def cancel_asked(
        self, session: Session, *, request_id: int | None = None, var_id: str | None = None
    ) -> None:
        self._note(trace.CancelAsked, session, request_id=request_id, var_id=var_id)

    def read_began(self, session: Session, read: ObservedRead) -> None:
        self._note(
            trace.ReadBegan,
            session,
            read_id=read.id,
            var_ids=list(read.var_ids),
            k=read.k,
            is_stream=read.is_stream,
            options=_options(read.options, "var_ids", "k"),
        )

    def read_ended(self, session: Session, read: ObservedRead, error: BaseException | None) -> None:
        outcome = None
        if isinstance(error, ParrotError):
            outcome = error.type
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = trace.WITHDRAWN
        self._note(trace.ReadEnded, session, read_id=read.id, error=outcome)

    def core_closed(self, kv: KvCounts) -> None:
        recomputed = kv.recomputed.total()
        self._sink(
            trace.TraceEnded(at=self._at(), hit=kv.hit, recomputed=recomputed, evicted=kv.evicted)
        )

    def _note(self, kind: type[trace.SessionEvent], session: Session, **fields: Any) -> None:
        if session.id in self._known:
            self._sink(kind(at=self._at(), session_id=session.id, **fields))

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
            self._text(piece.text) if isinstance(piece, Text) else piece.name
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
    """The fields that are not the default, without the session's and those kept `apart`."""
    return request.model_dump(mode="json", exclude_defaults=True, exclude=_SCOPE | set(apart))
