"""Any server with OpenAI's completions API, as an asyncio program without Parrot uses it."""

from collections.abc import Sequence
from typing import Any

import orjson

from benchmark.apps.backends.waiting import WaitingProgram
from benchmark.apps.counters import scrape
from benchmark.apps.network import Network
from benchmark.apps.program import Backend, Call, StreamTimes, Usage
from parrot.protocol.http import HttpClient

_DONE = b"[DONE]"
_IDLE_TIMEOUT_S = 600.0


class OpenAIProgram(WaitingProgram):
    def __init__(self, http: HttpClient, network: Network, model: str) -> None:
        super().__init__()
        self._http = http
        self._network = network
        self._model = model

    async def _complete(self, call: Call, texts: Sequence[str]) -> str:
        body = _body(call, "".join(texts), self._model)
        async with self._network.trip() as way_s:
            if not call.streamed:
                answer = await self._http.request(
                    "POST", "/v1/completions", body=body, timeout_s=None
                )
                text: str = answer["choices"][0]["text"]
                usage = answer.get("usage")
            else:
                text, usage, times = await self._stream(body)
                self._streams[call.output] = times.later(way_s)
        self._account_for(usage)
        return text

    async def _stream(self, body: dict[str, Any]) -> tuple[str, Any, StreamTimes]:
        """The times are those at the server."""
        pieces: list[str] = []
        usage = None
        first = last = 0.0
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = self._http.stream(
            "POST", "/v1/completions", body=body, idle_timeout_s=_IDLE_TIMEOUT_S
        )
        async for _, data in events:
            if data.strip() == _DONE:
                break
            event = orjson.loads(data)
            usage = event.get("usage") or usage
            if event["choices"] and (piece := event["choices"][0].get("text")):
                pieces.append(piece)
                last = self.now()
                first = first or last
        return "".join(pieces), usage, StreamTimes(first or self.now(), last or self.now())

    def _account_for(self, usage: dict[str, Any] | None) -> None:
        if usage is None:
            return
        details = usage.get("prompt_tokens_details") or {}
        self.account.usages.append(
            Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens"))
        )


def _body(call: Call, prompt: str, model: str) -> dict[str, Any]:
    """`ignore_eos` is an extension of vLLM, SGLang and others."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": call.output.tokens,
        "temperature": 0.0 if call.seed is None else 1.0,
        "ignore_eos": call.stop is None,
        "stop": call.stop,
        "seed": call.seed,
    }
    return {key: value for key, value in body.items() if value is not None}


async def openai_backend(
    base_url: str, network: Network, model: str | None = None, api_key: str | None = None
) -> Backend:
    """`model`: by default the one that the server names first."""
    http = HttpClient(base_url, bearer_token=api_key)
    if model is None:
        answer = await http.request("GET", "/v1/models")
        model = answer["data"][0]["id"]
    name = str(model)
    return Backend(lambda app: OpenAIProgram(http, network, name), scrape(base_url), http.close)
