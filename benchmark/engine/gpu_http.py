"""The loads of `bench_gpu`, sent to an engine's server over HTTP."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

from benchmark.engine.gpu_cases import DECODES, LONG_MODELS, PREFILLS, Decode, spread_ms
from parrot.cli.bench.requests import lengths_256
from parrot.protocol.engine_api import (
    NO_PARENT,
    FillPiece,
    FillRequest,
    GenerateRequest,
    GenerateResponse,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig

Row = dict[str, Any]
OUTPUT = 128
PREFILL_RUNS = 12


class Load:
    """A client of one engine."""

    def __init__(self, url: str) -> None:
        self.client = EngineClient(HttpClient(url))
        self._ids = count(1)

    async def decode_ms(self, case: Decode) -> Row:
        """Milliseconds per token, after the contexts are filled. `ms` is the decode time that the
        engine reports per request. `wall_ms` is the client's time for the whole batch."""
        num_roots = case.roots if case.shared else 0
        roots = [await self._fill(random_tokens(-i - 1, case.shared)) for i in range(num_roots)]
        contexts = [
            await self._fill(random_tokens(i, own), roots[i % num_roots] if roots else NO_PARENT)
            for i, own in enumerate(case.own_lengths())
        ]
        requests = [generation(context, OUTPUT) for context in contexts]
        wall, answers = await self._generate(requests)
        await self.client.free_contexts(roots)
        per_token = [a.usage.decode_s / (OUTPUT - 1) * 1e3 for a in answers]
        ms, wall_ms = statistics.median(per_token), wall / OUTPUT * 1e3
        return {"case": f"HTTP {case.name}", "ms": ms, "wall_ms": wall_ms}

    async def prefill_ms(self, tokens: int) -> Row:
        """The time to first token. A fill would be acknowledged before it is computed."""
        times = []
        for seed in range(2 + PREFILL_RUNS):  # Different prompts, so that none is cached.
            prompt = random_tokens(1000 * tokens + seed, tokens)
            seconds, _ = await self._generate([generation(next(self._ids), 1, prompt)])
            times.append(seconds * 1e3)
        return {"case": f"HTTP prefill {tokens}", **spread_ms(times[2:])}

    async def whole_load(self) -> Row:
        lengths, times = lengths_256(), []
        for attempt in range(2):
            requests = [
                generation(next(self._ids), output, random_tokens(-1000 * (attempt + 1) - i, size))
                for i, (size, output) in enumerate(lengths)
            ]
            times.append((await self._generate(requests))[0])
        tokens = sum(output for _, output in lengths)
        return {"case": "HTTP 256", "seconds": min(times), "tokens_per_s": tokens / min(times)}

    async def _fill(self, tokens: list[int], parent: int = NO_PARENT) -> int:
        context = next(self._ids)
        piece = FillRequest(context_id=context, parent_context_id=parent, token_ids=tokens)
        await self.client.fill(piece)
        return context

    async def _generate(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[float, list[GenerateResponse]]:
        """Send all requests at once. Returns the seconds until the last answer, and the answers.
        The contexts are freed."""
        began = time.perf_counter()
        answers = await asyncio.gather(*map(self.client.generate, requests))
        seconds = time.perf_counter() - began
        await self.client.free_contexts([request.context_id for request in requests])
        return seconds, answers


def generation(context: int, num_tokens: int, prompt: list[int] | None = None) -> GenerateRequest:
    sampling = SamplingConfig(temperature=0.0, max_gen_length=num_tokens, ignore_tokenizer_eos=True)
    fills = [] if prompt is None else [FillPiece(context_id=context, token_ids=prompt)]
    return GenerateRequest(context_id=context, fills=fills, sampling_config=sampling)


def random_tokens(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(size)]


async def measure(model: str, url: str) -> AsyncIterator[Row]:
    load = Load(url)
    try:
        await load.decode_ms(DECODES[model][0])  # Warm up.
        for case in DECODES[model]:
            yield await load.decode_ms(case)
        for tokens in dict(PREFILLS[model]):
            yield await load.prefill_ms(tokens)
        if model not in LONG_MODELS:
            yield await load.whole_load()
    finally:
        await load.client.close()
