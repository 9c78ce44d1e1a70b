"""Waiting programs on any server of OpenAI's API."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from parrot.cli.bench.program import CallUsage, Network, ProgramCall, StreamTimes
from parrot.cli.bench.waiting import WaitingProgram
from parrot.protocol.errors import EngineFailed, InternalError, ParrotError, Unavailable
from parrot.protocol.http import HttpClient

_DONE = b"[DONE]"
_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    """`is_chat`: prompts are sent as a user's message. `timeout_s`: of a request, and of a silent
    stream; None: no limit for a request, ten minutes for a stream. `ignores_eos`: the server knows
    the field `ignore_eos`, as vLLM and SGLang do."""

    http: HttpClient
    model: str
    is_chat: bool = False
    timeout_s: float | None = None
    ignores_eos: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: str, *, ignore_eos: bool, **fields: Any) -> dict[str, Any]:
        """A request body without fields that are None."""
        if self.ignores_eos:
            fields["ignore_eos"] = ignore_eos
        asked: Any = {"prompt": prompt}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        given = {key: value for key, value in fields.items() if value is not None}
        return {"model": self.model, **asked, **given}


def openai_http(base_url: str, api_key: str | None) -> HttpClient:
    """A client for `base_url`, which may end with `/v1`."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return HttpClient(root, bearer_token=api_key, read_error=_refusal)


def _refusal(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
    error = payload.get("error", payload) if isinstance(payload, Mapping) else None
    message = error.get("message", error) if isinstance(error, Mapping) else error
    reason = "" if message is None else f": {str(message)[:_MAX_MESSAGE]}"
    return EngineFailed(f"HTTP {status}{reason}")


class OpenAIProgram(WaitingProgram):
    def __init__(self, target: OpenAITarget, network: Network) -> None:
        super().__init__()
        self._target = target
        self._network = network

    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        target = self._target
        body = target.body("".join(texts), **_fields(call))
        async with self._network.trip() as way_s:
            if call.streamed:
                text, usage, times = await self._stream(body)
                self.account.streams[call.output] = times.later(way_s)
            else:
                answer = await target.http.request(
                    "POST", target.path, body=body, timeout_s=target.timeout_s
                )
                text, usage = _text(answer, "message"), answer.get("usage")
        self._account_for(usage)
        return text

    async def _stream(self, body: dict[str, Any]) -> tuple[str, Any, StreamTimes]:
        """The times are those at the server. Raises `ParrotError`, also if the stream breaks
        off."""
        target = self._target
        pieces: list[str] = []
        arrivals: list[float] = []
        usage = None
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        idle_s = 600.0 if target.timeout_s is None else target.timeout_s
        stream = target.http.stream("POST", target.path, body=body, idle_timeout_s=idle_s)
        async with aclosing(stream) as events:
            async for _, data in events:
                if data.strip() == _DONE:
                    tokens = None if usage is None else int(usage["completion_tokens"])
                    times = StreamTimes(tuple(arrivals) or (self.now(),), tokens)
                    return "".join(pieces), usage, times
                event = _parsed(data)
                usage = event.get("usage") or usage
                if event.get("choices") and (piece := _text(event, "delta")):
                    pieces.append(piece)
                    arrivals.append(self.now())
        raise Unavailable("the stream broke off")

    def _account_for(self, usage: dict[str, Any] | None) -> None:
        if usage is None:
            return
        details = usage.get("prompt_tokens_details") or {}
        self.account.usages.append(
            CallUsage(
                usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens")
            )
        )


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise InternalError("an event of the stream is not a JSON object")
    if (error := event.get("error")) is not None:
        raise _refusal(event, error.get("code", 500) if isinstance(error, dict) else 500, {})
    return event


def _text(answer: Any, chat_field: str) -> str:
    """The text of the first choice. Raises `InternalError` if there is none."""
    try:
        choice = answer["choices"][0]
        said = choice[chat_field].get("content") if chat_field in choice else choice.get("text")
        return said or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        raise InternalError("the server's answer is not in OpenAI's format") from None


def _fields(call: ProgramCall) -> dict[str, Any]:
    return {
        "max_tokens": call.output.tokens,
        "temperature": 0.0 if call.seed is None else 1.0,
        "ignore_eos": call.stop is None,
        "stop": call.stop,
        "seed": call.seed,
    }
