"""Async client of ServeCore: the REST API for programs, registration for engines."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.engine_api import (
    EngineInfo,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    RuntimeInfo,
)
from parrot.protocol.errors import Unavailable, error_from_payload
from parrot.protocol.public import (
    CallResponse,
    FirstVarsResponse,
    ModelsResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateResponse,
    SessionInfo,
    StreamDone,
    VarCreateResponse,
    VarGetResponse,
    VarInfo,
    VarListResponse,
    VarValue,
)
from parrot.protocol.transport import Transport

T = TypeVar("T", bound=BaseModel)

READ_MARGIN_S = 10.0  # how much longer than a read's timeout the client waits for its answer


class ServeClient:
    """One method per route. `session_auth` travels in the body or query, not as a header, so that
    one client can serve many sessions."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def close(self) -> None:
        await self._http.close()

    async def _ask(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        return kind.model_validate(await self._http.request(method, path, **options))

    async def create_session(
        self,
        api_key: str | None = None,
        apps: list[str] | None = None,
        *,
        on_demand: bool = False,
    ) -> SessionCreateResponse:
        body = {"api_key": api_key, "apps": apps, "on_demand": on_demand}
        return await self._ask(SessionCreateResponse, "POST", "/v1/session", body=body)

    async def session_info(self, session_id: int, session_auth: str) -> SessionInfo:
        return await self._ask(
            SessionInfo, "GET", f"/v1/session/{session_id}", params={"session_auth": session_auth}
        )

    async def delete_session(self, session_id: int, session_auth: str) -> None:
        await self._http.request(
            "DELETE", f"/v1/session/{session_id}", params={"session_auth": session_auth}
        )

    async def semantic_call(self, request: SemanticCallRequest) -> CallResponse:
        body = request.model_dump(mode="json", exclude_defaults=True)
        return await self._ask(CallResponse, "POST", "/v1/semantic_call", body=body)

    async def native_call(self, request: NativeCallRequest) -> CallResponse:
        body = request.model_dump(mode="json", exclude_defaults=True)
        return await self._ask(CallResponse, "POST", "/v1/py_native_call", body=body)

    async def create_var(
        self, session_id: int, session_auth: str, var_name: str, content: str | None = None
    ) -> str:
        body = _scope(session_id, session_auth) | {"var_name": var_name, "content": content}
        return (await self._ask(VarCreateResponse, "POST", "/v1/semantic_var", body=body)).var_id

    async def list_vars(self, session_id: int, session_auth: str) -> list[VarInfo]:
        query = _query(session_id, session_auth)
        return (await self._ask(VarListResponse, "GET", "/v1/semantic_var", params=query)).vars

    async def set_var(self, session_id: int, session_auth: str, var_id: str, content: str) -> None:
        body = _scope(session_id, session_auth) | {"content": content}
        await self._http.request("POST", f"/v1/semantic_var/{var_id}", body=body)

    async def get_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> str:
        """The text alone of what `read_var` gives."""
        value = await self.read_var(
            session_id, session_auth, var_id, criteria, timeout_s, deadline_s
        )
        return value.content

    async def read_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> VarGetResponse:
        """Wait for the value. Cancelling this coroutine closes the connection, which withdraws the
        read at the server."""
        return await self._ask(
            VarGetResponse,
            "GET",
            f"/v1/semantic_var/{var_id}",
            params=_read_query(session_id, session_auth, criteria, timeout_s, deadline_s),
            timeout_s=None if timeout_s is None else timeout_s + READ_MARGIN_S,
        )

    async def first_vars(
        self,
        session_id: int,
        session_auth: str,
        var_ids: Sequence[str],
        k: int = 1,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> list[VarValue]:
        """Wait for the first `k` to be ready, in the order in which they were. Cancelling this
        coroutine withdraws the read."""
        body = _scope(session_id, session_auth) | {
            "var_ids": list(var_ids),
            "k": k,
            "criteria": criteria.value,
            "timeout": timeout_s,
            "deadline": deadline_s,
        }
        limit_s = None if timeout_s is None else timeout_s + READ_MARGIN_S
        path = "/v1/semantic_vars/first"
        answer = await self._ask(FirstVarsResponse, "POST", path, body=body, timeout_s=limit_s)
        return answer.values

    async def stream_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        criteria: PerformanceCriteria = PerformanceCriteria.LATENCY,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        on_done: Callable[[StreamDone], None] | None = None,
    ) -> AsyncIterator[str]:
        """Deltas of the value. Ends normally only after the server's `done` event, of which
        `on_done` is told."""
        async for event, data in self._http.stream(
            "GET",
            f"/v1/semantic_var/{var_id}/stream",
            params=_read_query(session_id, session_auth, criteria, timeout_s, deadline_s),
        ):
            if event == "delta":
                yield data["text"]
            elif event == "done":
                if on_done is not None:
                    on_done(StreamDone.model_validate(data))
                return
            elif event == "error":
                raise error_from_payload(data, 500)
        raise Unavailable("the stream ended before its final event")

    async def cancel_var(self, session_id: int, session_auth: str, var_id: str) -> None:
        await self._http.request(
            "POST", f"/v1/semantic_var/{var_id}/cancel", body=_scope(session_id, session_auth)
        )

    async def cancel_request(self, session_id: int, session_auth: str, request_id: int) -> None:
        await self._http.request(
            "POST", f"/v1/request/{request_id}/cancel", body=_scope(session_id, session_auth)
        )

    async def health(self) -> None:
        """Raises `Unavailable` unless the process answers within a few seconds."""
        await self._http.request("GET", "/health", timeout_s=10.0)

    async def models(self) -> ModelsResponse:
        return await self._ask(ModelsResponse, "GET", "/v1/models")

    async def register_engine(self, engine: EngineInfo) -> int:
        body = RegisterRequest(engine_config=engine).model_dump(mode="json")
        return (await self._ask(RegisterResponse, "POST", "/register_engine", body=body)).engine_id

    async def engine_heartbeat(
        self, engine_id: int, engine_name: str, runtime_info: RuntimeInfo
    ) -> HeartbeatResponse:
        request = HeartbeatRequest(
            engine_id=engine_id, engine_name=engine_name, runtime_info=runtime_info
        )
        return await self._ask(
            HeartbeatResponse, "POST", "/engine_heartbeat", body=request.model_dump()
        )


def _scope(session_id: int, session_auth: str) -> dict[str, Any]:
    return {"session_id": session_id, "session_auth": session_auth}


def _query(session_id: int, session_auth: str) -> dict[str, str]:
    return {"session_id": str(session_id), "session_auth": session_auth}


def _read_query(
    session_id: int,
    session_auth: str,
    criteria: PerformanceCriteria,
    timeout_s: float | None,
    deadline_s: float | None,
) -> dict[str, str]:
    query = _query(session_id, session_auth) | {"criteria": criteria.value}
    limits = {"timeout": timeout_s, "deadline": deadline_s}
    return query | {name: repr(limit) for name, limit in limits.items() if limit is not None}
