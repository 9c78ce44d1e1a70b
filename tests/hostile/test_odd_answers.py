"""Invalid answers with status 200, from engines to ServeCore and from ServeCore to engines. The
caller gets an ordinary error, and other work continues."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from parrot.engine.app import Fence, ReorderBuffer
from parrot.engine.config import SimConfig
from parrot.engine.heartbeat import Heartbeat, Registered
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import (
    EmbedRequest,
    EngineInfo,
    EngineType,
    FillRequest,
    GenerateRequest,
    RuntimeInfo,
    ScoreRequest,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import InternalError, ParrotError
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.transport import EventParser
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from parrot.utils.logs import LastWarning
from tests.support.app_server import serve_app

ODD: list[Any] = [
    *(None, True, 5, "text", [], {}, {"a": 1}, [[]], {"engine_id": "x"}, {"engine_id": 2.5}),
    {"state": "maybe"},
    {"generated_text": 5, "generated_ids": ["x"], "finish_reason": "bored", "usage": []},
    {"generated_text": "", "generated_ids": [2**70], "finish_reason": "stop", "usage": {}},
    {"generated_text": "", "generated_ids": [], "finish_reason": "stop", "usage": {"steps": -1}},
    {"context_len": "many"},
    {"runtime_info": {"num_cached_tokens": "x"}},
    {"embeddings": 5, "logprobs": {}},
]
ODD_EVENTS = [
    b"event: chunk\ndata: 5\n\n",
    b"event: chunk\ndata: {\n\n",
    b"event: error\ndata: {\n\n",
    b"event: error\ndata: []\n\n",
    b"event: \xff\xfe\ndata: {}\n\n",
    b"event: open\ndata: {}\n\nevent: open\ndata: {}\n\n",
    b"event: chunks\ndata: 7\n\n",
    b"event: done\ndata: []\n\n",
    b"",
]


class Odd:
    """A server that answers every request with `answer`."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.asked = asyncio.Event()
        methods = ["GET", "POST"]
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])

    async def _answer(self, request: Request) -> Response:
        self.asked.set()
        if isinstance(self.answer, Response):
            return self.answer
        if isinstance(self.answer, bytes):
            return Response(self.answer, media_type="text/event-stream")
        return Response(json.dumps(self.answer), media_type="application/json")


@pytest.fixture
async def odd() -> AsyncIterator[tuple[Odd, str]]:
    odd = Odd()
    async with serve_app(odd.app) as url:
        yield odd, url


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("answer", ODD, ids=str)
async def test_clients_raise_parrot_errors(odd: tuple[Odd, str], answer: Any) -> None:
    odd[0].answer = answer
    async with HttpClient(odd[1]) as http:
        engine, core = EngineClient(http), RegistrationClient(http)
        verbs = [
            engine.fill(FillRequest(context_id=1)),
            engine.generate(GenerateRequest(context_id=1)),
            engine.embed(EmbedRequest(inputs=["a"])),
            engine.score(ScoreRequest(inputs=["a"])),
            engine.free_contexts([1]),
            engine.ping(),
            engine.tokenizer(),
            core.engine_heartbeat(1, "e", RuntimeInfo()),
            ServeClient(http).create_session(),
        ]
        for verb in verbs:
            with suppress(InternalError):
                await verb  # some answers are valid for some requests


ZEROS = b"0" * 2**20


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(16):
        yield ZEROS[: 2**16]


LARGE = {
    "whole": lambda: Response(ZEROS),
    "in pieces": lambda: StreamingResponse(pieces()),
    "packed": lambda: Response(gzip.compress(ZEROS), headers={"Content-Encoding": "gzip"}),
    "an error": lambda: Response(ZEROS, 500),
}


@pytest.mark.parametrize("name", LARGE)
async def test_the_size_of_an_answer_is_limited(
    odd: tuple[Odd, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.protocol.http._MAX_ANSWER", 2**18)
    async with HttpClient(odd[1]) as http:
        odd[0].answer = LARGE[name]()
        with pytest.raises(InternalError, match="more than 262144 bytes"):
            await http.request("GET", "/")
        odd[0].answer = Response(gzip.compress(b"[7]"), headers={"Content-Encoding": "gzip"})
        assert await http.request("GET", "/") == [7]


@pytest.mark.parametrize("events", ODD_EVENTS, ids=str)
async def test_streams_raise_parrot_errors(odd: tuple[Odd, str], events: bytes) -> None:
    odd[0].answer = events
    async with HttpClient(odd[1]) as http:
        engine = EngineClient(http)
        for stream in (engine.generate_stream(GenerateRequest(context_id=1)), engine.follow(1)):
            if events.startswith(b"event: done") and stream.__name__ == "followed":
                continue  # `follow` ignores this event
            with pytest.raises(ParrotError):
                await drained(stream)
        with pytest.raises(ParrotError):
            await engine.generate(GenerateRequest(context_id=1), lambda _: None)
        await engine.close()


async def test_an_engine_retries_after_an_invalid_answer_to_its_registration(
    odd: tuple[Odd, str],
) -> None:
    server, url = odd
    service, reorder = SimService(SimConfig()), ReorderBuffer(MonotonicClock())
    await service.start()
    async with HttpClient(url) as http:
        heartbeat = Heartbeat(
            RegistrationClient(http), service, reorder, Fence(), MonotonicClock(),
            Registered(0.01, [("127.0.0.1", 1)]), LastWarning(),
        )  # fmt: skip
        running = asyncio.create_task(heartbeat.run())
        answers = [{"a": 1}, {"engine_id": 1}, {"state": "maybe"}, [], {"state": "ok"}]
        for answer in answers:  # an invalid registration, a valid one, then heartbeats
            server.answer = answer
            server.asked.clear()
            await asyncio.wait_for(server.asked.wait(), 10)
            await asyncio.sleep(0.05)
            assert not running.done(), running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await service.close()


@pytest.mark.parametrize("answer", [5, {}, ODD[12], ODD[13], b"event: chunk\ndata: {\n\n"], ids=str)
async def test_calls_fail_on_an_engine_that_sends_invalid_answers(
    odd: tuple[Odd, str], answer: Any
) -> None:
    server, url = odd
    core = ServeCore(CoreConfig(no_engine_timeout=0.1))
    info = EngineInfo(
        engine_type=EngineType.OPENAI,
        engine_name="odd",
        model="m",
        host="127.0.0.1",
        port=int(url.rpartition(":")[2]),
        max_seq_len=1000,
        tokens_capacity=1000,
    )
    async with serve_app(create_app(core)) as core_url, HttpClient(core_url) as http:
        await RegistrationClient(http).register_engine(info)
        server.answer = answer
        client = ServeClient(http)
        made = await client.create_session()
        scope = {"session_id": made.session_id, "session_auth": made.session_auth}
        call = SemanticCallRequest(
            **scope, template="Go {{y}}", parameters=[CallParameter(name="y", is_output=True)]
        )
        for is_stream in (False, True):
            response = await client.semantic_call(call)
            var_id = response.param_info[0].var_id
            reading = (
                drained(client.stream_var(**scope, var_id=var_id))
                if is_stream
                else client.get_var(**scope, var_id=var_id, timeout_s=10)
            )
            with pytest.raises(ParrotError):
                await reading
        core.check_integrity()


@pytest.mark.parametrize(
    "piece", [b"x" * 2**16, b"data: %b\n" % (b"x" * 2**16)], ids=["line", "data"]
)
def test_a_long_event_is_not_copied_for_each_piece(piece: bytes) -> None:
    """With a copy for each piece, 64 MiB in pieces of 64 KiB took a minute."""
    parser = EventParser()
    for _ in range(1023):
        assert not list(parser.feed(piece))
    with pytest.raises(InternalError, match="too large"):
        list(parser.feed(piece * 2))
