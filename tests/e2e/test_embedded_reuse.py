"""The real embedded model does not compute cached prefixes again, and prefills prompts early."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_api import FillPiece, GenerateRequest, GenerateResponse
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient

BLOCK_SIZE = 16
PROMPT = [(37 * i) % 5000 + 300 for i in range(500)]
STORY = "The old lighthouse keeper climbed the stairs again and lit the lamp. " * 30


@pytest.fixture
async def engine(embedded_cluster: Cluster) -> AsyncIterator[EngineClient]:
    async with HttpClient(
        embedded_cluster.url(embedded_cluster.engine_names[0]),
        bearer_token=embedded_cluster.cluster_token,
    ) as http:
        yield EngineClient(http)


async def direct(engine: EngineClient, context_id: int, prompt: list[int]) -> GenerateResponse:
    """Send a request with a new context, and free the context afterwards."""
    request = GenerateRequest(
        context_id=context_id,
        fills=[FillPiece(context_id=context_id, token_ids=prompt)],
        sampling_config=SamplingConfig(
            temperature=0.0, max_gen_length=8, ignore_tokenizer_eos=True
        ),
    )
    answer = await engine.generate(request)
    await engine.free_contexts([context_id])
    return answer


async def test_a_direct_client_reuses_the_prefix_of_an_earlier_request(
    engine: EngineClient,
) -> None:
    first = await direct(engine, 2**40, PROMPT)
    second = await direct(engine, 2**40 + 1, PROMPT)
    other = await direct(engine, 2**40 + 2, PROMPT[:250] + PROMPT[:250])
    assert first.usage.computed_tokens == 500
    assert second.usage.computed_tokens < BLOCK_SIZE
    assert second.generated_ids == first.generated_ids
    assert other.usage.cached_tokens == 250 // BLOCK_SIZE * BLOCK_SIZE


async def test_a_prompt_is_prefilled_up_to_its_late_input(
    embedded_cluster: Cluster, engine: EngineClient
) -> None:
    late_part = "\nQuestion: Who lit the lamp?\nAnswer: "
    async with HttpClient(embedded_cluster.core_url) as http:
        client = ServeClient(http)
        scope = (await client.create_session()).model_dump()
        question = await client.create_var(**scope, var_name="question")
        sampling = {"temperature": 0.0, "max_gen_length": 8, "ignore_tokenizer_eos": True}
        parameters: list[dict[str, Any]] = [
            {"name": "story", "value": STORY},
            {"name": "question", "var_id": question},
            {"name": "answer", "is_output": True, "sampling_config": sampling},
        ]
        request = scope | {
            "template": "Read: {{story}}\nQuestion: {{question}}\nAnswer: {{answer}}",
            "parameters": parameters,
        }
        call = await client.semantic_call(SemanticCallRequest.model_validate(request))
        var_id = call.param_info[-1].var_id
        before = (await engine.ping()).num_steps
        reading = asyncio.create_task(client.get_var(**scope, var_id=var_id))
        await _wait_until_idle(engine, before)
        await client.set_var(**scope, var_id=question, content="Who lit the lamp?")
        assert await reading
        info = await client.session_info(**scope)
        await client.delete_session(**scope)
    assert 0 < info.calls[-1].computed_tokens < len(late_part) // 2 + BLOCK_SIZE
    assert info.calls[-1].cached_tokens > 350


async def _wait_until_idle(engine: EngineClient, num_steps: int) -> None:
    """Wait until the engine has made a step and has no more jobs."""
    while True:
        info = await engine.ping()
        if info.num_steps > num_steps and not info.num_total_jobs:
            return
        await asyncio.sleep(0.05)
