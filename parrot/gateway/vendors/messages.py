"""`POST /v1/messages` and `/v1/messages/count_tokens`, in Anthropic's format: fields, messages for
chat templates, and answers."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field

from parrot.gateway.answers import (
    AnswerParser,
    ParsedToolCall,
    ReasoningDelta,
    TextDelta,
    WholeAnswer,
    read_answer,
    reasoning_options,
)
from parrot.gateway.answers import Event as AnswerEvent
from parrot.gateway.turn_request import Prepared, TurnRequest
from parrot.gateway.turns import Turn, Turns, unknown_field
from parrot.gateway.vendors.endpoint import Bounded, Caller, Few, Item, VendorAnswer, Wire
from parrot.gateway.vendors.errors import anthropic_error
from parrot.gateway.vendors.openai_fields import (
    MAX_PARTS,
    ChainedFields,
    Ignored,
    Json,
    Metadata,
    Refused,
    call_rules,
    chained,
    sampling_fields,
    shown,
    unsupported_part,
)
from parrot.gateway.vendors.parts import AnswerEnd, Likelihoods, Part, read_all, stream_parts
from parrot.protocol.answers import Event, Events
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.endpoint import parse_payload
from parrot.protocol.errors import InvalidRequest, ParrotError, UnsupportedField
from parrot.protocol.fields import ForeignId, JsonObject, Label, Name
from parrot.protocol.fields import Text as _Text
from parrot.protocol.public import TokenUsage, VarGetResponse
from parrot.protocol.sampling import GenLength, SamplingConfig, StopStrings
from parrot.utils.ids import new_token

_MAX_MESSAGES = 4096
_MAX_TOOLS = 512
_BEGUN: Json = {"content": [], "stop_reason": None, "stop_sequence": None}


class _Block(Wire):
    cache_control: Ignored = None
    citations: Ignored = None


class TextBlock(_Block):
    type: Literal["text"]
    text: _Text


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: ForeignId
    name: Label
    input: JsonObject
    caller: Ignored = None


class ThinkingBlock(_Block):
    """Reasoning of earlier turns. The chat template decides whether the model sees it. Reasoning
    that another service has redacted is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: _Text = ""
    signature: Ignored = None
    data: Ignored = None


class OtherBlock(Bounded):
    """A block such as an image or a document. Only servers behind engines may support it."""

    type: str = Field(max_length=64)


_TextOrOther = Annotated[TextBlock | OtherBlock, Field(union_mode="left_to_right")]
Text = _Text | Annotated[list[_TextOrOther], Field(fail_fast=True, max_length=MAX_PARTS)]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: ForeignId
    content: Text | None = None
    is_error: bool | None = None


_AnyBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | OtherBlock,
    Field(union_mode="left_to_right"),
]


class Message(Item):
    role: Literal["user", "assistant", "system"]
    content: _Text | Annotated[list[_AnyBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class AnthropicTool(Wire):
    name: Label
    description: _Text | None = None
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    strict: bool | None = None


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Wire):
    format: JsonFormat | None = None
    effort: Ignored = None


class Thinking(Bounded):
    """`type` turns reasoning on or off. A budget and the display option have no effect."""

    type: str = Field(max_length=64)


class CountRequest(Wire):
    """Unknown fields are kept for the servers behind engines."""

    model_config = ConfigDict(extra="allow")

    model: Name
    messages: Annotated[list[Message], Few] = Field(
        fail_fast=True, min_length=1, max_length=_MAX_MESSAGES
    )
    system: Text | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=_MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Ignored = None
    cache_control: Ignored = None


class MessagesRequest(CountRequest, ChainedFields):
    model_config = CountRequest.model_config

    max_tokens: GenLength
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingConfig:
        form = None if self.output_config is None else self.output_config.format
        given = sampling_fields(
            self,
            stop_str=self.stop_sequences or None,
            max_gen_length=self.max_tokens,
            json_schema=None if form is None else form.json_schema,
        )
        return parse_payload(SamplingConfig, given)

    @property
    def may_call_many(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use


def template_messages(request: CountRequest, refused: Refused) -> list[Json]:
    """The messages in the form that chat templates expect. Errors for content that templates do not
    accept are added to `refused`."""
    messages: list[Json] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _content(request.system, refused, "system")})
    for i, message in enumerate(request.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        else:
            param = f"messages.{i}.content"
            messages += _messages(message.role, message.content, refused, param)
    return messages


def template_options(request: CountRequest) -> Json:
    """The variables of the chat template, except the messages."""
    tools = [shown(function) for function in _functions(request)]
    options = dict(reasoning_options(None if request.thinking is None else request.thinking.type))
    return options | ({"tools": tools} if tools else {})


def rules_of(request: MessagesRequest) -> CallRules | None:
    """The rules for the tool calls in an answer."""
    choice = request.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("`tool_choice` of type `tool` needs a `name`", param="tool_choice")
    return call_rules(
        _functions(request),
        must_call=choice.type == "any",
        name=choice.name if choice.type == "tool" else None,
        may_call_many=request.may_call_many,
    )


def _functions(request: CountRequest) -> list[Json]:
    is_none = request.tool_choice is not None and request.tool_choice.type == "none"
    return [] if is_none else [_function(tool) for tool in request.tools or ()]


def _messages(role: str, blocks: Sequence[Any], refused: Refused, param: str) -> Iterator[Json]:
    """A message's blocks as template messages. Each tool result becomes a message of its own."""
    parts: list[TextBlock | OtherBlock] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(block)
        elif isinstance(block, ToolUseBlock) and role == "assistant":
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock) and role == "user":
            content = _content(block.content or "", refused, f"{param}.{i}.content")
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, OtherBlock) and role == "user":
            parts.append(block)
        else:
            raise UnsupportedField(
                f"blocks of type `{block.type}` are not supported for `{role}`", param=param
            )
    if parts or calls or not blocks:
        fields: Json = {"role": role, "content": _content(parts, refused, param, "")}
        if any(thoughts) and role == "assistant":
            fields["reasoning_content"] = "".join(thoughts)
        yield fields | ({"tool_calls": calls} if calls else {})


def _content(
    content: str | Sequence[TextBlock | OtherBlock],
    refused: Refused,
    param: str,
    separator: str = "\n",
) -> str | list[Json]:
    """The text of the content. With other blocks, such as images, the parts of a chat completion's
    message, and an error in `refused` for each of these blocks."""
    if isinstance(content, str):
        return content
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    if len(texts) == len(content):
        return separator.join(texts)
    parts = []
    for block in content:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        else:
            refused.append(unsupported_part(block.type, param))
            parts.append(_part(block, param))
    return parts


def _part(block: OtherBlock, param: str) -> Json:
    """A block as a part of a chat completion's message. Raises `UnsupportedField`."""
    match block.model_dump():
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "base64", **source}}:
            return {"type": "image_url", "image_url": {"url": _data_url(source)}}
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return {"type": "text", "text": text}
        case {"type": "document", "source": {"type": "base64", **source}} as document:
            file = {
                "filename": document.get("title") or "document",
                "file_data": _data_url(source),
            }
            return {"type": "file", "file": file}
    raise UnsupportedField(f"blocks of type `{block.type}` are not supported", param=param)


def _data_url(source: Mapping[Any, Any]) -> str:
    return f"data:{source.get('media_type', '')};base64,{source.get('data', '')}"


def _function(tool: AnthropicTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return function | {"strict": True} if tool.strict else function


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

    async def prepare(self, request: MessagesRequest, caller: Caller) -> Prepared:
        user = None if request.metadata is None else request.metadata.user_id
        refused = Refused()
        return await self._turns.prepare(
            TurnRequest(
                tenant=caller.tenant,
                model=request.model,
                prompt=template_messages(request, refused),
                samplings=[request.sampling()],
                options=template_options(request),
                program=caller.program or user,
                client=caller.client,
                func_name="messages",
                traceparent=caller.traceparent,
                request_id=caller.request_id,
                client_key=caller.key,
                criteria=request.effective_criteria,
                deadline=request.deadline,
                calls=rules_of(request),
                chain=request.chain(),
                unknown=request.model_extra or {},
                refused=refused,
            )
        )

    def create(
        self, request: MessagesRequest, caller: Caller, prepared: Prepared
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        turn = self._turns.submit(prepared)
        caller.report_prefix(turn)
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
        """The number of tokens of the request's prompt."""
        refused: Refused = [unknown_field(name) for name in request.model_extra or ()]
        messages = template_messages(request, refused)
        for error in refused:
            raise error
        count = await self._turns.count_tokens(request.model, messages, template_options(request))
        return orjson.dumps({"input_tokens": count})

    async def _deferred(self, frame: Json) -> bytes:
        return orjson.dumps(frame | _BEGUN | {"usage": _usage(None)})

    async def _whole(self, turn: Turn, parser: AnswerParser, frame: Json) -> bytes:
        (value,) = await read_all([turn])
        answer = read_answer(parser, value.content)
        self._turns.remember(turn, 0, answer.message())
        content: list[Json] = [_thinking(answer.reasoning)] if answer.reasoning else []
        content += [{"type": "text", "text": answer.text}] if answer.text else []
        for call in answer.calls:
            content.append(_tool_use(call, {} if call.is_cut else orjson.loads(call.arguments)))
        ended = _ended(answer, value)
        return orjson.dumps(frame | {"content": content} | ended | {"usage": _usage(value.usage)})

    async def _events(
        self, turn: Turn, parser: AnswerParser, frame: Json, request_id: str
    ) -> AsyncGenerator[Events]:
        stream = _Stream()
        begin = [_event("message_start", message=frame | _BEGUN | {"usage": _usage(None)})]
        has_begun = False
        try:
            async with aclosing(stream_parts(turn, [parser])) as answers:
                async for _, parts in answers:
                    events = [*([] if has_begun else begin), *stream.write(parts)]
                    has_begun = True
                    if not (parts and isinstance(parts[-1], AnswerEnd)):
                        yield events
            self._turns.remember(turn, 0, stream.answer.message())
            yield [*events, _event("message_stop")]
        except ParrotError as error:
            if not has_begun:
                raise
            yield "error", anthropic_error(error, request_id)[1]


class _Stream:
    """The events of an answer's content blocks: reasoning, text or a tool call."""

    def __init__(self) -> None:
        self.answer = WholeAnswer()
        self._num_blocks = 0
        self._open: type[AnswerEvent] | None = None  # the kind of the open block

    def write(self, parts: Sequence[Part]) -> Iterator[Event]:
        for part in parts:
            if isinstance(part, AnswerEnd):
                yield from self._close_open()
                ended = _ended(self.answer, part.value)
                yield _event("message_delta", delta=ended, usage=_usage(part.value.usage))
            elif not isinstance(part, Likelihoods):
                self.answer.add(part)
                yield from self._blocks(part)

    def _blocks(self, part: AnswerEvent) -> Iterator[Event]:
        if isinstance(part, ParsedToolCall):
            yield from self._close_open()
            yield from self._block(_tool_use(part, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            yield from self._close()
        elif isinstance(part, ReasoningDelta):
            yield from self._open_block(ReasoningDelta, _thinking(""))
            yield self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        elif part.text:
            yield from self._open_block(TextDelta, {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})

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
    """A reasoning block. Clients send the signature back, and it is not checked."""
    signature = hashlib.sha256(reasoning.encode()).hexdigest() if reasoning else ""
    return {"type": "thinking", "thinking": reasoning, "signature": signature}


def _tool_use(call: ParsedToolCall, arguments: object) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ended(answer: WholeAnswer, value: VarGetResponse) -> Json:
    """The stop reason, and the stop sequence that ended the message, if any."""
    if answer.calls and not answer.calls[-1].is_cut:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if value.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": value.stop_string}
    reason = "max_tokens" if value.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: TokenUsage | None) -> Json:
    """Anthropic counts cached tokens separately from other input tokens."""
    prompt, cached, output = 0, 0, 0
    if usage is not None:
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
