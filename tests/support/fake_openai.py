"""A small OpenAI-compatible server with scripted faults.

Its model answers each prompt with the words of `reply`. Each word is a token."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from tests.support.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Fault:
    """A response that replaces the model's answer. If a stream breaks, the status is 200."""

    status: int = 500
    body: Any = None  # With `after_chunks`, an error frame. None: the stream ends without one.
    headers: Mapping[str, str] = field(default_factory=dict)
    after_chunks: int | None = None  # The stream breaks after this number of chunks.
    is_tidy: bool = False  # A stream without `body` still sends the last frame, `[DONE]`.


@dataclass
class FakeOpenAI:
    """The server's answers and faults, and records of its requests."""

    reply: str = "one two three"
    models: tuple[str, ...] = ("gpt-fake",)
    owned_by: str = "openai"
    max_model_len: int | None = None
    models_status: int = 200
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    cached_tokens: int | None = None
    counts_in_streams: bool = True
    end_token: str = "<end>"
    responses: dict[str, Any] = field(default_factory=dict)  # Responses of other paths.
    cache: PrefixCache | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # More fields of each message or delta.
    more_of_answer: dict[str, Any] = field(default_factory=dict)
    # Answers wait until it is set. Streams wait after the first word.
    hold: asyncio.Event | None = None
    faults: list[Fault] = field(default_factory=list)  # Each request uses one until none is left.
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    arrivals: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    # Set when a client disconnects before the end of its answer.
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    word_s: float = 0.0  # Delay of a stream before each word but the first.
    num_open: int = 0
    max_open: int = 0

    async def wait_for_requests(self, count: int = 1) -> None:
        """Wait for `count` more requests since the last call."""
        for _ in range(count):
            await self.arrivals.acquire()

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        for prefix in ("/v1", "/openai/deployments/{deployment}"):
            app.post(prefix + "/completions")(self._completions)
            app.post(prefix + "/chat/completions")(self._completions)
            app.post(prefix + "/embeddings")(self._embeddings)
        app.get("/{path:path}")(self._other_paths)
        return app

    async def _other_paths(self, path: str) -> Response:
        response = self.responses.get(f"/{path}")
        if response is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return PlainTextResponse(response) if isinstance(response, str) else JSONResponse(response)

    async def _models(self) -> Response:
        cards = [
            {"id": name, "owned_by": self.owned_by, "max_model_len": self.max_model_len}
            for name in self.models
        ]
        return JSONResponse({"object": "list", "data": cards}, self.models_status)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.urls.append(str(request.url))
        self.arrivals.release()
        fault = self._next_fault()
        if fault is not None and fault.after_chunks is None:
            return JSONResponse(fault.body, fault.status, headers=dict(fault.headers))
        is_chat = request.url.path.endswith("/chat/completions")
        if body.get("stream"):
            events = self._events(body, is_chat, fault)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(request, body, is_chat)

    def _next_fault(self) -> Fault | None:
        return self.faults.pop(0) if self.faults else None

    async def _embeddings(self, request: Request) -> Response:
        """Vectors that contain the lengths of their inputs, in reverse order."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.faults:
            fault = self.faults.pop(0)
            return JSONResponse(fault.body, fault.status, headers=dict(fault.headers))
        lengths = [len(given) for given in body["input"]]
        data = [{"index": i, "embedding": [n, 0.5]} for i, n in enumerate(lengths)]
        return JSONResponse({"data": data[::-1], "usage": {"prompt_tokens": sum(lengths)}})

    def _words(self, body: Mapping[str, Any]) -> tuple[list[str], str]:
        if self.cache is not None:
            self.cache.find(_prompt(body))
            self.cache.keep(_prompt(body) + self.reply)
        words = [word + " " for word in self.reply.split(" ")]
        words[-1] = words[-1][:-1]
        limit = body.get("max_tokens", body.get("max_completion_tokens", len(words)))
        return words[:limit], self.finish_reason if limit >= len(words) else "length"

    def _usage(self, body: Mapping[str, Any], num_output: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(_prompt(body).split()),
            "completion_tokens": num_output,
        }
        if self.more:
            usage["completion_tokens_details"] = {"reasoning_tokens": 1}
        if self.cached_tokens is None:
            return usage
        return {**usage, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def _special_deltas(self) -> Iterator[dict[str, Any]]:
        """Deltas with reasoning, with tool calls whose arguments are split in two, and with the
        fields of `more`."""
        for part in self.reasoning.partition(" ")[:2] if self.reasoning else ():
            yield {"reasoning": part}
        for index, call in enumerate(self.calls):
            arguments = call["function"]["arguments"]
            yield {
                "tool_calls": [
                    {"index": index, "function": call["function"] | {"arguments": arguments[:3]}}
                ]
            }
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]}
        if self.more:
            yield self.more

    def _enter(self) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)

    async def _whole(self, request: Request, body: Mapping[str, Any], is_chat: bool) -> Response:
        self._enter()
        try:
            if self.hold is not None:
                await self._hold_while_connected(request, self.hold)
            words, finish = self._words(body)
            echoed = re.findall(r"\S+\s*", _prompt(body)) if body.get("echo") else []
            text = "".join([*echoed, *words])
            message = {"role": "assistant", "content": text, **self.more}
            if self.reasoning:
                message["reasoning"] = self.reasoning
            if self.calls:
                message["tool_calls"] = self.calls
                finish = "tool_calls"
            content = {"message": message} if is_chat else {"text": text}
            choice = {
                "index": 0,
                "finish_reason": finish,
                "stop_reason": self.stop_reason,
                **content,
            }
            choice |= _logprobs(body, [*echoed, *words, self.end_token], is_chat)
            if echoed and body.get("logprobs"):
                for field_name in ("token_logprobs", "top_logprobs"):
                    choice["logprobs"][field_name][0] = None
            usage = self._usage(body, len(words))
            return JSONResponse({"choices": [choice], "usage": usage, **self.more_of_answer})
        finally:
            self.num_open -= 1

    async def _hold_while_connected(self, request: Request, hold: asyncio.Event) -> None:
        released = asyncio.ensure_future(hold.wait())
        disconnected = asyncio.ensure_future(request.receive())
        await asyncio.wait((released, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not released.done():
            self.cancelled.set()
        for task in (released, disconnected):
            task.cancel()

    async def _events(
        self, body: Mapping[str, Any], is_chat: bool, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        self._enter()
        try:
            words, finish = self._words(body)
            if is_chat:
                first = {"delta": {"role": "assistant", "content": ""}}
                yield _event({"choices": [first], **self.more_of_answer})
                for delta in self._special_deltas():
                    yield _event({"choices": [{"delta": delta}]})
            for at, word in enumerate(words):
                if fault is not None and at == fault.after_chunks:
                    if fault.body is not None:
                        yield _event(fault.body)
                    if fault.body is not None or fault.is_tidy:
                        yield b"data: [DONE]\n\n"
                    return
                if at and self.hold is not None:
                    await self.hold.wait()
                if at and self.word_s:
                    await asyncio.sleep(self.word_s)
                choice = {"delta": {"content": word}} if is_chat else {"text": word}
                is_last = at == len(words) - 1
                end: dict[str, Any] = {"finish_reason": finish if is_last else None}
                if is_last:
                    end["stop_reason"] = self.stop_reason
                end |= _logprobs(body, [word, self.end_token] if is_last else [word], is_chat)
                yield b": keep-alive\n\n" + _event({"choices": [{**choice, **end}]})
            asked = (body.get("stream_options") or {}).get("include_usage")
            if asked and self.counts_in_streams:
                yield _event({"choices": [], "usage": self._usage(body, len(words))})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_open -= 1


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt") or "\n".join(map(_text, body["messages"]))
    return prompt if isinstance(prompt, str) else "".join(f"t{token} " for token in prompt)


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _logprobs(body: Mapping[str, Any], words: list[str], is_chat: bool) -> dict[str, Any]:
    """The log probability of a word is minus its length. The likely tokens are the prefixes of the
    word."""
    wanted = body.get("top_logprobs", 0) if is_chat else body.get("logprobs")
    if not body.get("logprobs"):
        return {}
    rows = [[(word[: i + 1], -1.0 - i) for i in range(min(wanted, len(word)))] for word in words]
    if not is_chat:
        named = {
            "tokens": words,
            "token_logprobs": [-float(len(word)) for word in words],
            "top_logprobs": [dict(reversed(row)) for row in rows],
            "text_offset": [0] * len(words),
        }
        return {"logprobs": named}
    entries = [
        {
            "token": word,
            "logprob": -float(len(word)),
            "bytes": None,
            "top_logprobs": [
                {"token": "?", "bytes": list(text.encode()), "logprob": value}
                for text, value in row
            ],
        }
        for word, row in zip(words, rows, strict=True)
    ]
    return {"logprobs": {"content": entries}}


def _event(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"
