"""Fields that OpenAI's APIs share, and common parts of their answers. Also the rules for tool
calls, for all vendors."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from parrot.gateway.transcript import MAX_PLACEHOLDERS
from parrot.gateway.turn_request import TurnChain
from parrot.gateway.turns import Turn
from parrot.gateway.vendors.endpoint import Bounded, Caller, Wire, require_shallow
from parrot.protocol.call_grammar import CallRules
from parrot.protocol.endpoint import parse_payload
from parrot.protocol.errors import InvalidRequest, ParrotError, UnsupportedField
from parrot.protocol.fields import (
    AnyJson,
    Credential,
    ForeignId,
    Id,
    JsonObject,
    Label,
    Name,
    PerformanceCriteria,
    Text,
)
from parrot.protocol.public import Timeout, VarGetResponse
from parrot.protocol.sampling import (
    OPEN_LENGTH,
    OPENAI_NAMES,
    VLLM_NAMES,
    Choices,
    GenLength,
    Grammar,
    LogitBias,
    SamplingConfig,
    StopIds,
    StopStrings,
)

MAX_CHOICES = 16  # Answers per request.
MAX_PARTS = 1024  # Parts of a message.
_OUR_NAMES = {theirs: ours for ours, theirs in (OPENAI_NAMES | VLLM_NAMES).items()}
_CONSTRAINTS = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
_CONSTRAINING = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
)
_FORMATS = frozenset({"text", "json_object", "json_schema"})  # Formats that Parrot supports.

Json = dict[str, Any]

Ignored = AnyJson
"""The type of a field that does not affect the answer. Any value is accepted and ignored."""


class TextPart(Wire):
    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Ignored = None
    cache_control: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None  # the client's parsed value


class OtherPart(Bounded):
    """A part that is not text, such as an image. Only servers behind engines may support it."""

    type: str = Field(max_length=64)


def _part_kind(value: Any) -> str:
    # Serialization passes the model.
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "text" if kind in (None, "text", "input_text", "output_text") else "other"


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("other")],
    Discriminator(_part_kind),
]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


def _content_kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(_content_kind),
]


Refused = list[ParrotError]
"""Errors for content that only servers behind engines accept, see `TurnRequest`."""


def content_of(content: Content, refused: Refused, param: str) -> str | list[Json]:
    """The text of a message. With other parts, such as images, the parts as in chat completions,
    and an error in `refused` for each of them. `param` names the content."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        # Check the usual type first: an `isinstance` that fails is slow for pydantic models.
        if not isinstance(part, TextPart):
            return list(_parts(content, refused, param))
        texts.append(part.text)
    return "".join(texts)


def _parts(parts: Sequence[TextPart | OtherPart], refused: Refused, param: str) -> Iterator[Json]:
    for i, part in enumerate(parts):
        if isinstance(part, TextPart):
            yield {"type": "text", "text": part.text}
        else:
            refused.append(unsupported_part(part.type, f"{param}.{i}"))
            yield chat_part(part.model_dump(), f"{param}.{i}")


def unsupported_part(kind: str, param: str) -> UnsupportedField:
    text = f"parts of type `{kind}` are not supported by the engines of this model"
    return UnsupportedField(text, param=param)


def chat_part(part: Json, param: str) -> Json:
    """A part as in chat completions, from one of those or of the Responses API. Raises
    `UnsupportedField` for files that only the Responses API can name."""
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": url, **detail}}
        case {"type": "input_file"} if part.get("file_url") is None:
            names = ("filename", "file_data", "file_id")
            given = {name: part[name] for name in names if part.get(name) is not None}
            return {"type": "file", "file": given}
        case {"type": "input_image" | "input_file" as kind}:
            text = f"a part of type `{kind}` must contain its data, because chat completions have "
            text += "no other form of it"
            raise UnsupportedField(text, param=param)
    return part


def arguments_of(text: str, call: str, param: str) -> Any:
    """A call's arguments as an object, because chat templates serialize them themselves. Raises
    `InvalidRequest`."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError as error:
        message = f"the arguments of tool call `{call}` are not JSON: {error}"
        raise InvalidRequest(message, param=param) from None
    require_shallow(arguments)
    return arguments


class ChunkOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Ignored = None


class Metadata(Bounded):
    """`user_id` names the program; coding agents set it."""

    user_id: ForeignId | None = None


class ChainFields(Wire):
    """Parrot's own fields: session variables in the prompt, and the answer as a variable."""

    session_id: Id | None = None
    session_auth: Credential | None = None
    inputs: dict[Name, Name] = Field({}, max_length=MAX_PLACEHOLDERS)
    output: Name | None = None
    criteria: PerformanceCriteria | None = None
    deadline: Timeout | None = None
    defer: bool = False


class ChainedFields(Wire):
    """A request that may contain session variables and may set one with its answer."""

    stream: bool | None = None
    parrot: ChainFields | None = None

    @property
    def criteria(self) -> PerformanceCriteria:
        return PerformanceCriteria.LATENCY

    @property
    def effective_criteria(self) -> PerformanceCriteria:
        given = None if self.parrot is None else self.parrot.criteria
        return given or self.criteria

    @property
    def deadline(self) -> float | None:
        return None if self.parrot is None else self.parrot.deadline

    @property
    def is_deferred(self) -> bool:
        return self.parrot is not None and self.parrot.defer

    def chain(self) -> TurnChain | None:
        """Raises `UnsupportedField` for a deferred answer with `stream: true`."""
        fields = self.parrot
        if fields is None:
            return None
        is_chained = fields.defer or fields.inputs or fields.output is not None
        if fields.session_id is None and not is_chained:
            return None
        if fields.defer and self.stream:
            raise UnsupportedField("a deferred answer cannot be streamed", param="parrot.defer")
        criteria = fields.criteria
        if fields.deadline is not None and criteria is None:
            criteria = PerformanceCriteria.LATENCY
        return TurnChain(
            session_id=fields.session_id,
            session_auth=fields.session_auth,
            inputs=fields.inputs,
            output=fields.output,
            is_deferred=fields.defer,
            criteria=criteria,
            deadline=fields.deadline,
        )


class CommonFields(ChainedFields):
    """Unknown fields are kept for the servers behind engines."""

    model_config = ConfigDict(extra="allow")
    in_extra: ClassVar[tuple[str, ...]] = (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "metadata",
    )
    """Fields that do not affect Parrot's answer, but may affect the answer of such a server."""

    model: Name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream_options: ChunkOptions | None = None
    # The program's name and the urgency of the request.
    prompt_cache_key: ForeignId | None = None
    metadata: Metadata | None = None
    service_tier: Label | None = None
    # These do not affect the answer.
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None

    def ignored(self) -> Json:
        """The fields of `in_extra` that are set."""
        found: Json = {}
        for name in self.model_fields_set.intersection(self.in_extra):
            if (value := getattr(self, name)) is not None:
                is_model = isinstance(value, BaseModel)
                found[name] = value.model_dump(exclude_unset=True) if is_model else value
        return found

    @property
    def criteria(self) -> PerformanceCriteria:
        """Latency, except for the service tier `flex`, which accepts delays."""
        is_patient = self.service_tier == "flex"
        return PerformanceCriteria.THROUGHPUT if is_patient else PerformanceCriteria.LATENCY


class StructuredOutputs(Wire):
    """vLLM's field `structured_outputs`."""

    json_: JsonObject | Text | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class PredictedContent(Wire):
    type: Literal["content"] = "content"
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


class GenerationFields(CommonFields):
    in_extra = (*CommonFields.in_extra, "store", "prediction")

    max_tokens: GenLength | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Label | StopStrings | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    response_format: JsonObject | None = None
    # vLLM's extensions of OpenAI's API.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0, le=10)
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | Text | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    # These do not affect the answer. A correct prediction makes the answer faster.
    store: Ignored = None
    prediction: PredictedContent | None = None

    @property
    def predicted(self) -> str:
        """Text that the answer may repeat."""
        if self.prediction is None:
            return ""
        content = self.prediction.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def _has_other_format(self) -> bool:
        """Whether the format is one that only servers behind engines may support."""
        given = self.response_format
        return given is not None and given.get("type", "text") not in _FORMATS

    def refused(self) -> Refused:
        """Errors for values that only servers behind engines support."""
        if not self._has_other_format:
            return []
        text = f"format `{(self.response_format or {})['type']}` is not supported"
        return [UnsupportedField(text, param="response_format")]

    def ignored(self) -> Json:
        other = {"response_format": self.response_format} if self._has_other_format else {}
        return super().ignored() | other

    def _constraint(self) -> Json:
        """The field of `SamplingConfig` that constrains the output. Raises `InvalidRequest` for
        more than one constraint."""
        if self.model_fields_set.isdisjoint(_CONSTRAINING):
            return {}
        is_other = self._has_other_format
        of_format = {} if is_other else constraint(self.response_format)
        given = self.structured_outputs
        asked = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice")}
        asked["grammar"] = self.guided_grammar
        if given is not None:
            asked |= _set(
                {
                    "json": {"type": "object"} if given.json_object else given.json_,
                    "regex": given.regex,
                    "choice": given.choice,
                    "grammar": given.grammar,
                }
            )
        found = of_format | {_CONSTRAINTS[name]: value for name, value in _set(asked).items()}
        if len(found) > 1:
            text = (
                f"an output can have one constraint, but {len(found)} are set: {', '.join(found)}"
            )
            raise InvalidRequest(text, param="response_format" if of_format else "guided_json")
        return found

    def samplings(
        self, max_tokens: int | None, logprobs: int | None = None, *, count: int | None = None
    ) -> list[SamplingConfig]:
        """One sampling config per choice, or `count`. With a seed, each has a different seed.
        `logprobs`: alternatives per token. Raises `ValidationFailed` with the field of
        `SamplingConfig`."""
        given = sampling_fields(
            self,
            top_k=0 if self.top_k == -1 else self.top_k,
            max_gen_length=OPEN_LENGTH if max_tokens is None else max_tokens,
            logprobs=logprobs,
            **self._constraint(),
        )
        count = self.n or 1 if count is None else count
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(count)]
        return [
            parse_payload(SamplingConfig, given if seed is None else given | {"seed": seed})
            for seed in seeds
        ]


def sampling_fields(request: ChainedFields, **given: Any) -> dict[str, Any]:
    """The fields of `SamplingConfig` that a request sets under vendors' names, except those in
    `given`. None, empty stop strings and empty biases count as not set."""
    found = {name: value for name, value in given.items() if value is not None}
    for name in request.model_fields_set & _OUR_NAMES.keys():
        ours, value = _OUR_NAMES[name], getattr(request, name)
        is_empty = value is None or (not value and ours in ("stop_str", "logit_bias"))
        if ours not in given and not is_empty:
            found[ours] = value
    return found


def _set(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def constraint(response_format: Json | None) -> Json:
    """The field of `SamplingConfig` that a `response_format` sets."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object", "schema": dict(schema)}:  # llama.cpp's
            return {"json_schema": schema}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": schema}
        case {"type": "json_schema"}:
            raise InvalidRequest("the format has no `json_schema.schema`", param="response_format")
        case {"type": kind}:
            raise UnsupportedField(f"format `{kind}` is not supported", param="response_format")
    raise InvalidRequest("the format has no `type`", param="response_format")


def chained(request: ChainedFields, turns: Sequence[Turn]) -> Json:
    """The session and variables of the answers, if the request has `parrot` fields."""
    if request.parrot is None or not turns:
        return {}
    outputs = [completion.output.id for turn in turns for completion in turn.completions]
    return {"parrot": {"session_id": turns[0].session.id, "outputs": outputs}}


def program_of(request: CommonFields, caller: Caller) -> str | None:
    """The program's name: the request's cache key, a header or the user."""
    user = None if request.metadata is None else request.metadata.user_id
    return request.prompt_cache_key or caller.program or user


def usage_of(answers: Sequence[VarGetResponse], num_choices: int) -> Json | None:
    """The total usage of all answers. Each prompt has `num_choices` answers and counts once."""
    known = [answer.usage for answer in answers if answer.usage is not None]
    if len(known) < len(answers):
        return None
    output = sum(usage.output_tokens for usage in known)
    prompt = sum(usage.prompt_tokens for usage in known[::num_choices])
    accepted = sum(usage.accepted_tokens for usage in known)
    drafted = sum(usage.drafted_tokens for usage in known)
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in known[::num_choices])
        },
    } | ({"completion_tokens_details": details} if drafted else {})


def chosen_tool(choice: str | Json | None) -> str | None:
    """The function that `tool_choice` names; None: none. Raises `UnsupportedField`."""
    match choice:
        case None | "auto" | "none" | "required":
            return None
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return name
    text = "`tool_choice` must be `auto`, `none`, `required` or a function"
    raise UnsupportedField(text, param="tool_choice")


def call_rules(
    functions: Sequence[Json], *, must_call: bool, name: str | None, may_call_many: bool
) -> CallRules | None:
    """The rules for tool calls; None if there are no tools. `name`: the only function that may be
    called, and must be. Raises `InvalidRequest`."""
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise InvalidRequest(f"there is no tool `{name}`", param="tool_choice")
    if not functions:
        if must_call:
            raise InvalidRequest(
                "`tool_choice` requires a call, but `tools` is empty", param="tool_choice"
            )
        return None
    return CallRules(functions, must_call or name is not None, may_call_many and name is None)


def shown(function: dict[str, Any]) -> Json:
    """A function in the form that chat templates show to the model."""
    described = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": described}
