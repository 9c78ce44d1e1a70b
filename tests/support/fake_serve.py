"""The real ServeCore with scripted errors. Its engine writes the prompt into the output.

The text of an output is "<PROMPT>", where PROMPT is the text before the output. Prompts with one of
these first words have another result:

- "fail": the engine fails;
- "halfway": the output is "half" and does not finish;
- "hang": the output is empty and does not finish.

The output of a native function is the source of the function."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.protocol.answers import error_response
from parrot.protocol.engine_api import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import EngineFailed, ParrotError
from parrot.protocol.public import NativeCallRequest, ReadLimits, SemanticCallRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.events import CallAdded, ReadBegan, ReadEnded, SessionDeleted, Sink
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import NativeCall
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import running_in_thread
from tests.support.fake_engine import FakeEngine, fake_engine, register

_CHUNK = 3  # In characters.
_ROUTES = {
    "call": r"POST /v1/(semantic|py_native)_call",
    "graph": r"POST /v1/semantic_graph",
    "create_var": r"POST /v1/semantic_var",
    "set": r"POST /v1/semantic_var/[^/]+",
    "get": r"GET /v1/semantic_var/[^/]+",
    "delete": r"DELETE /v1/session/[^/]+",
}


class PromptTeller(FakeEngine):
    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        self._fill(request.fills)
        contents = self.contexts[request.context_id]
        prompt = self._decode(contents)
        if prompt.startswith("fail"):
            raise EngineFailed("the engine failed")
        if prompt.startswith("hang"):
            await asyncio.Event().wait()
        text = "half" if prompt.startswith("halfway") else f"<{prompt}>"
        for start in range(0, len(text), _CHUNK):
            chunk = text[start : start + _CHUNK]
            contents.extend(self._encode(chunk))
            yield StreamChunk(ids=self._encode(chunk), text=chunk)
            await asyncio.sleep(0)
        if prompt.startswith("halfway"):
            await asyncio.Event().wait()
        yield GenerateResponse(
            generated_text=text,
            generated_ids=self._encode(text),
            finish_reason=FinishReason.STOP,
            usage=Usage(output_tokens=len(text)),
        )


class SourceTeller:
    """A sandbox that returns the source of a function instead of running it."""

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        return [call.source for _ in call.results]

    async def close(self) -> None: ...


class FakeServe:
    """Records the requests of the program in public fields. `errors` has, by request name, the
    errors for the next requests, in this order. `_ROUTES` has the names."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear all fields, for tests that share a server."""
        self.calls: list[SemanticCallRequest | NativeCallRequest] = []
        self.ended: list[int] = []
        self.reads: list[ReadLimits] = []
        self.num_requests: dict[str, int] = {}
        self.clients: set[tuple[str, int]] = set()  # Addresses of connections.
        self.errors: dict[str, list[ParrotError]] = {}
        self.reading = threading.Event()  # Set when a read starts.
        self.withdrawn = threading.Event()  # Set when a read ends without a value.
        self.ignores_timeouts = False

    @property
    def sink(self) -> Sink:
        return {
            CallAdded: lambda event: self.calls.append(event.request),
            SessionDeleted: lambda event: self.ended.append(event.session.id),
            ReadBegan: self._read_began,
            ReadEnded: self._read_ended,
        }

    def _read_began(self, event: ReadBegan) -> None:
        self.reads.append(event.options)
        self.reading.set()

    def _read_ended(self, event: ReadEnded) -> None:
        if event.error is not None:
            self.withdrawn.set()

    def disturbed(self, app: ASGIApp) -> ASGIApp:
        """The app with `errors`. With `ignores_timeouts`, requests have no timeouts."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            errors = []
            if scope["type"] == "http":
                self.clients.add(scope["client"])
                request = f"{scope['method']} {scope['path']}"
                for name, route in _ROUTES.items():
                    if re.fullmatch(route, request):
                        self.num_requests[name] = self.num_requests.get(name, 0) + 1
                        errors = self.errors.get(name, [])
                if self.ignores_timeouts:
                    query = re.sub(rb"timeout=[^&]*", b"", scope["query_string"])
                    scope = {**scope, "query_string": query}
            answered = error_response(Request(scope), errors.pop(0)) if errors else app
            await answered(scope, receive, send)

        return answer


@contextmanager
def running_fake_serve() -> Iterator[tuple[FakeServe, str]]:
    """Yields a fake and its URL."""
    serve = FakeServe()
    config, clock = CoreConfig(engine_heartbeat_timeout=1e6), MonotonicClock()
    plain = fake_engine(max_seq_len=10**6, tokens_capacity=10**7)
    engine = PromptTeller(plain.info, plain.tokenizer_response)
    core = ServeCore(
        config,
        clock=clock,
        dispatcher=Dispatcher(config, clock, lambda _: engine),
        sandbox=SourceTeller(),
        sinks=[serve.sink],
    )
    with running_in_thread(serve.disturbed(create_app(core))) as url:
        asyncio.run(register(url, engine))
        yield serve, url
