"""The async client of ServeCore's REST API for programs."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, TypeVar, Unpack

from pydantic import BaseModel

from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    CallResponse,
    FirstVarsResponse,
    GraphRequest,
    GraphResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateResponse,
    SessionInfo,
    StreamDelta,
    StreamDone,
    VarCreateResponse,
    VarGetResponse,
    VarValue,
)
from parrot.protocol.transport import (
    RequestOptions,
    Transport,
    read_answer,
    until_done,
)

T = TypeVar("T", bound=BaseModel)

_IN_HEAD = {"session_auth"}
_READ_MARGIN_S = 10.0  # Seconds that a client waits for an answer beyond the read's timeout.


class ReadParams(TypedDict, total=False):
    """Options of a read that differ from the server's defaults."""

    criteria: PerformanceCriteria
    timeout_s: float | None
    deadline_s: float | None
    blocked: bool


class ServeClient:
    """One method per route. `session_auth` is the Bearer token of each request, so one client can
    serve many sessions."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def close(self) -> None:
        await self._http.close()

    async def _ask(
        self, kind: type[T], method: str, path: str, **options: Unpack[RequestOptions]
    ) -> T:
        return read_answer(kind, await self._http.request(method, path, **options))

    async def create_session(
        self,
        api_key: str | None = None,
        apps: list[str] | None = None,
        *,
        on_demand: bool = False,
        traceparent: str | None = None,
    ) -> SessionCreateResponse:
        body = {"api_key": api_key, "apps": apps, "on_demand": on_demand}
        if traceparent is not None:
            body["traceparent"] = traceparent
        return await self._ask(SessionCreateResponse, "POST", "/v1/session", body=body)

    async def session_info(self, session_id: int, session_auth: str) -> SessionInfo:
        return await self._ask(SessionInfo, "GET", f"/v1/session/{session_id}", bearer=session_auth)

    async def delete_session(self, session_id: int, session_auth: str) -> None:
        await self._http.request("DELETE", f"/v1/session/{session_id}", bearer=session_auth)

    async def semantic_call(self, request: SemanticCallRequest) -> CallResponse:
        body = request.model_dump(mode="json", exclude_defaults=True, exclude=_IN_HEAD)
        auth = request.session_auth
        return await self._ask(CallResponse, "POST", "/v1/semantic_call", body=body, bearer=auth)

    async def native_call(self, request: NativeCallRequest) -> CallResponse:
        body = request.model_dump(mode="json", exclude_defaults=True, exclude=_IN_HEAD)
        auth = request.session_auth
        return await self._ask(CallResponse, "POST", "/v1/py_native_call", body=body, bearer=auth)

    async def semantic_graph(self, request: GraphRequest) -> GraphResponse:
        body = request.model_dump(mode="json", exclude_defaults=True, exclude=_IN_HEAD)
        auth = request.session_auth if request.session is None else request.session.api_key
        return await self._ask(GraphResponse, "POST", "/v1/semantic_graph", body=body, bearer=auth)

    async def create_var(
        self, session_id: int, session_auth: str, var_name: str, content: str | None = None
    ) -> str:
        body = {"session_id": session_id, "var_name": var_name, "content": content}
        answer = await self._ask(
            VarCreateResponse, "POST", "/v1/semantic_var", body=body, bearer=session_auth
        )
        return answer.var_id

    async def set_var(self, session_id: int, session_auth: str, var_id: str, content: str) -> None:
        body = {"session_id": session_id, "content": content}
        await self._http.request(
            "POST", f"/v1/semantic_var/{var_id}", body=body, bearer=session_auth
        )

    async def get_var(
        self, session_id: int, session_auth: str, var_id: str, **options: Unpack[ReadParams]
    ) -> str:
        """As `read_var`, but returns only the text."""
        return (await self.read_var(session_id, session_auth, var_id, **options)).content

    async def read_var(
        self, session_id: int, session_auth: str, var_id: str, **options: Unpack[ReadParams]
    ) -> VarGetResponse:
        """Wait for the value. Cancelling this coroutine closes the connection, and the server
        withdraws the read."""
        return await self._ask(
            VarGetResponse,
            "GET",
            f"/v1/semantic_var/{var_id}",
            params=_query({"session_id": session_id} | _read_params(options)),
            bearer=session_auth,
            timeout_s=_read_timeout_s(options),
        )

    async def first_vars(
        self,
        session_id: int,
        session_auth: str,
        var_ids: Sequence[str],
        k: int = 1,
        **options: Unpack[ReadParams],
    ) -> list[VarValue]:
        """Wait until `k` variables are ready. Returns them in the order in which they became ready.
        Cancelling this coroutine withdraws the read."""
        fields = {"session_id": session_id, "var_ids": list(var_ids), "k": k}
        answer = await self._ask(
            FirstVarsResponse,
            "POST",
            "/v1/semantic_vars/first",
            body=fields | _read_params(options),
            bearer=session_auth,
            timeout_s=_read_timeout_s(options),
        )
        return answer.values

    async def stream_var(
        self,
        session_id: int,
        session_auth: str,
        var_id: str,
        on_done: Callable[[StreamDone], None] | None = None,
        **options: Unpack[ReadParams],
    ) -> AsyncIterator[str]:
        """Yield the deltas of the value. The iteration ends after the server's `done` event, which
        `on_done` receives. Otherwise it raises an error."""
        params = {"criteria": PerformanceCriteria.LATENCY} | _read_params(options)
        query = _query({"session_id": session_id} | params)
        path = f"/v1/semantic_var/{var_id}/stream"
        stream = self._http.stream("GET", path, params=query, bearer=session_auth)
        async with aclosing(until_done(stream)) as events:
            async for name, data in events:
                if name == "delta":
                    yield read_answer(StreamDelta, data).text
                elif name == "done" and on_done is not None:
                    on_done(read_answer(StreamDone, data))

    async def cancel_var(self, session_id: int, session_auth: str, var_id: str) -> None:
        await self._http.request(
            "POST",
            f"/v1/semantic_var/{var_id}/cancel",
            body={"session_id": session_id},
            bearer=session_auth,
        )

    async def health(self) -> None:
        """Raises `Unavailable` unless the server answers within 10 s."""
        await self._http.request("GET", "/health", timeout_s=10.0)


def _read_params(options: ReadParams) -> dict[str, Any]:
    """The options under the server's names. Options that are None or False are omitted."""
    named = {name.removesuffix("_s"): value for name, value in options.items()}
    return {name: value for name, value in named.items() if value not in (None, False)}


def _query(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


def _read_timeout_s(options: ReadParams) -> float | None:
    """The client's timeout for a read, in seconds. None: no timeout."""
    timeout_s = options.get("timeout_s")
    return None if timeout_s is None else timeout_s + _READ_MARGIN_S
