"""OpenAI's chat completions: from their fields to a turn."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.prompts.reasoning import reasoning_options
from parrot.gateway.vendors.openai_common import (
    MAX_PARTS,
    Content,
    GenerationFields,
    Ignored,
    Json,
    arguments_of,
    text_of,
)
from parrot.gateway.vendors.tool_choice import call_rules, chosen_tool, shown
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.fields import Few, ForeignId, Item, JsonObject, Label, Text, Wire
from parrot.protocol.sampling import GenLength

MAX_MESSAGES = 4096
MAX_TOOLS = 512
_PLAIN = {"role", "content"}


class FunctionCall(Wire):
    name: Label
    arguments: Text = "{}"


class ToolCall(Wire):
    id: ForeignId = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Item):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: ForeignId | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_PARTS)
    tool_call_id: ForeignId | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name of it
    refusal: Text | None = None
    annotations: Ignored = None
    audio: None = None
    function_call: None = None


class ChatRequest(GenerationFields):
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
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=32)
    modalities: list[Literal["text"]] | None = Field(None, max_length=8)
    verbosity: Ignored = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens whose log probabilities are wanted; None: of no token. Raises
        `InvalidRequest`."""
        if not self.logprobs:
            if self.top_logprobs:
                text = "`top_logprobs` needs `logprobs: true`"
                raise InvalidRequest(text, param="top_logprobs")
            return None
        return self.top_logprobs or 0


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them."""
    return [
        {"role": message.role, "content": message.content}
        if _is_plain(message)
        else _template_message(i, message)
        for i, message in enumerate(messages)
    ]


def _is_plain(message: ChatMessage) -> bool:
    is_text = isinstance(message.content, str) and message.role != "developer"
    return is_text and message.model_fields_set == _PLAIN


def template_options(request: ChatRequest) -> dict[str, Any]:
    """The variables of the chat template beside the messages."""
    given = request.chat_template_kwargs
    if reserved := given.keys() & {"messages", "add_generation_prompt", "tools"}:
        raise UnsupportedField(f"a template's `{reserved.pop()}` cannot be replaced")
    options = {**reasoning_options(request.reasoning_effort), **given}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    if functions := _functions(request):
        options["tools"] = [shown(function) for function in functions]
    return options


def rules_of(request: ChatRequest) -> CallRules | None:
    """The rules for the calls in an answer."""
    return call_rules(
        _functions(request),
        must_call=request.tool_choice == "required",
        name=chosen_tool(request.tool_choice),
        may_call_many=request.parallel_tool_calls is not False,
    )


def _functions(request: ChatRequest) -> list[Json]:
    tools = [] if request.tool_choice == "none" else request.tools or []
    return [_function(i, tool) for i, tool in enumerate(tools)]


def _function(index: int, tool: Json) -> Json:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return dict(tool["function"])
    raise InvalidRequest("a tool is a function with a name", param=f"tools.{index}")


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.refusal if message.content is None else text_of(message.content)
    fields: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequest(f"a message of role `{role}` has tool calls", param="messages")
        fields["tool_calls"] = list(_calls(index, message.tool_calls))
    if (reasoning := message.reasoning_content or message.reasoning) and role == "assistant":
        fields["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    return fields


def _calls(index: int, calls: list[ToolCall]) -> Iterator[dict[str, Any]]:
    param = f"messages.{index}.tool_calls"
    for call in calls:
        arguments = arguments_of(call.function.arguments, call.function.name, param)
        function = {"name": call.function.name, "arguments": arguments}
        yield {"id": call.id, "type": "function", "function": function}
