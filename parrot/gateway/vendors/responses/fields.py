"""Fields of the Responses API: requests, answers and items, which are messages, calls and results.
Also converts items to messages for chat templates."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    TypeAdapter,
    model_validator,
)

from parrot.gateway.answers import reasoning_options
from parrot.gateway.vendors.endpoint import Bounded, VendorAnswer, Wire, check_sizes
from parrot.gateway.vendors.endpoint import Item as ListItem
from parrot.gateway.vendors.openai_fields import (
    MAX_PARTS,
    CommonFields,
    Content,
    Ignored,
    Json,
    Refused,
    arguments_of,
    call_rules,
    chosen_tool,
    constraint,
    content_of,
    sampling_fields,
    shown,
)
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.endpoint import parse_payload
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.fields import (
    Amount,
    AnyJson,
    ForeignId,
    JsonObject,
    Label,
    PerformanceCriteria,
    Text,
)
from parrot.protocol.sampling import OPEN_LENGTH, GenLength, ResolvedSampling, SamplingConfig

MAX_ITEMS = 4096  # Items of a request's input.
_KINDS = ("message", "function_call", "function_call_output", "item_reference", "reasoning")
_JOINED = {"tool_calls", "reasoning_content"}  # Text of the answer joins a message with these.
MAX_TOOLS = 512  # Tools of a request.


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict) and None in value.values():
        return {name: field for name, field in value.items() if field is not None}
    return value


class Dumped(Wire):
    """An object that clients may send back as received, with nulls for missing fields."""

    _without_nulls = model_validator(mode="before")(_drop_nulls)


class ResponseItem(ListItem):
    id_prefix: ClassVar[str]

    id: ForeignId | None = None
    status: Ignored = None

    @property
    def written(self) -> str:
        """All texts of the item, to count their bytes."""
        return orjson.dumps(self.model_dump()).decode()

    def listed(self) -> Json:
        """The item in the form that clients receive."""
        return {"status": "completed"} | self.model_dump(exclude_none=True)


class MessageItem(ResponseItem):
    id_prefix = "msg"

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Ignored = None

    @property
    def written(self) -> str:
        if isinstance(self.content, str) and self.status is None and self.phase is None:
            return self.content
        return super().written

    def listed(self) -> Json:
        fields = super().listed()
        if isinstance(self.content, str):
            if self.role == "assistant":
                part: Json = {"type": "output_text", "text": self.content, "annotations": []}
            else:
                part = {"type": "input_text", "text": self.content}
            fields["content"] = [part]
        return fields


class CallItem(ResponseItem):
    id_prefix = "fc"

    type: Literal["function_call"]
    call_id: ForeignId
    name: Label
    namespace: ForeignId | None = None
    arguments: Text = "{}"
    caller: Ignored = None
    parsed_arguments: Ignored = Field(None, exclude=True)  # the client's parsed arguments


class CallOutputItem(ResponseItem):
    id_prefix = "fco"

    type: Literal["function_call_output"]
    call_id: ForeignId
    output: Content
    name: Ignored = None
    caller: Ignored = None


class ItemReference(Wire):
    """Refers to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ForeignId


class ReasoningText(Bounded):
    text: Text = ""


class ReasoningItem(ResponseItem):
    """Reasoning before an answer. The chat template decides whether the model sees it. Encrypted
    reasoning and summaries of other services are ignored."""

    model_config = ConfigDict(extra="ignore")
    id_prefix = "rs"

    type: Literal["reasoning"]
    summary: Ignored = Field([])
    content: list[ReasoningText] = Field([], fail_fast=True, max_length=MAX_PARTS)

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.content])


class OtherItem(Bounded):
    """An item of a tool that is not supported."""

    type: str = Field(max_length=64)


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "message"  # validation reports the error
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference"
    return kind if kind in _KINDS else "other"


_AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


def _as_items(value: Any) -> Any:
    """Converts a string to a user message, and drops nulls from items that clients send back."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return value  # validation reports the error
    return [_drop_nulls(item) for item in check_sizes(value)]


Items = Annotated[
    list[_AnyItem],
    Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS),
    BeforeValidator(
        _as_items,
        json_schema_input_type=Text | Annotated[list[JsonObject], Field(max_length=MAX_ITEMS)],
    ),
]
_OUTPUT = TypeAdapter(list[_AnyItem])


def output_items(output: Sequence[Json]) -> list[ResponseItem]:
    """The items of a response's output."""
    return [item for item in _OUTPUT.validate_python(output) if isinstance(item, ResponseItem)]


def template_messages(items: Iterable[ResponseItem], refused: Refused) -> list[Json]:
    """The messages in the form that chat templates expect. A model's reasoning, text and tool calls
    are separate items, but become one message. Errors for content that templates do not accept are
    added to `refused`."""
    messages: list[Json] = []
    for i, item in enumerate(items):
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        # Check the usual type first: an `isinstance` that fails is slow for pydantic models.
        if isinstance(item, MessageItem):
            text = content_of(item.content, refused, f"input.{i}.content")
            is_joined = item.role == "assistant" and last is not None and last.keys() & _JOINED
            if last is not None and is_joined and isinstance(text, str):
                last["content"] += text
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text})
        elif isinstance(item, CallItem):
            if last is None:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, CallOutputItem):
            content = content_of(item.output, refused, f"input.{i}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, ReasoningItem) and (reasoning := item.reasoning):
            fields = {"role": "assistant", "content": "", "reasoning_content": reasoning}
            messages.append(fields)
    return messages


def _call(item: CallItem) -> Json:
    function = {"name": item.name, "arguments": arguments_of(item.arguments, item.name, "input")}
    return {"id": item.call_id, "type": "function", "function": function}


class FunctionTool(Dumped):
    type: Literal["function"]
    name: Label
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: Ignored = None


class Namespace(Dumped):
    """Functions in a namespace. A call contains the namespace and the function's name."""

    type: Literal["namespace"]
    name: Label
    description: Text | None = None
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)


class OtherTool(Bounded):
    """A tool that is not supported: one that OpenAI runs, or one without JSON arguments."""

    type: str = Field(max_length=64)


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else "function"
    return kind if kind in ("function", "namespace") else "other"


_AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


class Reasoning(Bounded):
    """`effort` is a variable of the chat template and turns reasoning on or off. Other fields have
    no effect."""

    effort: str | None = Field(None, max_length=64)


class TextOptions(Wire):
    format: JsonObject | None = None
    verbosity: Ignored = None


class ResponseRequest(CommonFields):
    input: Items
    instructions: Text | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: GenLength | None = None
    text: TextOptions | None = None
    tools: list[_AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Label | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[Label] | None = Field(None, max_length=64)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    ignore_eos: bool | None = None  # vLLM's extension
    # These would affect the answer, and are rejected.
    prompt: AnyJson = None
    conversation: AnyJson = None
    max_tool_calls: AnyJson = None
    moderation: AnyJson = None
    context_management: AnyJson = None
    # These do not affect the answer.
    client_metadata: Ignored = None
    prompt_cache_options: Ignored = None

    @property
    def criteria(self) -> PerformanceCriteria:
        return PerformanceCriteria.THROUGHPUT if self.background else super().criteria

    @property
    def is_kept(self) -> bool:
        return self.store is not False and not self.is_deferred

    def ignored(self) -> Json:
        verbosity = None if self.text is None else self.text.verbosity
        return super().ignored() | ({} if verbosity is None else {"verbosity": verbosity})

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token whose log probabilities are requested; None: no log
        probabilities."""
        is_included = "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or (0 if is_included else None)

    def require_support(self) -> None:
        """Raise `UnsupportedField` with the name of a field that is not supported."""
        for name in ("prompt", "conversation", "max_tool_calls", "moderation"):
            if getattr(self, name) is not None:
                raise UnsupportedField(f"`{name}` is not supported", param=name)
        if self.context_management:
            text = "`context_management` is not supported"
            raise UnsupportedField(text, param="context_management")
        if self.truncation == "auto":
            raise UnsupportedField("`truncation: auto` is not supported", param="truncation")
        if self.is_deferred and (self.background or self.store):
            text = "a deferred response cannot be stored or run in the background"
            raise InvalidRequest(text, param="parrot.defer")
        if self.background and not self.is_kept:
            raise InvalidRequest("a background response must be stored", param="store")

    def sampling(self) -> SamplingConfig:
        given = sampling_fields(
            self,
            max_gen_length=self.max_output_tokens or OPEN_LENGTH,
            logprobs=self.num_logprobs,
            **constraint(None if self.text is None else _format(self.text.format)),
        )
        return parse_payload(SamplingConfig, given)

    def template_options(self) -> Json:
        """The variables of the chat template, except the messages."""
        effort = None if self.reasoning is None else self.reasoning.effort
        options = dict(reasoning_options(effort))
        if effort is not None:
            options["reasoning_effort"] = effort
        if functions := self._functions():
            options["tools"] = [shown(function) for function in functions]
        return options

    def call_rules(self) -> CallRules | None:
        """The rules for the tool calls in an answer."""
        return call_rules(
            self._functions(),
            must_call=self.tool_choice == "required",
            name=chosen_tool(self.tool_choice),
            may_call_many=self.parallel_tool_calls is not False,
        )

    def _functions(self) -> list[Json]:
        tools = [f for i, tool in enumerate(self.tools or ()) for f in _functions_of(i, tool)]
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("two tools have the same name", param="tools")
        return [] if self.tool_choice == "none" else list(map(_function, tools))

    def frame(self, response_id: str, sampling: ResolvedSampling) -> Json:
        """The response before it has any output."""
        text = None if self.text is None else self.text.format
        effort = None if self.reasoning is None else self.reasoning.effort
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued" if self.background or self.is_deferred else "in_progress",
            "background": bool(self.background),
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": {}
            if self.metadata is None
            else self.metadata.model_dump(exclude_none=True),
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": self.service_tier or "auto",
            "store": self.is_kept,
            "temperature": sampling.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"strict": None} | t.model_dump(exclude_none=True) for t in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": self.user,
        }


class Asked(NamedTuple):
    """A request without its input, whose items are in its record, and its client."""

    request: ResponseRequest
    program: str | None
    traceparent: str
    # Not journaled.
    request_id: str = ""
    client_key: SecretStr | None = None
    client: str = ""

    def fields(self) -> dict[str, Any]:
        """The JSON form, which `of` reads."""
        request = self.request.model_dump(mode="json", exclude={"input"}, exclude_unset=True)
        return {"request": request, "program": self.program, "traceparent": self.traceparent}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Raises `ValidationFailed`."""
        request = parse_payload(ResponseRequest, fields["request"] | {"input": ""})
        return cls(request, fields["program"], fields["traceparent"])


class ResponseAnswer(VendorAnswer):
    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[Json]
    usage: Json | None


class DeletedResponse(VendorAnswer):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(VendorAnswer):
    object: Literal["list"]
    data: list[Json]
    has_more: bool


class InputTokens(VendorAnswer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class RetrieveRequest(Wire):
    """`starting_after`: the number of the last event that the client has received."""

    stream: bool = False
    starting_after: Amount | None = None
    include: Ignored = None
    include_list: Ignored = Field(None, alias="include[]")
    include_obfuscation: Ignored = None


class CancelRequest(Wire):
    """Has no fields."""


class ListRequest(Wire):
    after: Label | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    include: Ignored = None
    include_list: Ignored = Field(None, alias="include[]")


def _format(text_format: Json | None) -> Json | None:
    """The text format as a `response_format` of chat completions, which has one more level."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    if not isinstance(text_format.get("schema"), dict):
        raise InvalidRequest("the format has no `schema`", param="text.format")
    return {"type": "json_schema", "json_schema": text_format}


def _functions_of(index: int, tool: FunctionTool | Namespace | OtherTool) -> Sequence[FunctionTool]:
    if isinstance(tool, OtherTool):
        raise UnsupportedField(
            f"tools of type `{tool.type}` are not supported", param=f"tools.{index}.type"
        )
    return [tool] if isinstance(tool, FunctionTool) else tool.tools


def _function(tool: FunctionTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.parameters or {}}
    if tool.description is not None:
        function["description"] = tool.description
    return function | {"strict": True} if tool.strict else function
