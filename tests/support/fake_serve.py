"""A ServeCore without engines: it answers at once, by telling what prompt an output was asked for.

The output `y` of a call gets the text "<y: PROMPT>", where PROMPT is everything before it. What a
test needs to happen otherwise is a method of `FakeServe` or a function name:

- "fail": its outputs fail with `EngineFailed`;
- "stop_halfway": its outputs begin with "half" and go no further;
- "hang": its outputs stay empty for ever.

Of several variables, those that are named first are the first to be ready."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    EngineFailed,
    NotFound,
    ParrotError,
    SessionGone,
    TimedOut,
)
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    NativeCallRequest,
    ParameterInfo,
    SemanticCallRequest,
    SessionCreateResponse,
    SessionInfo,
    StreamDelta,
    StreamDone,
    VarCreateResponse,
    VarGetResponse,
    VarValue,
)
from parrot.protocol.server import (
    create_base_app,
    event_stream,
    json_response,
    parse_payload,
    read_json,
    run_until_disconnect,
)
from parrot.protocol.template import Text, parse_template
from parrot.serve.graph.variable import SemanticVariable
from parrot.utils.ids import IdCounter
from tests.support.app_server import serve_app

Call = SemanticCallRequest | NativeCallRequest


class FakeServe:
    """Public fields are what the program sent, for tests to look at. `errors`: raised, one after
    the other, instead of answering the next requests for which it is armed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, for tests that share a server."""
        self.calls: list[Call] = []
        self.ended: list[int] = []
        self.num_requests: dict[str, int] = {}
        self.errors: dict[str, list[ParrotError]] = {}
        self.withdrawn = threading.Event()  # a reader left before the value was there
        self.reading = threading.Event()  # a read has begun
        self.chunk_size = 3
        self.ignores_timeouts = False
        self._variables: dict[str, SemanticVariable] = {}
        self._answers: dict[str | None, CallResponse] = {}
        self._submitted: dict[int, tuple[Call, dict[str, SemanticVariable]]] = {}
        self._runs: dict[int, asyncio.Task[str]] = {}
        self._producers: dict[str, int] = {}
        self._ids = IdCounter(1)

    def create_session(self) -> SessionCreateResponse:
        number = self._ids.next()
        return SessionCreateResponse(session_id=number, session_auth=f"auth-{number}")

    def end_session(self, session_id: int) -> None:
        self.ended.append(session_id)

    def check(self, name: str, session_id: int, session_auth: str | None) -> None:
        """Count the request, and refuse it if it is to be refused."""
        self.num_requests[name] = self.num_requests.get(name, 0) + 1
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        if session_id in self.ended:
            raise SessionGone("the session has ended")
        if session_auth != f"auth-{session_id}":
            raise AuthenticationFailed("wrong session_auth")

    def create_variable(self, name: str, session_id: int) -> SemanticVariable:
        var = SemanticVariable(f"v{self._ids.next()}", name, session_id)
        self._variables[var.id] = var
        return var

    def variable(self, var_id: str) -> SemanticVariable:
        if var_id not in self._variables:
            raise NotFound(f"no variable {var_id}")
        return self._variables[var_id]

    def submit(self, request: Call) -> CallResponse:
        if (known := self._answers.get(request.idempotency_key)) is not None:
            return known
        self.calls.append(request)
        values: dict[str, SemanticVariable] = {}
        infos = []
        for param in request.parameters:
            var = (
                self.variable(param.var_id)
                if param.var_id is not None
                else self.create_variable(param.name, request.session_id)
            )
            if param.value is not None:
                var.set(param.value)
            values[param.name] = var
            infos.append(
                ParameterInfo(
                    parameter_name=param.name,
                    is_output=param.is_output,
                    var_name=var.name,
                    var_id=var.id,
                )
            )
        answer = CallResponse(request_id=self._ids.next(), param_info=infos)
        self._answers[request.idempotency_key] = answer
        self._submitted[answer.request_id] = (request, values)
        for param in request.parameters:
            if param.is_output:
                self._producers[values[param.name].id] = answer.request_id
        return answer

    async def activate(self, var: SemanticVariable) -> None:
        """Produce `var`, and first what it needs."""
        if not var.is_settled and var.id in self._producers:
            await self._run(self._producers[var.id])

    async def _run(self, request_id: int) -> str:
        """Run a call once; returns its context."""
        if request_id not in self._runs:
            self._runs[request_id] = asyncio.create_task(self._produce(request_id))
        return await asyncio.shield(self._runs[request_id])

    async def _produce(self, request_id: int) -> str:
        request, values = self._submitted[request_id]
        outputs = [values[param.name] for param in request.parameters if param.is_output]
        try:
            if request.func_name == "hang":
                return ""
            if request.func_name == "stop_halfway":
                for output in outputs:
                    output.append("half")
                return ""
            if request.func_name == "fail":
                raise EngineFailed("the engine failed")
            if isinstance(request, SemanticCallRequest):
                return await self._generate(request, values, outputs)
            for output in outputs:
                output.set(request.func_source)
        except ParrotError as error:
            for output in outputs:
                if not output.is_settled:
                    output.fail(error)
        return ""

    async def _generate(
        self,
        request: SemanticCallRequest,
        values: dict[str, SemanticVariable],
        outputs: list[SemanticVariable],
    ) -> str:
        prompt = "" if request.successor_of is None else await self._run(request.successor_of)
        kept = prompt
        for piece in parse_template(request.template):
            if isinstance(piece, Text):
                prompt += piece.text
                continue
            var = values[piece.name]
            if var in outputs:
                var.set(f"<{piece.name}: {prompt}>")
                kept = prompt + var.text
            else:
                await self.activate(var)
            prompt += await var.wait()
        return kept if outputs and request.remove_pure_fill else prompt


async def _read(
    serve: FakeServe, var: SemanticVariable, timeout_s: float | None
) -> AsyncIterator[str]:
    serve.reading.set()
    try:
        async with asyncio.timeout(None if serve.ignores_timeouts else timeout_s):
            await serve.activate(var)
            async for text in var.stream():
                for start in range(0, len(text), serve.chunk_size):
                    yield text[start : start + serve.chunk_size]
    except TimeoutError:
        raise TimedOut("the read's timeout passed") from None
    finally:
        if not var.is_settled:
            serve.withdrawn.set()


async def _events(
    serve: FakeServe, var: SemanticVariable, timeout_s: float | None
) -> AsyncIterator[tuple[str, BaseModel]]:
    text = ""
    async for piece in _read(serve, var, timeout_s):
        text += piece
        yield "delta", StreamDelta(text=piece)
    yield "done", StreamDone(content=text)


async def _whole(serve: FakeServe, var: SemanticVariable, timeout_s: float | None) -> Response:
    content = "".join([piece async for piece in _read(serve, var, timeout_s)])
    return json_response(VarGetResponse(content=content))


def create_fake_app(serve: FakeServe) -> FastAPI:
    app = create_base_app("fake ServeCore", max_body_size=2**24)
    _add_session_routes(app, serve)
    _add_call_routes(app, serve)
    _add_variable_routes(app, serve)
    return app


def _add_session_routes(app: FastAPI, serve: FakeServe) -> None:
    @app.post("/v1/session")
    async def create_session() -> SessionCreateResponse:
        return serve.create_session()

    @app.delete("/v1/session/{session_id}")
    async def end_session(session_id: int, session_auth: str) -> dict[str, Any]:
        serve.check("delete", session_id, session_auth)
        serve.end_session(session_id)
        return {}

    @app.get("/v1/session/{session_id}")
    async def session_info(session_id: int, session_auth: str) -> SessionInfo:
        serve.check("info", session_id, session_auth)
        return SessionInfo(
            session_id=session_id,
            state="active",
            age_s=0,
            expires_in_s=1,
            vars=[],
            calls=[],
            edges=[],
        )


def _add_call_routes(app: FastAPI, serve: FakeServe) -> None:
    @app.post("/v1/semantic_call")
    async def semantic_call(request: Request) -> CallResponse:
        call = parse_payload(SemanticCallRequest, await read_json(request))
        serve.check("call", call.session_id, call.session_auth)
        return serve.submit(call)

    @app.post("/v1/py_native_call")
    async def native_call(request: Request) -> CallResponse:
        call = parse_payload(NativeCallRequest, await read_json(request))
        serve.check("call", call.session_id, call.session_auth)
        return serve.submit(call)


def _add_variable_routes(app: FastAPI, serve: FakeServe) -> None:
    def check_query(name: str, request: Request) -> None:
        query = request.query_params
        serve.check(name, int(query["session_id"]), query["session_auth"])

    @app.post("/v1/semantic_var")
    async def create_var(request: Request) -> VarCreateResponse:
        body = await read_json(request)
        serve.check("create_var", body["session_id"], body["session_auth"])
        var = serve.create_variable(body["var_name"], body["session_id"])
        if body["content"] is not None:
            var.set(body["content"])
        return VarCreateResponse(var_id=var.id)

    @app.post("/v1/semantic_var/{var_id}")
    async def set_var(var_id: str, request: Request) -> dict[str, Any]:
        body = await read_json(request)
        serve.check("set", body["session_id"], body["session_auth"])
        serve.variable(var_id).set(body["content"])
        return {}

    @app.get("/v1/semantic_var/{var_id}")
    async def get_var(var_id: str, request: Request, timeout: float | None = None) -> Response:
        check_query("get", request)
        return await run_until_disconnect(request, _whole(serve, serve.variable(var_id), timeout))

    @app.post("/v1/semantic_vars/first")
    async def first_vars(request: Request) -> FirstVarsResponse:
        fields = parse_payload(FirstVarsRequest, await read_json(request))
        serve.check("first", fields.session_id, fields.session_auth)
        chosen = [serve.variable(var_id) for var_id in fields.var_ids[: fields.k]]
        for var in chosen:
            await serve.activate(var)
        values = [VarValue(var_id=var.id, content=await var.wait()) for var in chosen]
        return FirstVarsResponse(values=values)

    @app.get("/v1/semantic_var/{var_id}/stream")
    async def stream_var(var_id: str, request: Request, timeout: float | None = None) -> Response:
        check_query("stream", request)
        return event_stream(_events(serve, serve.variable(var_id), timeout))

    @app.post("/v1/semantic_var/{var_id}/cancel")
    async def cancel_var(var_id: str, request: Request) -> dict[str, Any]:
        body = await read_json(request)
        serve.check("cancel", body["session_id"], body["session_auth"])
        var = serve.variable(var_id)
        if not var.is_settled:
            var.fail(Cancelled("the program cancelled it"))
        return {}


@contextmanager
def running_in_thread(app: FastAPI) -> Iterator[str]:
    """Serve an app from a thread, for blocking programs. Yields its base URL."""
    urls: list[str] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            async with serve_app(app) as url:
                urls.append(url)
                started.set()
                await stop.wait()
        finally:
            started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="fake-serve")
    thread.start()
    started.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
