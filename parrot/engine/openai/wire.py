"""Request and answer bodies of OpenAI's /completions, /chat/completions and /embeddings."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import hypot, isfinite
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from parrot.engine.openai.dialects import Dialect
from parrot.engine.openai.logprobs import ChoiceLogprobs, logprob_fields
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import EngineFailed, InvalidRequest, UnsupportedField
from parrot.protocol.sampling import OPEN_LENGTH, SamplingConfig


class _Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class CallDelta(BaseModel):
    """A tool call, or a chunk of the tool call with this index."""

    index: int | None = None
    function: _Function = _Function()


class AnswerWriter:
    """Writes an answer of several parts as one text: reasoning, then the answer's text, then tool
    calls. See `conversation` of `GenerateRequest`."""

    def __init__(self) -> None:
        self._is_reasoning = False
        self._calls: dict[int, _Function] = {}

    def add(self, reasoning: str, text: str, calls: list[CallDelta]) -> str:
        """The text to append for one chunk. Tool calls are collected until `finish`."""
        written = ""
        if reasoning:
            written += reasoning if self._is_reasoning else f"<think>\n{reasoning}"
            self._is_reasoning = True
        if text:
            written += self._end_of_reasoning() + text if self._is_reasoning else text
        for number, call in enumerate(calls):
            index = number if call.index is None else call.index
            known = self._calls.setdefault(index, _Function())
            known.name = known.name or call.function.name
            known.arguments = (known.arguments or "") + (call.function.arguments or "")
        return written

    def finish(self) -> str:
        """The rest of the text after the last chunk: the end of the reasoning, and tool calls."""
        return self._end_of_reasoning() + "".join(self._written_calls())

    def _end_of_reasoning(self) -> str:
        was_reasoning, self._is_reasoning = self._is_reasoning, False
        return "\n</think>\n\n" if was_reasoning else ""

    def _written_calls(self) -> Iterator[str]:
        for call in self._calls.values():
            try:
                arguments = orjson.loads(call.arguments or "{}")
            except orjson.JSONDecodeError:
                arguments = call.arguments  # Not a valid call, but its text is kept.
            shown = orjson.dumps({"name": call.name, "arguments": arguments}).decode()
            yield f"\n<tool_call>\n{shown}\n</tool_call>"


DONE = b"[DONE]"

_SAME_NAMES = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"}
_CONVERSATION = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "chat_template_kwargs",
    }
)
_RESERVED = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "n", "best_of", "echo"}
)
"""Fields that `SamplingConfig.extra` cannot contain."""
_VLLM_KINDS = {"regex": "regex", "grammar": "grammar", "choices": "choice"}


@dataclass(frozen=True, slots=True)
class Target:
    """Model, endpoint and field names of all requests, from the configuration. Conversations use
    the chat endpoint even if `is_chat` is False."""

    model: str
    is_chat: bool
    chat_length_field: str = "max_tokens"
    stream_usage: bool = True

    def asks_chat(self, question: "Question") -> bool:
        return self.is_chat or "messages" in (question.conversation or ())


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the foreign server."""

    prompt: str | list[int]
    sampling: SamplingConfig
    salt: str = ""  # The server may share KV between requests with the same salt.
    priority: int = 0  # Lower runs first.
    echoes: bool = False  # The answer includes the prompt.
    traceparent: str = ""  # The parent span.
    request_id: str = ""  # Of the client's request.
    client_key: str = field(default="", repr=False)  # Sent if the server gets clients' keys.
    conversation: Mapping[str, Any] | None = None  # Replaces the prompt, see `GenerateRequest`.
    has_limit: bool = True

    @property
    def limit(self) -> int | None:
        """Output tokens. None: the server's context limits the answer."""
        length = self.sampling.max_gen_length
        return length if self.has_limit and length != OPEN_LENGTH else None


def request_body(
    target: Target,
    dialect: Dialect,
    features: frozenset[str],
    question: Question,
    *,
    stream: bool,
) -> dict[str, Any]:
    """The JSON body. The caller has checked that `features` include all that the sampling needs."""
    sampling, is_chat = question.sampling, target.asks_chat(question)
    length_field = target.chat_length_field if is_chat else "max_tokens"
    body: dict[str, Any] = {
        **_extra_fields(sampling),
        "model": target.model,
        **_sampling_fields(dialect, sampling),
        **logprob_fields(sampling, is_chat=is_chat),
    }
    # A completion without a limit would end after OpenAI's 16 tokens.
    limit = question.limit if is_chat else sampling.max_gen_length
    if limit is not None:
        body[length_field] = limit
    if question.conversation is not None and not is_chat:
        body |= question.conversation
    elif question.conversation is not None:
        body |= _conversation(dialect, question.conversation)
    elif is_chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        body["prompt"] = question.prompt
    if question.echoes:
        body["echo"] = True
    if "cache_salt" in features and question.salt:
        body["cache_salt"] = sha256(question.salt.encode("utf-8", "surrogatepass")).hexdigest()
    if "priority" in features and question.priority:
        body["priority"] = question.priority
    if stream:
        body["stream"] = True
        if target.stream_usage:
            body["stream_options"] = {"include_usage": True}
    return body


def _extra_fields(sampling: SamplingConfig) -> dict[str, Any]:
    extra = sampling.extra or {}
    if reserved := _RESERVED & extra.keys():
        name = min(reserved)
        raise InvalidRequest(f"Parrot sets `{name}` itself: leave it out", param=name)
    return extra


def _conversation(dialect: Dialect, given: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields for a conversation. Raises `UnsupportedField` if the server does not accept
    a template option."""
    if unknown := given.keys() - _CONVERSATION:
        raise InvalidRequest(f"`{min(unknown)}` is not a conversation field", param="conversation")
    if dialect.takes_options:
        return dict(given)
    body = {name: value for name, value in given.items() if name != "chat_template_kwargs"}
    options = given.get("chat_template_kwargs", {}).keys()
    effort = {"reasoning_effort", "enable_thinking", "thinking"}  # Synonyms.
    if options - (effort if "reasoning_effort" in given else set()):
        text = f"a {dialect.name} server does not accept `{min(options)}`"
        raise UnsupportedField(text, param="chat_template_kwargs")
    body["messages"] = [
        {name: value for name, value in message.items() if name != "reasoning_content"}
        for message in given.get("messages", ())
    ]
    return body


def _sampling_fields(dialect: Dialect, sampling: SamplingConfig) -> dict[str, Any]:
    """Only the fields that the request sets. The server's defaults apply to other fields, and some
    servers reject unknown fields."""
    given, values = sampling.model_fields_set, sampling.__dict__
    fields = {
        name: values[name]
        for name in given & _SAME_NAMES
        if values[name] != SamplingConfig.model_fields[name].default
    }
    if stop := sampling.stop_strings:
        fields["stop"] = list(stop)
    if bias := values["logit_bias"]:
        fields["logit_bias"] = {str(i): value for i, value in bias.items()}
    if (schema := values["json_schema"]) is not None:
        fields["response_format"] = _response_format(dialect, schema)
    for ours in given & dialect.extras.keys():
        theirs, value = dialect.extras[ours], values[ours]
        if value:
            fields[theirs] = _extra(ours, theirs, value)
        elif value is not None and theirs in dialect.off:
            fields[theirs] = dialect.off[theirs]
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


_OPEN = ConfigDict(extra="allow")  # Unknown fields are kept for the client.


# Answers are validated into dicts, because each attribute of a model takes as long as 10 keys.


@with_config(_OPEN)
class WireMessage(TypedDict, total=False):
    content: str | None
    refusal: str | None
    reasoning_content: str | None
    reasoning: str | None  # vLLM's name of `reasoning_content`.
    tool_calls: list[CallDelta] | None


@with_config(_OPEN)
class WireChoice(TypedDict, total=False):
    text: str | None
    message: WireMessage | None
    delta: WireMessage | None
    finish_reason: str | None
    logprobs: ChoiceLogprobs | None
    stop_reason: str | int | None  # vLLM: the stop string or token that ended the text.


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class WireUsage(BaseModel):
    model_config = _OPEN

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min((details and details.cached_tokens) or 0, self.prompt_tokens)


@with_config(_OPEN)
class WireAnswer(TypedDict, total=False):
    choices: list[WireChoice]
    usage: WireUsage | None


class ServerAnswer(NamedTuple):
    """A complete answer, or one chunk of a stream. Only the first choice is used."""

    fields: WireAnswer
    choice: WireChoice | None = None  # None: the chunk has no choice.
    message: WireMessage | None = None
    finish_reason: FinishReason | None = None  # None before the end.

    @property
    def usage(self) -> WireUsage | None:
        return self.fields.get("usage")

    @property
    def text(self) -> str:
        of_choice = None if self.choice is None else self.choice.get("text")
        return of_choice or (self.message and self.message.get("content")) or ""

    def written(self, writer: AnswerWriter) -> str:
        """The text of all parts of the answer, from `writer`."""
        message = self.message
        if message is None:
            return ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return writer.add(reasoning, self.text, message.get("tool_calls") or [])

    @property
    def logprobs(self) -> ChoiceLogprobs | None:
        return None if self.choice is None else self.choice.get("logprobs")

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if the server reports it."""
        reason = None if self.choice is None else self.choice.get("stop_reason")
        return reason if isinstance(reason, str) else None


_UNFINISHED = frozenset({"content_filter", "abort", "error", "function_call"})


_VALIDATOR = TypeAdapter(WireAnswer).validator


def parse_answer(payload: Any) -> ServerAnswer:
    """Raises `EngineFailed` if the payload is not an OpenAI answer, if the model refused, or if the
    server aborted the text."""
    try:
        fields: WireAnswer = _VALIDATOR.validate_python(payload)
    except ValidationError:
        raise EngineFailed(
            "the server behind this engine sent an answer that is not in OpenAI's format"
        ) from None
    if not (choices := fields.get("choices")):
        return ServerAnswer(fields)
    choice = choices[0]
    message = choice.get("message") or choice.get("delta")
    if message and (refusal := message.get("refusal")):
        raise EngineFailed(f"the model refused: {refusal[:200]}")
    reason = choice.get("finish_reason")
    return ServerAnswer(fields, choice, message, None if reason is None else _finish_reason(reason))


def _finish_reason(reason: str) -> FinishReason:
    if reason in _UNFINISHED:
        raise EngineFailed(f"the server behind this engine ended the text: {reason}")
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


class _Embedding(BaseModel):
    index: int = 0
    embedding: list[float] | list[list[float]]

    def unit(self) -> list[float]:
        """The normalized vector. Raises `UnsupportedField` for one vector per token, and
        `EngineFailed` for a vector that is 0 or not finite."""
        vector = [value for value in self.embedding if not isinstance(value, list)]
        if len(vector) < len(self.embedding):
            text = "the server behind this engine returns an embedding per token, not per text"
            raise UnsupportedField(text, param="model")
        length = hypot(*vector)
        if not isfinite(length) or not length:
            raise EngineFailed("the server behind this engine sent an embedding of length 0 or NaN")
        return [value / length for value in vector]


class Embeddings(BaseModel):
    data: list[_Embedding]
    usage: WireUsage = WireUsage()


def parse_embeddings(payload: Any, count: int) -> Embeddings:
    """The embeddings in the order of the inputs. Raises `EngineFailed` unless their number is
    `count`."""
    try:
        answer = Embeddings.model_validate(payload)
    except ValidationError:
        raise EngineFailed(
            "the server behind this engine sent embeddings that are not in OpenAI's format"
        ) from None
    answer.data.sort(key=lambda item: item.index)
    if len(answer.data) != count:
        raise EngineFailed(
            f"the server behind this engine sent {len(answer.data)} embeddings for {count} inputs"
        )
    return answer
