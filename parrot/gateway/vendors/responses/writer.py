"""Builds a response from an answer's parts: its items, and the event of each step.

response.created  response.in_progress
response.output_item.added
    response.content_part.added  response.reasoning_text.delta ... response.content_part.done
response.output_item.done
response.output_item.added
    response.content_part.added  response.output_text.delta ...  response.content_part.done
response.output_item.done
response.completed

A background response is built without a reader. Its events can be streamed later."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import orjson

from parrot.gateway.answers import ParsedToolCall, ReasoningDelta, TextDelta, WholeAnswer
from parrot.gateway.turns import Turn
from parrot.gateway.vendors.errors import openai_message
from parrot.gateway.vendors.logprobs import Entry
from parrot.gateway.vendors.openai_fields import Json
from parrot.gateway.vendors.parts import AnswerEnd, Likelihoods, Part
from parrot.protocol.answers import Events
from parrot.protocol.errors import (
    Cancelled,
    ClusterFull,
    InsufficientStorage,
    InvalidRequest,
    NoEngine,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
)
from parrot.protocol.public import TokenUsage
from parrot.serve.graph.nodes import CompletionState

T = TypeVar("T")

_MAX_SKIPPED = 256  # Events that are replayed before other tasks may run.


class ResponseWriter:
    """Builds the same events, with the same numbers and ids, for the same frame and parts."""

    def __init__(self, frame: Json) -> None:
        self.response = frame | {"output": []}  # the response so far
        self.answer = WholeAnswer()  # the model's answer so far
        self._number = 0  # of the next event
        self._texts: list[str] | None = None  # of the open message; None: no message is open
        self._is_reasoning = False  # a reasoning item is open
        self._entries: list[Entry] = []  # log probabilities of the open message
        self._new_entries: list[Entry] = []  # those that no event contains yet
        self._namespaces = {
            function["name"]: tool["name"]
            for tool in frame["tools"]
            if tool["type"] == "namespace"
            for function in tool["tools"]
        }

    def begin(self) -> Iterator[Json]:
        yield self._state("response.created")
        if self.response["status"] == "queued":
            yield self._state("response.queued")
        else:
            yield self._state("response.in_progress")

    def write(self, part: Part | ParrotError) -> Iterator[Json]:
        if isinstance(part, ParrotError):
            yield from self._fail(part)
            return
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            yield self._state("response.in_progress")
        if isinstance(part, AnswerEnd):
            yield from self._finish(part)
            return
        if isinstance(part, Likelihoods):
            self._new_entries += part.entries
            return
        self.answer.add(part)
        if isinstance(part, ParsedToolCall):
            self._new_entries.clear()  # Tokens of a call are not text of the message.
            yield from self._close_reasoning()
            yield from self._close_message()
            yield from self._call(part)
        elif isinstance(part, ReasoningDelta):
            self._new_entries.clear()
            yield from self._reason(part.reasoning)
        elif part.text:
            yield from self._text(part.text)

    def end_as(self, response: Json) -> Iterator[Json]:
        """End like the stored `response`, after its items were written."""
        if response["status"] == "cancelled":
            yield from self._fail(Cancelled("the response was cancelled"))
            return
        yield from self._close_reasoning(response["status"])
        yield from self._close_message(response["status"])
        self.response = response
        yield self._state(f"response.{response['status']}")

    def _reason(self, delta: str) -> Iterator[Json]:
        if not self._is_reasoning:
            self._is_reasoning = True
            item = self._reasoning([], "in_progress")
            yield self._of_item("response.output_item.added", item=item)
            yield self._of_reasoning("response.content_part.added", part=_reasoning_part(""))
        yield self._of_reasoning("response.reasoning_text.delta", delta=delta)

    def _close_reasoning(self, status: str = "completed") -> Iterator[Json]:
        if self._is_reasoning:
            self._is_reasoning = False
            part = _reasoning_part(self.answer.reasoning)
            yield self._of_reasoning("response.reasoning_text.done", text=part["text"])
            yield self._of_reasoning("response.content_part.done", part=part)
            yield from self._add_item(self._reasoning([part], status))

    def _text(self, delta: str) -> Iterator[Json]:
        yield from self._close_reasoning()
        yield from self._open_message()
        assert self._texts is not None
        self._texts.append(delta)
        yield self._of_text(
            "response.output_text.delta", delta=delta, logprobs=self._take_entries()
        )

    def _take_entries(self) -> list[Entry]:
        new, self._new_entries = self._new_entries, []
        self._entries += new
        return new

    def _open_message(self) -> Iterator[Json]:
        if self._texts is None:
            self._texts = []
            yield self._of_item("response.output_item.added", item=self._message([], "in_progress"))
            yield self._of_text("response.content_part.added", part=_text_part(""))

    def _close_message(self, status: str = "completed") -> Iterator[Json]:
        if self._texts is None:
            return
        self._take_entries()
        text, entries, self._entries = "".join(self._texts), self._entries, []
        yield self._of_text("response.output_text.done", text=text, logprobs=entries)
        yield self._of_text("response.content_part.done", part=_text_part(text, entries))
        self._texts = None
        yield from self._add_item(self._message([_text_part(text, entries)], status))

    def _call(self, call: ParsedToolCall) -> Iterator[Json]:
        item: Json = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        if call.name in self._namespaces:
            item["namespace"] = self._namespaces[call.name]
        yield self._of_item("response.output_item.added", item=item)
        named = {"item_id": item["id"]}
        kind = "response.function_call_arguments"
        yield self._of_item(f"{kind}.delta", **named, delta=call.arguments)
        yield self._of_item(f"{kind}.done", **named, name=call.name, arguments=call.arguments)
        status = "incomplete" if call.is_cut else "completed"
        yield from self._add_item(item | {"status": status, "arguments": call.arguments})

    def _add_item(self, item: Json) -> Iterator[Json]:
        done = self._of_item("response.output_item.done", item=item)
        self.response["output"] = [*self.response["output"], item]
        yield done

    def _finish(self, ended: AnswerEnd) -> Iterator[Json]:
        value = ended.value
        is_cut = value.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close_reasoning(status)
        if not self.response["output"]:
            yield from self._open_message()
        yield from self._close_message(status)
        self.response["status"] = status
        self.response["usage"] = None if value.usage is None else _usage(value.usage)
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = ended.at
        yield self._state(f"response.{status}")

    def _fail(self, error: ParrotError) -> Iterator[Json]:
        """End with an error. OpenAI has no event for "cancelled", so that is an `error` event."""
        if isinstance(error, Cancelled):
            self.response["status"] = "cancelled"
            yield self._event("error", code="cancelled", message=error.message, param=None)
        else:
            self.response["status"] = "failed"
            self.response["error"] = {
                "code": _code(error),
                "message": openai_message(error, "input"),
            }
            yield self._state("response.failed")

    def _message(self, content: list[Json], status: str) -> Json:
        return {
            "id": self._id("msg"),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _reasoning(self, content: list[Json], status: str) -> Json:
        return {
            "id": self._id("rs"),
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }

    def _id(self, kind: str) -> str:
        """The id of the current item."""
        token = self.response["id"].partition("_")[2]
        return f"{kind}_{token}_{len(self.response['output'])}"

    def _of_text(self, kind: str, **fields: object) -> Json:
        return self._of_item(kind, item_id=self._id("msg"), content_index=0, **fields)

    def _of_reasoning(self, kind: str, **fields: object) -> Json:
        return self._of_item(kind, item_id=self._id("rs"), content_index=0, **fields)

    def _of_item(self, kind: str, **fields: object) -> Json:
        return self._event(kind, output_index=len(self.response["output"]), **fields)

    def _state(self, kind: str) -> Json:
        return self._event(kind, response=dict(self.response))

    def _event(self, kind: str, **fields: object) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number} | fields


def replayed_events(response: Json) -> Iterator[Json]:
    """The events of a finished response, with one delta per text."""
    begun = {"status": "in_progress", "usage": None, "completed_at": None, "error": None}
    writer = ResponseWriter(response | begun | {"incomplete_details": None})
    yield from writer.begin()
    for item in response["output"]:
        for part in _parts_of(item):
            yield from writer.write(part)
    yield from writer.end_as(response)


def _parts_of(item: Json) -> Iterator[Part]:
    if item["type"] == "function_call":
        is_cut = item["status"] == "incomplete"
        yield ParsedToolCall(item["name"], item["arguments"], item["call_id"], is_cut)
    for content in item.get("content", ()):
        if item["type"] == "reasoning":
            yield ReasoningDelta(content["text"])
        else:
            yield Likelihoods(content.get("logprobs", []))
            yield TextDelta(content["text"])


def _text_part(text: str, entries: Sequence[Entry] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(entries)}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _code(error: ParrotError) -> str:
    """The error code of a failed response, out of OpenAI's list."""
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(error, QuotaExceeded) and not isinstance(error, ClusterFull):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


async def when_served(
    submit: Callable[[], Awaitable[T]],
    joined: Callable[[], Awaitable[None]],
    writable: Callable[[], Awaitable[None]],
) -> T:
    """Call `submit` once engines with the model exist and the journal can be written. `joined`
    waits for the next engine, and `writable` for the journal. Raises the other errors of `submit`.
    """
    while True:
        try:
            return await submit()
        except NoEngine:
            await joined()
        except InsufficientStorage:
            await writable()


class Background:
    """The state of one background response."""

    def __init__(
        self, turn: Turn | None, frame: Json, published: Callable[[], Awaitable[None]]
    ) -> None:
        self.writer = ResponseWriter(frame)  # has the response as it is now
        self.turn = turn  # None: not submitted yet
        self.frame = frame
        self.has_ended = False
        self._published = published  # waits until the answer is on disk
        self._parts: list[Part | ParrotError] = []
        self._changed = asyncio.Event()

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def body(self) -> bytes:
        """The response as it is now."""
        response = self.writer.response
        turn = None if self.has_ended else self.turn
        if turn is not None and turn.completions[0].state is CompletionState.RUNNING:
            response = response | {"status": "in_progress"}
        return orjson.dumps(response)

    def add(self, part: Part | ParrotError) -> None:
        """Add a part. Does nothing after the response has ended."""
        if self.has_ended:
            return
        for _ in self.writer.write(part):
            pass
        self._parts.append(part)
        if isinstance(part, AnswerEnd | ParrotError):
            self.has_ended = True
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the response. Does nothing after it has ended."""
        if self.has_ended:
            return
        self.add(Cancelled("the response was cancelled"))
        if self.turn is not None:
            self.turn.cancel()

    async def events(self, after: int = -1) -> AsyncGenerator[Events]:
        """Yield all events with numbers above `after`, until the response has ended. The last event
        waits for the journal, because until then a restart may produce another answer."""

        writer = ResponseWriter(self.frame)
        num_written = 0
        events = list(writer.begin())
        while True:
            yield [(e["type"], e) for e in events if e["sequence_number"] > after]
            if num_written % _MAX_SKIPPED == 0:
                await asyncio.sleep(0)
            while num_written == len(self._parts):
                if self.has_ended:
                    return
                await self._changed.wait()
            events = list(writer.write(self._parts[num_written]))
            num_written += 1
            if self.has_ended and num_written == len(self._parts):
                await self._published()
