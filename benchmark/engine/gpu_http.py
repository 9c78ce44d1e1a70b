"""`bench_gpu`'s questions to a running engine."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson

from benchmark.apps.workloads.shared_prompts import lengths_256
from benchmark.engine.gpu_cases import PREFILLS, Decode
from parrot.protocol.engine_api import NO_PARENT

Row = dict[str, Any]
LOAD_TIMEOUT_S = 240
OUTPUT = 128
PREFILL_RUNS = 12
_JSON = {"Content-Type": "application/json"}


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._next_context = 0

    async def post(self, path: str, payload: Row) -> Row:
        # As ServeCore's client does it; the standard library takes 0.4 ms for a prompt of 8192.
        data = orjson.dumps(payload)
        async with self._session.post(path, data=data, headers=_JSON) as response:
            body: Row = orjson.loads(await response.read())
            assert response.status == 200, body
            return body

    async def wait_until_ready(self, is_alive: Callable[[], bool]) -> float:
        began = time.perf_counter()
        while is_alive() and time.perf_counter() - began < LOAD_TIMEOUT_S:
            try:
                async with self._session.get("/ready") as response:
                    if response.status == 200:
                        return time.perf_counter() - began
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
        raise TimeoutError("the engine did not become ready")

    def new_context(self) -> int:
        self._next_context += 1
        return self._next_context

    async def fill(self, tokens: list[int], parent: int = NO_PARENT) -> int:
        context = self.new_context()
        payload = {"context_id": context, "parent_context_id": parent, "token_ids": tokens}
        await self.post("/fill", payload)
        return context

    async def generate(self, context: int, count: int, prompt: list[int] | None = None) -> Row:
        sampling = {"temperature": 0.0, "max_gen_length": count, "ignore_tokenizer_eos": True}
        payload: Row = {"context_id": context, "sampling_config": sampling}
        if prompt is not None:
            payload["fills"] = [{"context_id": context, "token_ids": prompt}]
        return await self.post("/generate", payload)


def random_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(count)]


async def decode_ms(client: Client, case: Decode) -> Row:
    """The contexts are filled first. `ms`: the engine's own account of a request's decoding, over
    its tokens; `wall_ms`: the client's, over all of the batch."""
    num_roots = case.roots if case.shared else 0
    roots = [await client.fill(random_tokens(-i - 1, case.shared)) for i in range(num_roots)]
    contexts = [
        await client.fill(random_tokens(i, own), roots[i % num_roots] if roots else NO_PARENT)
        for i, own in enumerate(case.own_lengths())
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*(client.generate(c, OUTPUT) for c in contexts))
    wall = time.perf_counter() - began
    await client.post("/free_context", {"context_ids": contexts + roots})
    per_token = [a["usage"]["decode_s"] / (OUTPUT - 1) * 1e3 for a in answers]
    return {
        "case": f"HTTP {case.name}",
        "ms": statistics.median(per_token),
        "wall_ms": wall / OUTPUT * 1e3,
    }


async def prefill_ms(client: Client, tokens: int) -> Row:
    """The time to the first token; a fill alone is answered once it is on its way."""
    times = []
    for seed in range(2 + PREFILL_RUNS):  # none begins as another does: that would be cached
        prompt = random_tokens(1000 * tokens + seed, tokens)
        context = client.new_context()
        began = time.perf_counter()
        await client.generate(context, 1, prompt)
        times.append((time.perf_counter() - began) * 1e3)
        await client.post("/free_context", {"context_ids": [context]})
    measured = sorted(times[2:])
    return {
        "case": f"HTTP prefill {tokens}",
        "ms": statistics.median(measured),
        "least_ms": measured[0],
        "most_ms": measured[-1],
    }


async def whole_load(client: Client) -> Row:
    requests, times = lengths_256(), []
    for attempt in range(2):
        prompts = [
            random_tokens(-1000 * (attempt + 1) - i, size) for i, (size, _) in enumerate(requests)
        ]
        contexts = [client.new_context() for _ in requests]
        began = time.perf_counter()
        await asyncio.gather(
            *(
                client.generate(context, output, prompt)
                for context, (_, output), prompt in zip(contexts, requests, prompts, strict=True)
            )
        )
        times.append(time.perf_counter() - began)
        await client.post("/free_context", {"context_ids": contexts})
    tokens = sum(output for _, output in requests)
    return {"case": "HTTP 256", "seconds": min(times), "tokens_per_s": tokens / min(times)}


async def measure(
    model: str, url: str, is_alive: Callable[[], bool], cases: Sequence[Decode]
) -> list[Row]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        client = Client(session)
        rows: list[Row] = [
            {"case": "HTTP ready", "seconds": await client.wait_until_ready(is_alive)}
        ]
        for case in (cases[0], *cases):
            rows.append(await decode_ms(client, case))
        del rows[1]  # the first one warms up
        fills = dict(PREFILLS[model])
        rows += [await prefill_ms(client, tokens) for tokens in fills]
        if model not in ("llama-2-7b", "llama-2-13b"):
            rows.append(await whole_load(client))
        return rows
