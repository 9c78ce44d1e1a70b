"""`POST /v1/completions`: plain text that goes on, in OpenAI's format."""

import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Annotated

import orjson
from pydantic import Field

from parrot.protocol.errors import InvalidRequest, ParrotError, UnsupportedField
from parrot.protocol.public import MAX_TEXT, VarGetResponse
from parrot.protocol.server import Event
from parrot.serve.api.vendors.choices import read_all, stream_all
from parrot.serve.api.vendors.endpoint import Caller
from parrot.serve.api.vendors.openai_common import (
    GenerationFields,
    Json,
    chained,
    program_of,
    usage_of,
)
from parrot.serve.api.vendors.openai_errors import openai_error
from parrot.serve.api.vendors.token_logprobs import AnswerLogprobs, CompletionLogprobs
from parrot.serve.conversations.turn import Turn, TurnRequest
from parrot.serve.conversations.turns import Turns
from parrot.utils.ids import new_token

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 128
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Texts = Annotated[list[_Text], Field(max_length=MAX_PROMPTS)]


class CompletionRequest(GenerationFields):
    prompt: _Text | _Texts | list[int] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=16)
    logprobs: int | None = Field(None, ge=0, le=5)


class Completions:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def create(
        self, request: CompletionRequest, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Event]:
        prompts = _texts(request)
        max_tokens = request.max_tokens or _DEFAULT_MAX_TOKENS
        samplings = request.samplings(max_tokens, request.logprobs)
        turns: list[Turn] = []
        try:
            for prompt in prompts:
                turn_request = TurnRequest(
                    tenant=caller.tenant,
                    model=request.model,
                    prompt=prompt,
                    samplings=samplings,
                    program=program_of(request, caller),
                    func_name="completion",
                    criteria=request.wanted,
                    deadline=request.deadline,
                    chain=request.chain(),
                )
                turns.append(self._turns.submit(turn_request))
                caller.tell(turns[-1])
        except ParrotError:
            for turn in turns:
                turn.cancel()
            raise
        if request.is_deferred:
            return _Answers(turns, request, []).deferred()
        answers = _Answers(turns, request, [p if request.echo else "" for p in prompts])
        return answers.chunks() if request.stream else answers.whole()


class _Answers:
    def __init__(
        self, turns: Sequence[Turn], request: CompletionRequest, echoes: Sequence[str]
    ) -> None:
        self._turns = turns
        self._request = request
        self._num_choices = request.n or 1
        self._echoes = echoes
        self._is_scored = request.logprobs is not None
        self._frame = {
            "id": f"cmpl-{new_token()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            **chained(request, turns),
        }

    async def deferred(self) -> bytes:
        num_choices = len(self._turns) * self._num_choices
        choices = [_choice(i, "") for i in range(num_choices)]
        return orjson.dumps(self._frame | {"choices": choices, "usage": None})

    async def whole(self) -> bytes:
        answers = await read_all(self._turns)
        choices = []
        for i, answer in enumerate(answers):
            scored = await self._answer_logprobs(i).rest()
            logprobs = self._logprobs(i).part(scored) if self._is_scored else None
            text = self._echo(i) + answer.content
            choices.append(_choice(i, text, logprobs, answer.finish_reason))
        usage = usage_of(answers, self._num_choices)
        return orjson.dumps(self._frame | {"choices": choices, "usage": usage})

    async def chunks(self) -> AsyncGenerator[Event]:
        options = self._request.stream_options
        answers: dict[int, VarGetResponse] = {}
        begun: set[int] = set()
        num_choices = len(self._turns) * self._num_choices
        taken = [self._answer_logprobs(i) for i in range(num_choices)]
        logprobs = [self._logprobs(i) for i in range(num_choices)]
        try:
            async with aclosing(stream_all(self._turns)) as deltas:
                async for i, delta in deltas:
                    echo = "" if i in begun else self._echo(i)
                    begun.add(i)
                    if isinstance(delta, VarGetResponse):
                        answers[i] = delta
                        scored = await taken[i].rest()
                        text, finish_reason = echo, delta.finish_reason
                    else:
                        scored = await taken[i].take(delta)
                        text, finish_reason = echo + delta, None
                    part = logprobs[i].part(scored) if self._is_scored and scored else None
                    choice = _choice(i, text, part, finish_reason)
                    yield None, self._frame | {"choices": [choice]}
            if options is not None and options.include_usage:
                usage = usage_of([answers[i] for i in sorted(answers)], self._num_choices)
                yield None, self._frame | {"choices": [], "usage": usage}
        except ParrotError as error:
            if not begun:
                raise
            yield None, openai_error(error)[1]
        yield None, "[DONE]"

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._num_choices]

    def _answer_logprobs(self, index: int) -> AnswerLogprobs:
        turn, choice = divmod(index, self._num_choices)
        return AnswerLogprobs(self._turns[turn], choice)

    def _logprobs(self, index: int) -> CompletionLogprobs:
        return CompletionLogprobs(offset=len(self._echo(index)))


def _texts(request: CompletionRequest) -> list[str]:
    """The prompts of the request."""
    if request.logprobs is not None and request.echo:
        text = "log probabilities of an echoed prompt are not supported"
        raise UnsupportedField(text, param="echo")
    if request.suffix:
        raise UnsupportedField("text cannot be put before a `suffix`", param="suffix")
    if (request.best_of or 1) > (request.n or 1):
        raise UnsupportedField("`best_of` must not be more than `n`", param="best_of")
    if request.echo and request.parrot is not None and request.parrot.inputs:
        raise UnsupportedField("a prompt with variables cannot be echoed", param="echo")
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise UnsupportedField("give the prompt as text, not as token ids", param="prompt")
    if request.parrot is not None and len(texts) > 1:
        raise UnsupportedField("a prompt with `parrot` fields comes alone", param="prompt")
    if not all(texts) or not texts:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return texts


def _choice(
    index: int, text: str, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
