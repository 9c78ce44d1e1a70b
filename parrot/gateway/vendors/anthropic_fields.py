"""Anthropic's messages: their fields, and the messages that chat templates are shown for them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.prompts.reasoning import reasoning_options
from parrot.gateway.vendors.openai_common import MAX_PARTS, ChainedFields, Ignored, Json, Metadata
from parrot.gateway.vendors.tool_choice import call_rules, shown
from parrot.protocol.endpoint import parse_payload
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.fields import Bounded, Few, ForeignId, Item, JsonObject, Label, Name, Wire
from parrot.protocol.fields import Text as _Text
from parrot.protocol.sampling import GenLength, SamplingConfig, StopStrings

_MAX_MESSAGES = 4096
_MAX_TOOLS = 512


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
    """Reasoning of earlier turns, which the chat template shows again or leaves out; what another
    service has redacted is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: _Text = ""
    signature: Ignored = None
    data: Ignored = None


class OtherBlock(Bounded):
    """An image, a document and the like; there is no model for them."""

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


class Tool(Wire):
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
    """A budget, and what is displayed, change nothing."""

    type: str = Field(max_length=64)


class CountRequest(Wire):
    model: Name
    messages: Annotated[list[Message], Few] = Field(
        fail_fast=True, min_length=1, max_length=_MAX_MESSAGES
    )
    system: Text | None = None
    tools: list[Tool] | None = Field(None, max_length=_MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Ignored = None
    cache_control: Ignored = None


class MessagesRequest(CountRequest, ChainedFields):
    max_tokens: GenLength
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def sampling(self) -> SamplingConfig:
        form = None if self.output_config is None else self.output_config.format
        given = {
            "json_schema": None if form is None else form.json_schema,
            "max_gen_length": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_str": self.stop_sequences or None,
        }
        return parse_payload(SamplingConfig, {k: v for k, v in given.items() if v is not None})

    @property
    def may_call_many(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use


def template_messages(request: CountRequest) -> list[Json]:
    """The messages as chat templates take them."""
    messages: list[Json] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system)})
    for i, message in enumerate(request.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        else:
            messages += _messages(message.role, message.content, f"messages.{i}.content")
    return messages


def template_options(request: CountRequest) -> Json:
    """The variables of the chat template beside the messages."""
    tools = [shown(function) for function in _functions(request)]
    options = dict(reasoning_options(None if request.thinking is None else request.thinking.type))
    return options | ({"tools": tools} if tools else {})


def rules_of(request: MessagesRequest) -> CallRules | None:
    """The rules for the calls in an answer."""
    choice = request.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("the `tool_choice` of a tool has a `name`", param="tool_choice")
    return call_rules(
        _functions(request),
        must_call=choice.type == "any",
        name=choice.name if choice.type == "tool" else None,
        may_call_many=request.may_call_many,
    )


def _functions(request: CountRequest) -> list[Json]:
    is_none = request.tool_choice is not None and request.tool_choice.type == "none"
    return [] if is_none else [_function(tool) for tool in request.tools or ()]


def _messages(role: str, blocks: Sequence[Any], param: str) -> Iterator[Json]:
    """A user's message may begin with results of tools, which are messages of their own."""
    texts: list[str] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock) and role == "assistant":
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock) and role == "user":
            content = "" if block.content is None else _text(block.content)
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        else:
            raise UnsupportedField(
                f"blocks of type `{block.type}` are not supported for `{role}`", param=param
            )
    if texts or calls or not blocks:
        fields: Json = {"role": role, "content": "".join(texts)}
        if any(thoughts) and role == "assistant":
            fields["reasoning_content"] = "".join(thoughts)
        yield fields | ({"tool_calls": calls} if calls else {})


def _text(content: Text) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if isinstance(block, OtherBlock):
            raise UnsupportedField(f"blocks of type `{block.type}` are not supported", param="type")
    return "\n".join([block.text for block in content if isinstance(block, TextBlock)])


def _function(tool: Tool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return function | {"strict": True} if tool.strict else function
