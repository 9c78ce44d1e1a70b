"""`POST /v1/completions`: continues plain text, in OpenAI's format."""

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from parrot.gateway.direct import DirectRequests
from parrot.gateway.prompt_tokens import TokenPrompt
from parrot.gateway.turn_request import TurnRequest
from parrot.gateway.turns import Turn, Turns, is_foreign
from parrot.gateway.vendors.endpoint import Caller, VendorAnswer
from parrot.gateway.vendors.errors import openai_error
from parrot.gateway.vendors.logprobs import CompletionLogprobs, LogprobsReader
from parrot.gateway.vendors.openai_fields import (
    MAX_CHOICES,
    GenerationFields,
    Json,
    Refused,
    chained,
    program_of,
    usage_of,
)
from parrot.gateway.vendors.parts import read_all, stream_all
from parrot.gateway.vendors.served import add_missing, add_to_answer
from parrot.protocol.answers import Event, Events
from parrot.protocol.errors import InvalidRequest, ParrotError, UnsupportedField
from parrot.protocol.fields import Text, TokenIds
from parrot.protocol.public import VarGetResponse
from parrot.protocol.sampling import MAX_GEN_LENGTH, Logprobs
from parrot.serve.readers import scored_tokens
from parrot.utils.ids import new_token

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default.
_MAX_SCORED = 2**18  # Prompt tokens whose log probabilities fit into one answer, over all choices.
MAX_PROMPTS = 128  # Prompts per request.
Prompt = list[int] | str


def _prompt_kind(value: Any) -> str:
    """The kind of a prompt, from its first element, so that pydantic validates only that kind."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "tokens" if isinstance(first, int) else "lists" if isinstance(first, list) else "texts"


_Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Tag("texts"), Field(fail_fast=True, max_length=MAX_PROMPTS)]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Tag("lists"), Field(fail_fast=True, max_length=MAX_PROMPTS)],
    Discriminator(_prompt_kind),
]


class CompletionRequest(GenerationFields):
    in_extra = (*GenerationFields.in_extra, "suffix")

    prompt: _Prompt
    max_tokens: int | None = Field(None, ge=0, le=MAX_GEN_LENGTH)
    echo: bool | None = None
    suffix: Text | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=5)

    def refused(self) -> Refused:
        refused = super().refused()
        if self.suffix:
            refused.append(UnsupportedField("`suffix` is not supported", param="suffix"))
        return refused

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_made(self) -> int:
        """The number of answers that are generated for each prompt. The best become choices."""
        return max(self.best_of or 1, self.num_choices)

    @property
    def scores_prompt(self) -> bool:
        """Whether an engine computes the prompt's log probabilities. With `max_tokens: 0` it only
        reads the prompt."""
        return bool(self.echo) and (self.logprobs is not None or self.max_tokens == 0)


class CompletionChoice(VendorAnswer):
    index: int
    text: str
    finish_reason: str | None


class TextCompletion(VendorAnswer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Json | None


@dataclass(slots=True)
class _Echo:
    """The part of an answer that repeats its prompt."""

    text: str = ""
    scored: Logprobs | None = None  # log probabilities of the prompt's tokens

    async def logprobs(self) -> CompletionLogprobs:
        """The answer's log probabilities, which start with the prompt's."""
        if self.scored is None:
            return CompletionLogprobs(offset=len(self.text))
        logprobs = CompletionLogprobs(offset=0)
        await logprobs.add_prompt(self.scored, self.text)
        return logprobs


class Completions:
    def __init__(self, turns: Turns, direct: DirectRequests) -> None:
        self._turns = turns
        self._direct = direct

    def create(
        self, request: CompletionRequest, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        prompts = _prompts(request)
        texts: list[TokenPrompt] = [(prompt, None) for prompt in prompts if isinstance(prompt, str)]
        if len(texts) == len(prompts) and not request.scores_prompt:
            answers = self._submit(request, caller, texts)
            if request.is_deferred:
                return answers.deferred()
            return answers.chunks() if request.stream else answers.whole()
        if request.stream:
            return self._chunks_prepared(request, caller, prompts)
        return self._whole_prepared(request, caller, prompts)

    async def _whole_prepared(
        self, request: CompletionRequest, caller: Caller, prompts: Sequence[Prompt]
    ) -> bytes:
        return await (await self._submit_prepared(request, caller, prompts)).whole()

    async def _chunks_prepared(
        self, request: CompletionRequest, caller: Caller, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[Events]:
        answers = await self._submit_prepared(request, caller, prompts)
        async with aclosing(answers.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _submit_prepared(
        self, request: CompletionRequest, caller: Caller, prompts: Sequence[Prompt]
    ) -> "_Answers":
        """Submit the request after the slow steps: decoding token prompts, and scoring prompts."""
        found: list[TokenPrompt] = [
            (prompt, None)
            if isinstance(prompt, str)
            else await self._turns.prompt_of(request.model, prompt)
            for prompt in prompts
        ]
        if not request.scores_prompt:
            if request.echo and any(is_foreign(tokens) for _, tokens in found):
                text = "only the server knows the text of the tokens: set `logprobs` with `echo`"
                raise UnsupportedField(text, param="echo")
            return self._submit(request, caller, found)
        num_top, limit = request.logprobs or 0, _MAX_SCORED // request.num_choices
        scored, num_tokens = await self._direct.score(
            caller.tenant, request.model, prompts, num_top, limit, caller.traceparent, caller.key
        )
        echoes = []
        for (text, tokens), one in zip(found, scored, strict=True):
            shown = await _text_of(one) if is_foreign(tokens) else text
            echoes.append(_Echo(shown) if request.logprobs is None else _Echo(shown, one))
        if request.max_tokens == 0:
            return _Answers([], request, echoes, num_tokens)
        return self._submit(request, caller, found, echoes)

    def _submit(
        self,
        request: CompletionRequest,
        caller: Caller,
        prompts: Sequence[TokenPrompt],
        echoes: Sequence[_Echo] | None = None,
    ) -> "_Answers":
        max_tokens = request.max_tokens or _DEFAULT_MAX_TOKENS
        is_ranked = request.num_made > request.num_choices
        logprobs = request.logprobs or (0 if is_ranked else request.logprobs)
        samplings = request.samplings(max_tokens, logprobs, count=request.num_made)
        turns: list[Turn] = []
        try:
            for text, tokens in prompts:
                turn_request = TurnRequest(
                    tenant=caller.tenant,
                    model=request.model,
                    prompt=text,
                    tokens=tokens,
                    samplings=samplings,
                    program=program_of(request, caller),
                    client=caller.client,
                    traceparent=caller.traceparent,
                    request_id=caller.request_id,
                    client_key=caller.key,
                    func_name="completion",
                    criteria=request.effective_criteria,
                    deadline=request.deadline,
                    chain=request.chain(),
                    prediction=request.predicted,
                    unknown=request.model_extra or {},
                    ignored=request.ignored,
                    refused=request.refused(),
                )
                turns.append(self._turns.submit(self._turns.render(turn_request)))
                caller.report_prefix(turns[-1])
        except ParrotError:
            for turn in turns:
                turn.cancel()
            raise
        if echoes is None:
            echoes = [_Echo(text if request.echo else "") for text, _ in prompts]
        return _Answers(turns, request, echoes)


async def _text_of(scored: Logprobs) -> str:
    """The text of a prompt from its tokens."""
    return b"".join([one.token async for one in scored_tokens(scored)]).decode(errors="replace")


class _Answers:
    """The answers to some prompts. Without `turns` nothing is generated, and the answers are the
    `echoes` of the prompts, which have `num_tokens` tokens together."""

    def __init__(
        self,
        turns: Sequence[Turn],
        request: CompletionRequest,
        echoes: Sequence[_Echo],
        num_tokens: int = 0,
    ) -> None:
        self._turns = turns
        self._num_tokens = num_tokens
        self._request = request
        self._num_choices = request.num_choices
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
        if not self._turns:
            choices = [choice async for choice in self._echoed()]
            return orjson.dumps(self._frame | {"choices": choices, "usage": self._echo_usage()})
        answers = await read_all(self._turns)
        num_made = self._request.num_made
        choices = []
        for turn_index, turn in enumerate(self._turns):
            for made in self._best(turn):
                i, answer = len(choices), answers[turn_index * num_made + made]
                echo, logprobs = self._echo(i), None
                if self._is_scored:
                    taken = LogprobsReader(turn, made)
                    scored = await taken.rest(with_ending=echo.scored is not None)
                    logprobs = await (await echo.logprobs()).part(scored)
                text = echo.text + answer.content
                choices.append(_choice(i, text, logprobs, answer.finish_reason))
                add_missing(choices[-1], turn.extra(made).get("choice", {}))
        whole = self._frame | {"choices": choices, "usage": usage_of(answers, num_made)}
        add_to_answer(whole, self._turns[0].extra(0))
        return orjson.dumps(whole)

    async def _echoed(self) -> AsyncGenerator[Json]:
        """The choices of a request that generates nothing."""
        for i in range(len(self._echoes) * self._num_choices):
            echo = self._echo(i)
            logprobs = await (await echo.logprobs()).part([]) if self._is_scored else None
            yield _choice(i, echo.text, logprobs, "length")

    def _echo_usage(self) -> Json:
        count = self._num_tokens
        return {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}

    def _best(self, turn: Turn) -> list[int]:
        """The answers that become choices: those with the highest mean log probability, best first.
        If all answers become choices, their order stays."""
        made = list(range(len(turn.completions)))
        if len(made) == self._num_choices:
            return made
        return sorted(made, key=lambda i: -_mean_logprob(turn, i))[: self._num_choices]

    async def chunks(self) -> AsyncGenerator[Events]:
        frame = self._frame
        if not self._turns:
            async for choice in self._echoed():
                yield [(None, frame | {"choices": [choice]})]
            yield self._stream_end(self._echo_usage())
            return
        last: list[Event] = []
        answers: dict[int, VarGetResponse] = {}
        begun: dict[int, CompletionLogprobs] = {}
        num_choices = len(self._turns) * self._num_choices
        taken = [self._answer_logprobs(i) for i in range(num_choices)]
        try:
            async with aclosing(stream_all(self._turns)) as deltas:
                async for i, delta in deltas:
                    echo, is_first = self._echo(i), i not in begun
                    if is_first:
                        begun[i] = await echo.logprobs()
                    echoes_scores = echo.scored is not None
                    text, finish_reason = echo.text if is_first else "", None
                    if isinstance(delta, VarGetResponse):
                        answers[i] = delta
                        finish_reason = delta.finish_reason
                        more = taken[i].rest(with_ending=echoes_scores) if self._is_scored else None
                    else:
                        text += delta
                        more = taken[i].take(delta) if self._is_scored else None
                    scored = [] if more is None else await more
                    has_part = scored or (is_first and echoes_scores)
                    part = await begun[i].part(scored) if has_part else None
                    choice = _choice(i, text, part, finish_reason)
                    if i in answers:
                        add_missing(choice, self._extra(i).get("choice", {}))
                    last = [(None, frame | {"choices": [choice]})]
                    if len(answers) < num_choices:
                        yield last
            usage = usage_of([answers[i] for i in sorted(answers)], self._num_choices)
            yield [*last, *self._stream_end(usage)]
        except ParrotError as error:
            if not begun:
                raise
            yield [(None, openai_error(error)[1]), (None, "[DONE]")]

    def _stream_end(self, usage: Json | None) -> list[Event]:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return [(None, "[DONE]")]
        end = self._frame | {"choices": [], "usage": usage}
        if len(self._turns) * self._num_choices == 1:
            add_to_answer(end, self._extra(0))
        return [(None, end), (None, "[DONE]")]

    def _echo(self, index: int) -> _Echo:
        return self._echoes[index // self._num_choices]

    def _extra(self, index: int) -> Mapping[str, Any]:
        """The fields of a foreign server's answer that Parrot does not know."""
        turn, choice = divmod(index, self._num_choices)
        return self._turns[turn].extra(choice)

    def _answer_logprobs(self, index: int) -> LogprobsReader:
        turn, choice = divmod(index, self._num_choices)
        return LogprobsReader(self._turns[turn], choice)


def _prompts(request: CompletionRequest) -> Sequence[Prompt]:
    """The validated prompts of the request."""
    if request.max_tokens == 0 and not request.echo:
        text = "`max_tokens: 0` generates nothing; it needs `echo: true`"
        raise InvalidRequest(text, param="max_tokens")
    if request.scores_prompt and request.chain() is not None:
        text = "with `parrot` fields, `echo` does not support `logprobs` and `max_tokens: 0`"
        raise UnsupportedField(text, param="echo")
    _check_best_of(request)
    given: Any = request.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Prompt] = [given] if is_one else given
    if not all(prompts) or not prompts:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if request.parrot is not None:
        if len(prompts) > 1 or not isinstance(prompts[0], str):
            text = "with `parrot` fields, `prompt` must be one string"
            raise UnsupportedField(text, param="prompt")
        if request.echo and request.parrot.inputs:
            raise UnsupportedField("a prompt with variables cannot be echoed", param="echo")
    return prompts


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is None:
        return
    if request.best_of < request.num_choices:
        raise InvalidRequest("`best_of` must not be less than `n`", param="best_of")
    if request.best_of > request.num_choices:
        if request.stream:
            raise InvalidRequest("`best_of` above `n` cannot be streamed", param="best_of")
        if request.parrot is not None:
            text = "`best_of` above `n` is not supported with `parrot` fields"
            raise UnsupportedField(text, param="best_of")


def _mean_logprob(turn: Turn, choice: int) -> float:
    """The mean log probability of an answer's tokens; an empty answer is worst."""
    found = turn.logprobs(choice)
    if found is None or not len(found):
        return -math.inf
    return math.fsum(found.values[:: found.width]) / len(found)


def _choice(
    index: int, text: str, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
