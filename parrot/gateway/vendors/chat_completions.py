"""`POST /v1/chat/completions`: converts a request into a turn, and the turn's answers into chat
completions or their chunks."""

import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field

from parrot.gateway.answers import (
    AnswerParser,
    ParsedToolCall,
    ReasoningDelta,
    WholeAnswer,
    reasoning_options,
)
from parrot.gateway.answers import Event as AnswerEvent
from parrot.gateway.turn_request import Prepared, TurnRequest
from parrot.gateway.turns import Turn, Turns, unknown_field
from parrot.gateway.vendors.endpoint import Caller, Few, Item, VendorAnswer, Wire
from parrot.gateway.vendors.errors import openai_error
from parrot.gateway.vendors.logprobs import Entry
from parrot.gateway.vendors.openai_fields import (
    MAX_PARTS,
    Content,
    GenerationFields,
    Ignored,
    Json,
    Refused,
    arguments_of,
    call_rules,
    chained,
    chosen_tool,
    content_of,
    program_of,
    shown,
    usage_of,
)
from parrot.gateway.vendors.parts import (
    AnswerEnd,
    Likelihoods,
    Part,
    read_all,
    stream_parts,
    whole_parts,
)
from parrot.gateway.vendors.served import add_missing, add_to_answer, add_to_choice
from parrot.protocol.answers import Event, Events
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.errors import InvalidRequest, ParrotError, UnsupportedField
from parrot.protocol.fields import ForeignId, JsonObject, Label, Text
from parrot.protocol.public import VarGetResponse
from parrot.protocol.sampling import GenLength
from parrot.utils.ids import new_token

MAX_MESSAGES = 4096
MAX_TOOLS = 512
_PLAIN = {"role", "content"}


class FunctionCall(Wire):
    name: Label
    arguments: Text = "{}"


class SentToolCall(Wire):
    id: ForeignId = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Item):
    """Unknown fields are kept for the servers behind engines."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: ForeignId | None = None
    tool_calls: list[SentToolCall] | None = Field(None, max_length=MAX_PARTS)
    tool_call_id: ForeignId | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name for `reasoning_content`
    refusal: Text | None = None
    annotations: Ignored = None
    function_call: None = None


class ChatRequest(GenerationFields):
    in_extra = (*GenerationFields.in_extra, "modalities", "verbosity")

    messages: Annotated[
        list[ChatMessage],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        Few,
    ]
    max_completion_tokens: GenLength | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[JsonObject] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Label | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=32)
    modalities: list[Label] | None = Field(None, max_length=8)
    verbosity: Ignored = None

    def refused(self) -> Refused:
        refused = super().refused()
        if not set(self.modalities or ()) <= {"text"}:
            text = "the engines of this model answer with text only"
            refused.append(UnsupportedField(text, param="modalities"))
        for i, tool in enumerate(self.tools or ()):
            if not _is_function(tool):
                text = "a tool must be a function with a name"
                refused.append(InvalidRequest(text, param=f"tools.{i}"))
        return refused

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token whose log probabilities are requested; None: no log
        probabilities. Raises `InvalidRequest`."""
        if not self.logprobs:
            if self.top_logprobs:
                text = "`top_logprobs` needs `logprobs: true`"
                raise InvalidRequest(text, param="top_logprobs")
            return None
        return self.top_logprobs or 0


def template_messages(messages: list[ChatMessage], refused: Refused) -> list[dict[str, Any]]:
    """The messages in the form that chat templates expect. Errors for content that templates do not
    accept are added to `refused`."""
    return [
        {"role": message.role, "content": message.content}
        if _is_plain(message)
        else _template_message(i, message, refused)
        for i, message in enumerate(messages)
    ]


def _is_plain(message: ChatMessage) -> bool:
    is_text = isinstance(message.content, str) and message.role != "developer"
    return is_text and message.model_fields_set == _PLAIN


def template_options(request: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template, except the messages."""
    given = request.chat_template_kwargs
    if reserved := given.keys() & {"messages", "add_generation_prompt", "tools"}:
        raise UnsupportedField(f"a template's `{reserved.pop()}` cannot be replaced")
    options = {**reasoning_options(request.reasoning_effort), **given}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    if tools := _tools(request):
        options["tools"] = [shown(t["function"]) if _is_function(t) else t for t in tools]
    return options


def rules_of(request: ChatRequest) -> CallRules | None:
    """The rules for the tool calls in an answer."""
    return call_rules(
        _functions(request),
        must_call=request.tool_choice == "required",
        name=chosen_tool(request.tool_choice),
        may_call_many=request.parallel_tool_calls is not False,
    )


def _tools(request: ChatRequest) -> list[Json]:
    return [] if request.tool_choice == "none" else request.tools or []


def _functions(request: ChatRequest) -> list[Json]:
    return [tool["function"] for tool in _tools(request) if _is_function(tool)]


def _is_function(tool: Json) -> bool:
    """Whether the tool is a function. A server behind an engine may have other tools."""
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


def _template_message(index: int, message: ChatMessage, refused: Refused) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content: str | list[Json] | None = message.refusal
    if message.content is not None:
        content = content_of(message.content, refused, f"messages.{index}.content")
    fields: dict[str, Any] = {"role": role, "content": content or ""}
    for name, value in (message.model_extra or {}).items():
        if value is not None:
            refused.append(unknown_field(f"messages.{index}.{name}"))
            fields[name] = value
    if message.tool_calls:
        if role != "assistant":
            text = f"a message of role `{role}` cannot have tool calls"
            raise InvalidRequest(text, param="messages")
        fields["tool_calls"] = list(_calls(index, message.tool_calls))
    if (reasoning := message.reasoning_content or message.reasoning) and role == "assistant":
        fields["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    return fields


def _calls(index: int, calls: list[SentToolCall]) -> Iterator[dict[str, Any]]:
    param = f"messages.{index}.tool_calls"
    for call in calls:
        arguments = arguments_of(call.function.arguments, call.function.name, param)
        function = {"name": call.function.name, "arguments": arguments}
        yield {"id": call.id, "type": "function", "function": function}


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

    async def prepare(self, request: ChatRequest, caller: Caller) -> Prepared:
        refused = Refused()
        if request.modalities or request.tools or request.response_format:
            refused = request.refused()
        max_tokens = request.max_completion_tokens or request.max_tokens
        return await self._turns.prepare(
            TurnRequest(
                tenant=caller.tenant,
                model=request.model,
                prompt=template_messages(request.messages, refused),
                samplings=request.samplings(max_tokens, request.num_logprobs),
                options=template_options(request),
                program=program_of(request, caller),
                client=caller.client,
                traceparent=caller.traceparent,
                request_id=caller.request_id,
                client_key=caller.key,
                criteria=request.effective_criteria,
                deadline=request.deadline,
                calls=rules_of(request),
                chain=request.chain(),
                prediction=request.predicted,
                unknown=request.model_extra or {},
                ignored=request.ignored,
                refused=refused,
            )
        )

    def create(
        self, request: ChatRequest, caller: Caller, prepared: Prepared
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        turn = self._turns.submit(prepared)
        caller.report_prefix(turn)
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
            {
                "index": i,
                "message": _message(WholeAnswer()),
                "logprobs": None,
                "finish_reason": None,
            }
            for i in range(len(turn.completions))
        ]
        return orjson.dumps(
            frame | {"object": "chat.completion", "choices": choices, "usage": None}
        )

    async def _whole(self, turn: Turn, frame: Json, request: ChatRequest) -> bytes:
        answers = await read_all([turn])
        choices = []
        for i, value in enumerate(answers):
            answer, entries = WholeAnswer(), list[Entry]()
            for part in await whole_parts(turn, i, value, _parser(turn, request)):
                if isinstance(part, Likelihoods):
                    entries = part.entries
                elif not isinstance(part, AnswerEnd):
                    answer.add(part)
            self._turns.remember(turn, i, answer.message())
            choices.append(
                {
                    "index": i,
                    "message": _message(answer),
                    "logprobs": _logprobs(entries if request.logprobs else None),
                    "finish_reason": _finish_reason(answer, value),
                }
            )
        usage = usage_of(answers, len(answers))
        whole = frame | {"object": "chat.completion", "choices": choices, "usage": usage}
        if turn.is_served:
            for i, choice in enumerate(choices):
                add_to_choice(choice, turn.extra(i))
            add_to_answer(whole, turn.extra(0))
        return orjson.dumps(whole)

    async def _chunks(
        self, turn: Turn, frame: Json, request: ChatRequest
    ) -> AsyncGenerator[Events]:
        wants_usage = request.stream_options is not None and request.stream_options.include_usage
        frame = frame | {"object": "chat.completion.chunk"}
        if wants_usage:
            frame["usage"] = None
        streams = [_Stream(turn, frame, i) for i in range(len(turn.completions))]
        parsers = [_parser(turn, request) for _ in streams]
        ended: list[VarGetResponse] = []
        last: list[Event] = []
        try:
            async with aclosing(stream_parts(turn, parsers)) as answers:
                async for i, parts in answers:
                    chunks = streams[i].write(parts)
                    if parts and isinstance(parts[-1], AnswerEnd):
                        ended.append(parts[-1].value)
                        self._turns.remember(turn, i, streams[i].answer.message())
                    if len(ended) < len(streams):
                        yield chunks
                    else:
                        last = chunks
            if wants_usage:
                whole = frame | {"choices": [], "usage": usage_of(ended, len(ended))}
                if turn.is_served:
                    add_to_answer(whole, turn.extra(0))
                last.append((None, whole))
            yield [*last, (None, "[DONE]")]
        except ParrotError as error:
            if not any(stream.has_begun for stream in streams):
                raise
            yield [(None, openai_error(error, prompt="messages")[1]), (None, "[DONE]")]


class _Stream:
    """The chunks of one choice."""

    def __init__(self, turn: Turn, frame: Json, index: int) -> None:
        self._turn = turn
        self.answer = WholeAnswer()
        self.has_begun = False
        self._frame = frame
        self._index = index
        self._entries: list[Entry] = []  # of tokens that no chunk contains yet

    def write(self, parts: Sequence[Part]) -> list[Event]:
        chunks: list[Event] = []
        if not self.has_begun:
            self.has_begun = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        for part in parts:
            if isinstance(part, Likelihoods):
                self._entries += part.entries
            elif isinstance(part, AnswerEnd):
                chunks += self._end(part)
            else:
                if delta := self._delta(part):
                    chunks.append(self._chunk(delta))
                self.answer.add(part)
        return chunks

    def _delta(self, part: AnswerEvent) -> Json:
        if isinstance(part, ParsedToolCall):
            call = {"index": len(self.answer.calls)} | _tool_call(part)
            return {"tool_calls": [call]}
        if isinstance(part, ReasoningDelta):
            delta = {"reasoning_content": part.reasoning}
            if self._turn.is_served:
                delta["reasoning"] = part.reasoning  # vLLM's name
            return delta
        return {"content": part.text} if part.text else {}

    def _end(self, part: AnswerEnd) -> list[Event]:
        reason = _finish_reason(self.answer, part.value)
        if not self._turn.is_served:
            return [self._chunk({}, reason)]
        extra = self._turn.extra(self._index)
        end = self._chunk({}, reason, extra)  # First, because it takes the log probabilities.
        return [*map(self._chunk, extra.get("message", ())), end]

    def _chunk(
        self,
        delta: Json,
        finish_reason: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Event:
        """`extra`: a foreign server's fields, as in `Turn.extra`."""
        entries, self._entries = self._entries, []
        choice: Json = {
            "index": self._index,
            "delta": delta,
            "logprobs": _logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }
        chunk = self._frame | {"choices": [choice]}
        if extra:
            add_missing(choice, extra.get("choice", {}))
            add_missing(chunk, extra.get("answer", {}))
        return None, chunk


def _parser(turn: Turn, request: ChatRequest) -> AnswerParser:
    return turn.parser(may_call_many=request.parallel_tool_calls is not False)


def _logprobs(entries: list[Entry] | None) -> Json | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _message(answer: WholeAnswer) -> Json:
    content = None if answer.calls and not answer.text else answer.text
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.calls]
    return message


def _tool_call(call: ParsedToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish_reason(answer: WholeAnswer, value: VarGetResponse) -> str | None:
    is_calling = answer.calls and not answer.calls[-1].is_cut
    return "tool_calls" if is_calling else value.finish_reason
