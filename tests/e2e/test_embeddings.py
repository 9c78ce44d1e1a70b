"""Embeddings of the real embedded model with OpenAI's client."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import openai
import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from tests.support.plain_sampling import PLAIN_SAMPLING

TEXTS = ["A parrot is a bird.", "Budgerigars are small birds.", "x", "The lamp was lit. " * 60]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    engine = {"model": "embedded", "dtype": "float32", "fill_chunk_size": 64} | PLAIN_SAMPLING
    with Cluster(engines=[engine]) as running:
        yield running


@pytest.fixture
async def engine(cluster: Cluster) -> AsyncIterator[EngineClient]:
    url = cluster.url(cluster.engine_names[0])
    async with HttpClient(url, bearer_token=cluster.cluster_token) as http:
        yield EngineClient(http)


async def embed(openai_client: openai.AsyncOpenAI, texts: list[str]) -> np.ndarray:
    answer = await openai_client.embeddings.create(model="embedded", input=texts)
    return np.array([item.embedding for item in answer.data])


async def until_idle(engine: EngineClient, num_free_blocks: int) -> None:
    until = time.monotonic() + 20
    while True:
        info = await engine.ping()
        if info.num_total_jobs == 0 and info.num_free_blocks == num_free_blocks:
            return
        assert time.monotonic() < until, info
        await asyncio.sleep(0.02)


async def test_vectors_do_not_depend_on_the_batch(
    openai_client: openai.AsyncOpenAI, engine: EngineClient
) -> None:
    """Vectors do not depend on other inputs and requests. Afterwards, all memory is free."""
    free_before = (await engine.ping()).num_free_blocks
    together = await embed(openai_client, TEXTS)
    alone = np.concatenate([await embed(openai_client, [text]) for text in TEXTS])
    await until_idle(engine, free_before)
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "Count to twenty."}
    ]
    answering = openai_client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=60, temperature=0
    )
    beside, answer = await asyncio.gather(embed(openai_client, TEXTS), answering)
    assert answer.choices[0].message.content
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(alone, together, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(beside, together, rtol=1e-3, atol=1e-4)
    assert together[0] @ together[1] > together[0] @ together[3]


async def test_a_client_that_disconnects_frees_its_memory(
    openai_client: openai.AsyncOpenAI, engine: EngineClient
) -> None:
    free_before = (await engine.ping()).num_free_blocks
    asking = asyncio.ensure_future(embed(openai_client, ["word " * 1500] * 8))
    until = time.monotonic() + 20
    while (await engine.ping()).num_free_blocks == free_before:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until_idle(engine, free_before)


async def test_invalid_inputs(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input 1 has") as caught:
        await embed(openai_client, ["a", "word " * 9000])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
        await openai_client.embeddings.create(model="embedded", input=[[10**6]])
    with pytest.raises(openai.NotFoundError):
        await openai_client.embeddings.create(model="nope", input="a")
