"""The fields of requests for responses, and the frame of the answers."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, Tag

from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.prompts.reasoning import reasoning_options
from parrot.gateway.vendors.endpoint import VendorAnswer
from parrot.gateway.vendors.openai_common import (
    DEFAULT_MAX_TOKENS,
    CommonFields,
    Ignored,
    Json,
    constraint,
)
from parrot.gateway.vendors.responses.items import Dumped, Items
from parrot.gateway.vendors.tool_choice import call_rules, chosen_tool, shown
from parrot.protocol.endpoint import parse_payload
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.fields import (
    Amount,
    AnyJson,
    Bounded,
    JsonObject,
    Label,
    PerformanceCriteria,
    Text,
    Wire,
)
from parrot.protocol.sampling import GenLength, SamplingConfig

MAX_TOOLS = 512


class FunctionTool(Dumped):
    type: Literal["function"]
    name: Label
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: Ignored = None


class Namespace(Dumped):
    """Functions under a name, which a call of one of them has beside the function's."""

    type: Literal["namespace"]
    name: Label
    description: Text | None = None
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)


class OtherTool(Bounded):
    """A tool that OpenAI runs, or that takes no JSON; there is none here."""

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
    """`effort` is a variable of the chat template, and says whether it lets the model reason; the
    rest changes nothing."""

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
    ignore_eos: bool | None = None  # not OpenAI's, but what vLLM takes
    # They would change the answer.
    prompt: AnyJson = None
    conversation: AnyJson = None
    max_tool_calls: AnyJson = None
    moderation: AnyJson = None
    context_management: AnyJson = None
    # Nothing in the answer depends on these.
    client_metadata: Ignored = None
    prompt_cache_options: Ignored = None

    @property
    def criteria(self) -> PerformanceCriteria:
        return PerformanceCriteria.THROUGHPUT if self.background else super().criteria

    @property
    def is_kept(self) -> bool:
        return self.store is not False and not self.is_deferred

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens whose log probabilities are wanted; None: not even the
        token's own."""
        is_included = "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or (0 if is_included else None)

    def require_support(self) -> None:
        """Raise `UnsupportedField` naming a field that would change the answer."""
        for name in ("prompt", "conversation", "max_tool_calls", "moderation"):
            if getattr(self, name) is not None:
                raise UnsupportedField(f"`{name}` is not supported", param=name)
        if self.context_management:
            raise UnsupportedField("contexts are not compacted", param="context_management")
        if self.truncation == "auto":
            raise UnsupportedField("items are not left out", param="truncation")
        if self.is_deferred and (self.background or self.store):
            text = "a deferred response is neither stored nor in the background"
            raise InvalidRequest(text, param="parrot.defer")
        if self.background and not self.is_kept:
            raise InvalidRequest("a background response must be stored", param="store")

    def sampling(self) -> SamplingConfig:
        given = {
            "max_gen_length": self.max_output_tokens or DEFAULT_MAX_TOKENS,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "ignore_tokenizer_eos": self.ignore_eos,
            "logprobs": self.num_logprobs,
        }
        given |= constraint(None if self.text is None else _format(self.text.format))
        return parse_payload(SamplingConfig, {k: v for k, v in given.items() if v is not None})

    def template_options(self) -> Json:
        """The variables of the chat template beside the messages."""
        effort = None if self.reasoning is None else self.reasoning.effort
        options = dict(reasoning_options(effort))
        if effort is not None:
            options["reasoning_effort"] = effort
        if functions := self._functions():
            options["tools"] = [shown(function) for function in functions]
        return options

    def call_rules(self) -> CallRules | None:
        """The rules for the calls in an answer."""
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

    def frame(self, response_id: str, sampling: SamplingConfig) -> Json:
        """The response before anything of it is there."""
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
    """A request without its input, whose items are in its record, and who made it."""

    request: ResponseRequest
    program: str | None
    traceparent: str

    def fields(self) -> dict[str, Any]:
        """All of it as JSON, for `of`."""
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


class PromptTokens(VendorAnswer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class RetrieveRequest(Wire):
    """`starting_after`: the number of the event behind which the stream goes on."""

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
    """The same as a `response_format` of chat completions, which has one level more."""
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
