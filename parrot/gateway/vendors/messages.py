"""`POST /v1/messages` and `/v1/messages/count_tokens`, in Anthropic's format."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing
from typing import Literal

import orjson

from parrot.gateway.conversations.turn import Turn, TurnRequest
from parrot.gateway.conversations.turns import Turns
from parrot.gateway.prompts.answers import (
    Answer,
    AnswerParser,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    read_answer,
)
from parrot.gateway.prompts.answers import Event as AnswerEvent
from parrot.gateway.vendors.anthropic_errors import anthropic_error
from parrot.gateway.vendors.anthropic_fields import (
    CountRequest,
    MessagesRequest,
    rules_of,
    template_messages,
    template_options,
)
from parrot.gateway.vendors.choices import read_all, stream_all
from parrot.gateway.vendors.endpoint import Caller, VendorAnswer
from parrot.gateway.vendors.openai_common import Json, chained
from parrot.protocol.answers import Event, Events
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import TokenUsage, VarGetResponse
from parrot.utils.ids import new_token

_BEGUN: Json = {"content": [], "stop_reason": None, "stop_sequence": None}


class MessageAnswer(VendorAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    usage: Json


class TokenCount(VendorAnswer):
    input_tokens: int


class Messages:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def create(
        self, request: MessagesRequest, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        user = None if request.metadata is None else request.metadata.user_id
        turn = self._turns.submit(
            TurnRequest(
                tenant=caller.tenant,
                model=request.model,
                prompt=template_messages(request),
                samplings=[request.sampling()],
                options=template_options(request),
                program=caller.program or user,
                traceparent=caller.traceparent,
                criteria=request.wanted,
                deadline=request.deadline,
                calls=rules_of(request),
                chain=request.chain(),
            )
        )
        caller.tell(turn)
        parser = turn.parser(may_call_many=request.may_call_many)
        frame: Json = {
            "id": f"msg_{new_token()}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        frame |= chained(request, [turn])
        if request.is_deferred:
            return self._deferred(frame)
        if request.stream:
            return self._events(turn, parser, frame, caller.request_id)
        return self._whole(turn, parser, frame)

    async def count(self, request: CountRequest, caller: Caller) -> bytes:
        """The tokens of the prompt that the request would have."""
        count = await self._turns.count_tokens(
            request.model, template_messages(request), template_options(request)
        )
        return orjson.dumps({"input_tokens": count})

    async def _deferred(self, frame: Json) -> bytes:
        return orjson.dumps(frame | _BEGUN | {"usage": _usage(None)})

    async def _whole(self, turn: Turn, parser: AnswerParser, frame: Json) -> bytes:
        (value,) = await read_all([turn])
        answer = read_answer(parser, value.content)
        self._turns.remember(turn, 0, answer.message())
        content: list[Json] = [_thinking(answer.reasoning)] if answer.reasoning else []
        content += [{"type": "text", "text": answer.text}] if answer.text else []
        content += [_tool_use(call, orjson.loads(call.arguments)) for call in answer.calls]
        ended = _ended(answer, value)
        return orjson.dumps(frame | {"content": content} | ended | {"usage": _usage(value.usage)})

    async def _events(
        self, turn: Turn, parser: AnswerParser, frame: Json, request_id: str
    ) -> AsyncGenerator[Events]:
        stream = _Stream(parser)
        begin = [_event("message_start", message=frame | _BEGUN | {"usage": _usage(None)})]
        has_begun = False
        try:
            async with aclosing(stream_all([turn])) as deltas:
                async for _, delta in deltas:
                    events = [*([] if has_begun else begin), *stream.add(delta)]
                    has_begun = True
                    if isinstance(delta, str):
                        yield events
            self._turns.remember(turn, 0, stream.answer.message())
            yield [*events, _event("message_stop")]
        except ParrotError as error:
            if not has_begun:
                raise
            yield "error", anthropic_error(error, request_id)[1]


class _Stream:
    """The events of an answer's content blocks, of which each is reasoning, a text or a call."""

    def __init__(self, parser: AnswerParser) -> None:
        self.answer = Answer()
        self._parser = parser
        self._num_blocks = 0
        self._open: type[AnswerEvent] | None = None  # what the block that is open is made of

    def add(self, delta: str | VarGetResponse) -> Iterator[Event]:
        if isinstance(delta, str):
            yield from self._blocks(self._parser.feed(delta))
            return
        yield from self._blocks(self._parser.finish())
        yield from self._close_open()
        ended = _ended(self.answer, delta)
        yield _event("message_delta", delta=ended, usage=_usage(delta.usage))

    def _blocks(self, events: Iterable[AnswerEvent]) -> Iterator[Event]:
        for event in events:
            self.answer.add(event)
            if isinstance(event, ToolCall):
                yield from self._close_open()
                yield from self._block(_tool_use(event, {}))
                yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
                yield from self._close()
            elif isinstance(event, ReasoningDelta):
                yield from self._open_block(ReasoningDelta, _thinking(""))
                yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
            elif event.text:
                yield from self._open_block(TextDelta, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})

    def _open_block(self, kind: type[AnswerEvent], block: Json) -> Iterator[Event]:
        if self._open is not kind:
            yield from self._close_open()
            self._open = kind
            yield from self._block(block)

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _block(self, block: Json) -> Iterator[Event]:
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close_open(self) -> Iterator[Event]:
        if self._open is ReasoningDelta:
            signature = _thinking(self.answer.reasoning)["signature"]
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            self._open = None
            yield from self._close()

    def _close(self) -> Iterator[Event]:
        yield _event("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1


def _event(kind: str, **fields: object) -> Event:
    return kind, {"type": kind} | fields


def _thinking(reasoning: str) -> Json:
    """A block of reasoning. Clients send the signature back, and nothing depends on it."""
    signature = hashlib.sha256(reasoning.encode()).hexdigest() if reasoning else ""
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def _tool_use(call: ToolCall, arguments: object) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ended(answer: Answer, value: VarGetResponse) -> Json:
    """Why the message ends, and the stop sequence that ended it, if one did."""
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if value.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": value.stop_string}
    reason = "max_tokens" if value.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: TokenUsage | None) -> Json:
    """Anthropic counts tokens that were cached apart from the others."""
    prompt, cached, output = 0, 0, 0
    if usage is not None:
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
