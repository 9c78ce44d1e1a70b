"""The overhead of the vendors' endpoints, compared with direct requests to the engine.

    python -m benchmark.serve.bench_front_door

Conversations grow turn by turn, like an agent's, to a given number of tokens of four letters. Then
the last turn is repeated in two ways, in turns. Through an endpoint, the client sends the whole
history, or the id of the previous response, over HTTP. Directly, the engine gets the same new turn
on a context that has the history. The engine's steps cost nothing. Both are streamed:

  first, whole   milliseconds to the first text and to the end, minus those of the engine
  bytes          milliseconds of a request of the same size that is rejected after it has been
                 read; `first` and `whole` include them
  cpu            milliseconds of ServeCore's process for one turn
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import orjson

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import ZERO_COST, connect, cpu_seconds
from benchmark.simulated import words
from parrot.cluster import Cluster
from parrot.protocol.engine_api import (
    NO_PARENT,
    FillPiece,
    FillRequest,
    GenerateRequest,
    StreamChunk,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig

# A letter is a token of this engine, but a quarter of a token of most models.
LETTERS_PER_TOKEN = 4
ANSWER = 4  # Letters.
ROOM = {
    "num_kv_cache_blocks": 2**13,
    "block_size": 1024,
    "max_seq_len": 2**21,
    "shared_prefix": False,
}
MODEL = "sim"
CORE = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}

Json = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Api:
    """An endpoint. `body` makes a request from messages and the id of the previous response. `text`
    returns the text of an event, if any."""

    path: str
    body: Callable[[Messages, str], Json]
    text: Callable[[Json], str]


def _chat_text(event: Json) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _completion_text(event: Json) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _message_text(event: Json) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def _response_text(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _previous(messages: Messages, before: str) -> Json:
    known = {"previous_response_id": before} if before else {}
    return {"input": messages[-1:] if before else messages, "max_output_tokens": ANSWER} | known


APIS = {
    "chat/completions": Api(
        "/v1/chat/completions", lambda m, _: {"messages": m, "max_tokens": ANSWER}, _chat_text
    ),
    "completions": Api(
        "/v1/completions",
        lambda m, _: {"prompt": "".join(x["content"] for x in m), "max_tokens": ANSWER},
        _completion_text,
    ),
    "messages": Api(
        "/v1/messages", lambda m, _: {"messages": m, "max_tokens": ANSWER}, _message_text
    ),
    "responses": Api(
        "/v1/responses", lambda m, _: {"input": m, "max_output_tokens": ANSWER}, _response_text
    ),
    "responses, previous id": Api("/v1/responses", _previous, _response_text),
}


@dataclass
class Turn:
    """`first_s` and `whole_s`: seconds until the first text and until the last."""

    first_s: float
    whole_s: float
    text: str
    response_id: str = ""


@dataclass
class Conversation:
    """`before`: the id of the last response, for endpoints with ids."""

    api: Api
    http: aiohttp.ClientSession
    url: str
    messages: Messages = field(default_factory=list)
    before: str = ""

    async def ask(self, question: str) -> Turn:
        """One more turn, which is not added to the conversation."""
        body = self._body(question)
        began = time.perf_counter()
        first, text, response_id = None, "", ""
        async for event in self._events(body):
            response_id = event.get("response", {}).get("id", response_id)
            if new := self.api.text(event):
                first = first or time.perf_counter()
                text += new
        assert first is not None, body[-200:]
        return Turn(first - began, time.perf_counter() - began, text, response_id)

    async def grow(self, question: str) -> None:
        turn = await self.ask(question)
        self.messages += [user(question), {"role": "assistant", "content": turn.text}]
        self.before = turn.response_id

    async def refused_s(self, question: str) -> float:
        """Seconds of a request with the same bytes that is rejected after it has been read."""
        body = self._body(question)
        began = time.perf_counter()
        headers = {"Content-Type": "text/plain"}
        async with self.http.post(self.url + self.api.path, data=body, headers=headers) as reply:
            await reply.read()
            assert reply.status == 415, await reply.text()
        return time.perf_counter() - began

    def _body(self, question: str) -> bytes:
        fields = self.api.body([*self.messages, user(question)], self.before)
        return orjson.dumps({"model": MODEL, "temperature": 0.0, "stream": True} | fields)

    async def _events(self, body: bytes) -> AsyncIterator[Json]:
        async with self.http.post(self.url + self.api.path, data=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield orjson.loads(line[len(b"data: ") :])


def line(draw: random.Random, num_letters: int) -> str:
    return words(draw, num_letters - 1) + "\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Direct:
    """Sends requests to the engine directly, as ServeCore does."""

    def __init__(self, client: EngineClient, first_id: int = 2**40) -> None:
        self.client = client
        self._ids = count(first_id)

    async def fill(self, num_tokens: int) -> int:
        """A new context with `num_tokens` tokens."""
        context = next(self._ids)
        ids = random.Random(context).choices(range(97, 123), k=num_tokens)
        await self.client.fill(FillRequest(context_id=context, token_ids=ids))
        return context

    async def ask(self, question: str, parent: int = NO_PARENT, num_tokens: int = ANSWER) -> Turn:
        context = next(self._ids)
        request = GenerateRequest(
            context_id=context,
            fills=[
                FillPiece(
                    context_id=context, parent_context_id=parent, token_ids=list(question.encode())
                )
            ],
            sampling_config=SamplingConfig(temperature=0.0, max_gen_length=num_tokens),
        )
        began = time.perf_counter()
        first, text = None, ""
        async with aclosing(self.client.generate_stream(request)) as events:
            async for event in events:
                if isinstance(event, StreamChunk):
                    first = first or time.perf_counter()
                    text += event.text
        ended = time.perf_counter()
        assert first is not None, request.context_id
        await self.client.free_contexts([context])
        return Turn(first - began, ended - began, text)


async def overheads(cluster: Cluster, args: argparse.Namespace, report: Report) -> None:
    client = EngineClient(
        HttpClient(cluster.url(cluster.engine_names[0]), bearer_token=cluster.cluster_token)
    )
    pid = cluster.process("core").pid
    draw = random.Random(1)
    async with connect() as http:
        for tokens in args.tokens:
            size, new = LETTERS_PER_TOKEN * tokens, LETTERS_PER_TOKEN * args.new
            direct = Direct(client)
            base = await direct.fill(max(1, size - new))
            for name in args.endpoints:
                conversation = Conversation(APIS[name], http, cluster.core_url)
                while sum(len(m["content"]) for m in conversation.messages) < size - new:
                    await conversation.grow(line(draw, new))
                rows = []
                for number in range(-args.warm_up, args.turns):
                    question = line(draw, new)
                    asked = await direct.ask(question, base)
                    start = cpu_seconds(pid)
                    turn = await conversation.ask(question)
                    spent = cpu_seconds(pid) - start
                    refused = await conversation.refused_s(question)
                    if number >= 0:
                        rows.append((turn, asked, refused, spent))
                report.add("turns", {"endpoint": name, "tokens": tokens} | summary(rows))
            await client.free_contexts([base])
    await client.close()


def summary(rows: Sequence[tuple[Turn, Turn, float, float]]) -> Json:
    """Milliseconds of consecutive turns through ServeCore and directly."""
    first = [1e3 * (turn.first_s - asked.first_s) for turn, asked, _, _ in rows]
    whole = [1e3 * (turn.whole_s - asked.whole_s) for turn, asked, _, _ in rows]
    return {
        "first_p50_ms": statistics.median(first),
        "first_p90_ms": statistics.quantiles(first, n=10)[-1],
        "whole_p50_ms": statistics.median(whole),
        "whole_p90_ms": statistics.quantiles(whole, n=10)[-1],
        "bytes_p50_ms": 1e3 * statistics.median(refused for _, _, refused, _ in rows),
        "engine_first_p50_ms": 1e3 * statistics.median(asked.first_s for _, asked, _, _ in rows),
        "cpu_p50_ms": 1e3 * statistics.median(spent for _, _, _, spent in rows),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--endpoints", nargs="+", choices=list(APIS), default=list(APIS))
    parser.add_argument("--new", type=int, default=500, help="new tokens of a turn")
    parser.add_argument("--turns", type=int, default=60, help="turns of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="warm-up turns")


def measure(args: argparse.Namespace, report: Report) -> None:
    engine = {"engine_type": "sim", "model": MODEL, "instance": ZERO_COST | ROOM}
    report.uses("engine", engine)
    report |= {"cpus": os.cpu_count(), "turns_each": args.turns, "new_tokens": args.new}
    with Cluster(core=CORE, engines=[engine]) as cluster:
        asyncio.run(overheads(cluster, args, report))


if __name__ == "__main__":
    run_benchmark(__name__)
