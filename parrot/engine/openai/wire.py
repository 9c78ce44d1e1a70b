"""OpenAI's request and answer bodies, for /completions and /chat/completions, and what servers of
other makers understand beyond OpenAI's own fields.

A server says who it is in the `owned_by` of its model list. An unknown one gets OpenAI's fields
only; a sampling field that it cannot carry out is refused by name, never dropped."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import hypot, isfinite
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from parrot.engine.openai.logprobs import ChoiceLogprobs, logprob_fields
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import EngineFailed, InvalidRequest, UnsupportedField
from parrot.protocol.sampling import SamplingConfig

DONE = b"[DONE]"

_SAME_NAMES = frozenset({"top_p", "presence_penalty", "frequency_penalty", "seed"})
_STANDARD = _SAME_NAMES | {
    "temperature",
    "max_gen_length",
    "stop_str",
    "logit_bias",
    "logprobs",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """`extras`: our sampling field -> the server's name of it. `neutral`: sent with each request,
    since the server would otherwise put its own or the model's defaults in place of ours.
    `is_serial`: the server has one request at a time; a second one cuts the first short, and who
    leaves before an answer that is not streamed stops nothing. `schema_in_object`: how it wants the
    schema of `response_format`. `takes_salt`: it shares KV only among requests of one salt."""

    name: str
    extras: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    schema_on_completions: bool = False
    schema_in_object: bool = False
    is_serial: bool = False
    takes_salt: bool = False

    def supported(self, is_chat: bool) -> frozenset[str]:
        schema = {"json_schema"} if is_chat or self.schema_on_completions else set()
        return _STANDARD | self.extras.keys() | schema


OPENAI = Dialect("openai")

_EXTRAS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "ignore_tokenizer_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
_VLLM_KINDS = {"regex": "regex", "grammar": "grammar", "choices": "choice"}
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_LLAMA_EXTRAS = {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
_LLAMA_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}

BY_OWNER: Mapping[str, Dialect] = {
    "vllm": Dialect(
        "vllm",
        {**_EXTRAS, **dict.fromkeys(_VLLM_KINDS, "structured_outputs")},
        _NEUTRAL,
        schema_on_completions=True,
        takes_salt=True,
    ),
    "sglang": Dialect(
        "sglang",
        {**_EXTRAS, "regex": "regex", "choices": "regex"},
        _NEUTRAL,
        schema_on_completions=True,
    ),
    "llamacpp": Dialect(
        "llama.cpp", {**_LLAMA_EXTRAS, "ignore_tokenizer_eos": "ignore_eos"}, _LLAMA_NEUTRAL
    ),
    "me": Dialect(
        "llama-cpp-python", _LLAMA_EXTRAS, _LLAMA_NEUTRAL, schema_in_object=True, is_serial=True
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Model, endpoint and field names of all requests, fixed by the configuration."""

    model: str
    is_chat: bool
    length_field: str = "max_tokens"
    stream_usage: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; KV may be shared among questions of the same `salt`."""

    prompt: str
    sampling: SamplingConfig
    salt: str = ""


def request_body(
    target: Target, dialect: Dialect, question: Question, *, stream: bool
) -> dict[str, Any]:
    """The caller has checked that the dialect supports what its sampling asks for."""
    sampling = question.sampling
    body: dict[str, Any] = {
        "model": target.model,
        "temperature": sampling.temperature,
        target.length_field: sampling.max_gen_length,
        **dialect.neutral,
        **_sampling_fields(dialect, sampling),
        **logprob_fields(sampling, is_chat=target.is_chat),
    }
    if target.is_chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        body["prompt"] = question.prompt
    if dialect.takes_salt and question.salt:
        body["cache_salt"] = sha256(question.salt.encode("utf-8", "surrogatepass")).hexdigest()
    if stream:
        body["stream"] = True
        if target.stream_usage:
            body["stream_options"] = {"include_usage": True}
    return body


def _sampling_fields(dialect: Dialect, sampling: SamplingConfig) -> dict[str, Any]:
    """Only what differs from OpenAI's own defaults, for servers and models that know few fields."""
    fields = sampling.model_dump(include=set(_SAME_NAMES), exclude_defaults=True)
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(i): bias for i, bias in sampling.logit_bias.items()}
    if sampling.json_schema is not None:
        fields["response_format"] = _response_format(dialect, sampling.json_schema)
    for ours, theirs in dialect.extras.items():
        if value := getattr(sampling, ours):
            fields[theirs] = _extra(ours, theirs, value)
    return fields


def _extra(ours: str, theirs: str, value: Any) -> Any:
    if theirs == "structured_outputs":
        return {_VLLM_KINDS[ours]: value}
    return "|".join(map(re.escape, value)) if ours == "choices" else value


def _response_format(dialect: Dialect, schema: dict[str, Any] | str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"`json_schema` is not JSON: {error}", param="json_schema") from None
    if dialect.schema_in_object:
        return {"type": "json_object", "schema": parsed}
    named = {"name": "output", "schema": parsed, "strict": True}
    return {"type": "json_schema", "json_schema": named}


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string or token that ended the text


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class WireUsage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min((details and details.cached_tokens) or 0, self.prompt_tokens)


class Answer(BaseModel):
    """A whole answer, or one chunk of a stream."""

    choices: list[_Choice] = []
    usage: WireUsage | None = None

    @property
    def text(self) -> str:
        if not self.choices:
            return ""
        choice = self.choices[0]
        message = choice.message or choice.delta
        return choice.text or (message and message.content) or ""

    @property
    def logprobs(self) -> ChoiceLogprobs | None:
        return self.choices[0].logprobs if self.choices else None

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text, of servers that tell."""
        reason = self.choices[0].stop_reason if self.choices else None
        return reason if isinstance(reason, str) else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the text goes on. Raises when it ended as no text should."""
        reason = self.choices[0].finish_reason if self.choices else None
        if reason is None:
            return None
        if reason in _UNFINISHED:
            raise EngineFailed(f"the server behind this engine ended the text: {reason}")
        return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


_UNFINISHED = frozenset({"content_filter", "abort", "error", "tool_calls", "function_call"})


def parse_answer(payload: Any) -> Answer:
    """Raises `EngineFailed` when it is none, and when the model refused to answer in the schema."""
    try:
        answer = Answer.model_validate(payload)
    except ValidationError:
        raise EngineFailed("the server behind this engine sent no OpenAI answer") from None
    for choice in answer.choices[:1]:
        message = choice.message or choice.delta
        if message is not None and message.refusal:
            raise EngineFailed(f"the model refused: {message.refusal[:200]}")
    return answer


class _Embedding(BaseModel):
    index: int = 0
    embedding: list[float] | list[list[float]]

    def unit(self) -> list[float]:
        """The vector with length 1. Raises `UnsupportedField` for one of each token, and
        `EngineFailed` for one that has no direction."""
        vector = [value for value in self.embedding if not isinstance(value, list)]
        if len(vector) < len(self.embedding):
            text = "the server behind this engine makes an embedding of each token, not of a text"
            raise UnsupportedField(text, param="model")
        length = hypot(*vector)
        if not isfinite(length) or not length:
            raise EngineFailed("the server behind this engine sent an embedding without direction")
        return [value / length for value in vector]


class Embeddings(BaseModel):
    data: list[_Embedding]
    usage: WireUsage = WireUsage()


def parse_embeddings(payload: Any, count: int) -> Embeddings:
    """In the order of their inputs. Raises `EngineFailed` unless there are so many."""
    try:
        answer = Embeddings.model_validate(payload)
    except ValidationError:
        raise EngineFailed("the server behind this engine sent no OpenAI embeddings") from None
    answer.data.sort(key=lambda item: item.index)
    if len(answer.data) != count:
        raise EngineFailed("the server behind this engine sent embeddings that do not fit")
    return answer
