"""`POST /v1/chat/completions`: a turn, and its answers as chat completions or their chunks."""

import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Literal

import orjson

from parrot.gateway.conversations.turn import Turn, TurnRequest
from parrot.gateway.conversations.turns import Turns
from parrot.gateway.prompts.answers import (
    Answer,
    AnswerParser,
    ReasoningDelta,
    ToolCall,
    read_answer,
)
from parrot.gateway.prompts.answers import Event as AnswerEvent
from parrot.gateway.vendors.choices import read_all, stream_all
from parrot.gateway.vendors.endpoint import Caller, VendorAnswer
from parrot.gateway.vendors.openai_chat import (
    ChatRequest,
    rules_of,
    template_messages,
    template_options,
)
from parrot.gateway.vendors.openai_common import Json, chained, program_of, usage_of
from parrot.gateway.vendors.openai_errors import openai_error
from parrot.gateway.vendors.token_logprobs import AnswerLogprobs, Entry, entries_of
from parrot.protocol.answers import Event, Events
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import VarGetResponse
from parrot.utils.ids import new_token


class ChatChoice(VendorAnswer):
    index: int
    message: Json
    finish_reason: str | None


class ChatCompletion(VendorAnswer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Json | None


class ChatCompletions:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def create(
        self, request: ChatRequest, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        max_tokens = request.max_completion_tokens or request.max_tokens
        turn = self._turns.submit(
            TurnRequest(
                tenant=caller.tenant,
                model=request.model,
                prompt=template_messages(request.messages),
                samplings=request.samplings(max_tokens, request.num_logprobs),
                options=template_options(request),
                program=program_of(request, caller),
                traceparent=caller.traceparent,
                criteria=request.wanted,
                deadline=request.deadline,
                calls=rules_of(request),
                chain=request.chain(),
                prediction=request.predicted,
            )
        )
        caller.tell(turn)
        frame: Json = {
            "id": f"chatcmpl-{new_token()}",
            "created": int(time.time()),
            "model": request.model,
        }
        frame |= chained(request, [turn])
        if request.is_deferred:
            return self._deferred(turn, frame)
        if request.stream:
            return self._chunks(turn, frame, request)
        return self._whole(turn, frame, request)

    async def _deferred(self, turn: Turn, frame: Json) -> bytes:
        choices = [
            {"index": i, "message": _message(Answer()), "logprobs": None, "finish_reason": None}
            for i in range(len(turn.completions))
        ]
        return orjson.dumps(
            frame | {"object": "chat.completion", "choices": choices, "usage": None}
        )

    async def _whole(self, turn: Turn, frame: Json, request: ChatRequest) -> bytes:
        may_call_many = request.parallel_tool_calls is not False
        answers = await read_all([turn])
        choices = []
        for i, value in enumerate(answers):
            answer = read_answer(turn.parser(may_call_many=may_call_many), value.content)
            self._turns.remember(turn, i, answer.message())
            entries = await entries_of(await AnswerLogprobs(turn, i).rest())
            choices.append(
                {
                    "index": i,
                    "message": _message(answer),
                    "logprobs": _logprobs(entries if request.logprobs else None),
                    "finish_reason": _finish_reason(answer, value),
                }
            )
        usage = usage_of(answers, len(answers))
        return orjson.dumps(
            frame | {"object": "chat.completion", "choices": choices, "usage": usage}
        )

    async def _chunks(
        self, turn: Turn, frame: Json, request: ChatRequest
    ) -> AsyncGenerator[Events]:
        wants_usage = request.stream_options is not None and request.stream_options.include_usage
        frame = frame | {"object": "chat.completion.chunk"}
        if wants_usage:
            frame["usage"] = None
        may_call_many = request.parallel_tool_calls is not False
        choices = range(len(turn.completions))
        streams = [_Stream(frame, i, turn.parser(may_call_many=may_call_many)) for i in choices]
        logprobs = [AnswerLogprobs(turn, i) for i in choices]
        ended: list[VarGetResponse] = []
        last: list[Event] = []
        try:
            async with aclosing(stream_all([turn])) as deltas:
                async for i, delta in deltas:
                    if isinstance(delta, str):
                        for text, scored in await logprobs[i].pieces(delta):
                            chunks = streams[i].feed(text, await entries_of(scored))
                            yield [(None, chunk) for chunk in chunks]
                        continue
                    ended.append(delta)
                    chunks = streams[i].finish(delta, await entries_of(await logprobs[i].rest()))
                    last = [(None, chunk) for chunk in chunks]
                    self._turns.remember(turn, i, streams[i].answer.message())
                    if len(ended) < len(streams):
                        yield last
            if wants_usage:
                usage = usage_of(ended, len(ended))
                last.append((None, frame | {"choices": [], "usage": usage}))
            yield [*last, (None, "[DONE]")]
        except ParrotError as error:
            if not any(stream.has_begun for stream in streams):
                raise
            yield [(None, openai_error(error)[1]), (None, "[DONE]")]


class _Stream:
    """The chunks of one choice."""

    def __init__(self, frame: Json, index: int, parser: AnswerParser) -> None:
        self.answer = Answer()
        self.has_begun = False
        self._frame = frame
        self._index = index
        self._parser = parser
        self._entries: list[Entry] = []  # of tokens that no chunk has shown yet

    def feed(self, text: str, entries: Sequence[Entry]) -> Iterator[Json]:
        """Some more of the answer, and its tokens if their log probabilities are wanted."""
        if not self.has_begun:
            self.has_begun = True
            yield self._chunk({"role": "assistant", "content": ""})
        self._entries += entries
        yield from self._deltas(self._parser.feed(text))

    def finish(self, value: VarGetResponse, entries: Sequence[Entry]) -> Iterator[Json]:
        yield from self.feed("", entries)
        yield from self._deltas(self._parser.finish())
        yield self._chunk({}, _finish_reason(self.answer, value))

    def _deltas(self, events: Iterable[AnswerEvent]) -> Iterator[Json]:
        for event in events:
            if isinstance(event, ToolCall):
                call = {"index": len(self.answer.calls)} | _tool_call(event)
                yield self._chunk({"tool_calls": [call]})
            elif isinstance(event, ReasoningDelta):
                yield self._chunk({"reasoning_content": event.reasoning})
            elif event.text:
                yield self._chunk({"content": event.text})
            self.answer.add(event)

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        entries, self._entries = self._entries, []
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": _logprobs(entries or None),
            "finish_reason": finish_reason,
        }
        return self._frame | {"choices": [choice]}


def _logprobs(entries: list[Entry] | None) -> Json | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _message(answer: Answer) -> Json:
    content = None if answer.calls and not answer.text else answer.text
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.calls]
    return message


def _tool_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish_reason(answer: Answer, value: VarGetResponse) -> str | None:
    return "tool_calls" if answer.calls else value.finish_reason
