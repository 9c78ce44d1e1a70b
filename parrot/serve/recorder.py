"""Recording what programs ask, to replay it under other settings (`parrot simulate`)."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, BinaryIO

import orjson

from parrot.protocol.engine_api import RegisterRequest, RegisterResponse
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    VarGetRequest,
)
from parrot.protocol.template import Text, parse_template
from parrot.protocol.trace import (
    CHUNK_CHARS,
    AnyTraceEvent,
    CallSubmitted,
    CancelAsked,
    EngineJoined,
    NativeSubmitted,
    ReadBegan,
    ReadEnded,
    SessionBegan,
    SessionDeleted,
    SessionEnded,
    TraceEnded,
    TraceHeader,
    TraceParameter,
    TraceSink,
    TraceText,
    VariableCreated,
    VariableSet,
)
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import NativeCall
from parrot.serve.graph.variable import VariableState
from parrot.serve.sessions import Session
from parrot.serve.views import session_view
from parrot.utils.config import ConfigError
from parrot.utils.ids import IdCounter

_ID_BYTES = 8
_SCOPE = {"session_id", "session_auth", "idempotency_key"}


class TraceFile:
    """A `TraceSink` that writes a file. What happened before a session's end is on disk then."""

    def __init__(self, path: str) -> None:
        """Begins the file anew. Raises `ConfigError` if it cannot be written."""
        try:
            self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise ConfigError(f"trace_path: {path}: {error.strerror}") from None

    def __call__(self, event: AnyTraceEvent) -> None:
        payload = event.model_dump(mode="json", exclude_defaults=True) | {"event": event.event}
        self._file.write(orjson.dumps(payload) + b"\n")
        if isinstance(event, SessionEnded | TraceHeader):
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TracingCore(ServeCore):
    """A ServeCore that tells `sink` of all that programs do."""

    def __init__(self, *args: Any, sink: TraceSink, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sink = sink
        self._began = self._clock.now()
        self._salt = secrets.token_bytes(16)
        self._read_ids = IdCounter()
        sink(TraceHeader())

    async def register_engine(self, request: RegisterRequest) -> RegisterResponse:
        response = await super().register_engine(request)
        self._sink(EngineJoined(at=self._at(), engine=request.engine_config))
        return response

    async def close(self) -> None:
        await super().close()
        counts = self._dispatcher.kv_counts()
        self._sink(
            TraceEnded(
                at=self._at(),
                hit=counts.hit,
                recomputed=counts.recomputed.total(),
                evicted=counts.evicted,
            )
        )

    def create_session(self, request: SessionCreateRequest) -> SessionCreateResponse:
        created = super().create_session(request)
        tenant = self._sessions.authenticate(created.session_id, created.session_auth).tenant
        self._sink(
            SessionBegan(
                at=self._at(),
                session_id=created.session_id,
                tenant=self._text(tenant).ids[0],
                on_demand=request.on_demand,
            )
        )
        return created

    def delete_session(self, session_id: int, session_auth: str | None) -> None:
        self._sessions.authenticate(session_id, session_auth)
        self._sink(SessionDeleted(at=self._at(), session_id=session_id))
        super().delete_session(session_id, session_auth)

    def submit_call(self, request: SemanticCallRequest) -> CallResponse:
        is_new = self._is_new(request)
        response = super().submit_call(request)
        if is_new:
            pieces: list[TraceText | str] = [
                self._text(piece.text) if isinstance(piece, Text) else piece.name
                for piece in parse_template(request.template)
            ]
            if request.system is not None:
                pieces.insert(0, self._text(request.system))
            self._sink(
                CallSubmitted(
                    at=self._at(),
                    session_id=request.session_id,
                    request_id=response.request_id,
                    pieces=pieces,
                    parameters=self._parameters(request.parameters, response),
                    options=_options(request, "template", "parameters", "system"),
                )
            )
        return response

    def submit_native(self, request: NativeCallRequest) -> CallResponse:
        is_new = self._is_new(request)
        response = super().submit_native(request)
        if is_new:
            self._sink(
                NativeSubmitted(
                    at=self._at(),
                    session_id=request.session_id,
                    request_id=response.request_id,
                    func_name=request.func_name,
                    parameters=self._parameters(request.parameters, response),
                    options=_options(request, "func_name", "func_source", "parameters"),
                )
            )
        return response

    def cancel_call(self, session_id: int, session_auth: str | None, request_id: int) -> None:
        super().cancel_call(session_id, session_auth, request_id)
        self._sink(CancelAsked(at=self._at(), session_id=session_id, request_id=request_id))

    def create_var(
        self, session_id: int, session_auth: str | None, var_name: str, content: str | None
    ) -> str:
        var_id = super().create_var(session_id, session_auth, var_name, content)
        value = None if content is None else self._text(content)
        self._sink(
            VariableCreated(
                at=self._at(), session_id=session_id, var_id=var_id, name=var_name, value=value
            )
        )
        return var_id

    def set_var(self, session_id: int, session_auth: str | None, var_id: str, content: str) -> None:
        super().set_var(session_id, session_auth, var_id, content)
        self._sink(
            VariableSet(
                at=self._at(), session_id=session_id, var_id=var_id, value=self._text(content)
            )
        )

    def cancel_var(self, session_id: int, session_auth: str | None, var_id: str) -> None:
        super().cancel_var(session_id, session_auth, var_id)
        self._sink(CancelAsked(at=self._at(), session_id=session_id, var_id=var_id))

    def settled(self, request: VarGetRequest, var_id: str) -> str | None:
        value = super().settled(request, var_id)
        if value is not None:
            with self._read(request, [var_id]):
                pass
        return value

    async def read(self, request: VarGetRequest, var_id: str) -> str:
        with self._read(request, [var_id]):
            return await super().read(request, var_id)

    async def first(self, request: FirstVarsRequest) -> FirstVarsResponse:
        with self._read(request, request.var_ids, k=request.k):
            return await super().first(request)

    def stream(self, request: VarGetRequest, var_id: str) -> AsyncGenerator[str]:
        return self._traced(super().stream(request, var_id), request, var_id)

    async def _traced(
        self, deltas: AsyncGenerator[str], request: VarGetRequest, var_id: str
    ) -> AsyncGenerator[str]:
        with self._read(request, [var_id], is_stream=True):
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta

    def _end(self, session: Session, error: ParrotError) -> None:
        super()._end(session, error)
        natives = [
            variable
            for call in session.graph.calls.values()
            for node in call.tasks
            if isinstance(node.task, NativeCall)
            for variable in node.task.outputs()
        ]
        self._sink(
            SessionEnded(
                at=self._at(),
                session_id=session.id,
                calls=session_view(session, self._clock.now(), 0.0).calls,
                native_texts={
                    v.id: self._text(v.text) for v in natives if v.state is VariableState.READY
                },
            )
        )

    @contextmanager
    def _read(
        self, request: VarGetRequest | FirstVarsRequest, var_ids: list[str], **how: Any
    ) -> Iterator[None]:
        read_id, session_id, error = self._read_ids.next(), request.session_id, None
        options = _options(request, "var_ids", "k")
        self._sink(
            ReadBegan(
                at=self._at(),
                session_id=session_id,
                read_id=read_id,
                var_ids=var_ids,
                options=options,
                **how,
            )
        )
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            error = "withdrawn"
            raise
        except ParrotError as failure:
            error = failure.type
            raise
        finally:
            self._sink(
                ReadEnded(at=self._at(), session_id=session_id, read_id=read_id, error=error)
            )

    def _at(self) -> float:
        return self._clock.now() - self._began

    def _text(self, text: str) -> TraceText:
        digest = hashlib.blake2b(key=self._salt, digest_size=_ID_BYTES)
        ids = []
        for start in range(0, len(text), CHUNK_CHARS):
            digest.update(text[start : start + CHUNK_CHARS].encode("utf-8", "surrogatepass"))
            ids.append(digest.hexdigest())
        return TraceText(chars=len(text), ids=ids)

    def _is_new(self, request: SemanticCallRequest | NativeCallRequest) -> bool:
        session = self._sessions.authenticate(request.session_id, request.session_auth)
        return not session.graph.is_known(request)

    def _parameters(
        self, parameters: list[CallParameter], response: CallResponse
    ) -> list[TraceParameter]:
        var_ids = {info.parameter_name: info.var_id for info in response.param_info}
        return [
            TraceParameter(
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


def _options(
    request: SemanticCallRequest | NativeCallRequest | VarGetRequest | FirstVarsRequest,
    *apart: str,
) -> dict[str, Any]:
    """The fields that are not the default, without the session's and those kept `apart`."""
    return request.model_dump(mode="json", exclude_defaults=True, exclude=_SCOPE | set(apart))
