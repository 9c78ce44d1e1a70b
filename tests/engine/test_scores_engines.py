"""Log probabilities of prompts from engines of each type: equal to transformers, or a clear
refusal."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from parrot.engine.config import OpenAIConfig, parse_engine_config
from parrot.engine.engine_types import create_service
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import GenerateRequest, ScoreRequest, ScoreResponse
from parrot.protocol.errors import InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.sampling import Logprobs
from tests.engine.test_embeddings_engines import close_empty, foreign, simulated
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.tiny_model import make_tiny_model

NUM_TOP = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def assert_as_transformers(found: Logprobs, model: Any, ids: list[int]) -> None:
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    rows = np.array(found.values).reshape(-1, found.width)
    named = np.array(found.ids).reshape(-1, found.width)
    assert named[:, 0].tolist() == ids
    assert named[0, 1:].tolist() == [-1] * (found.width - 1)
    assert not rows[0].any()
    for position in range(1, len(ids)):
        wanted = table[position - 1]
        np.testing.assert_allclose(rows[position], wanted[named[position]], atol=1e-4)
        best = wanted.topk(found.width - 1).values
        np.testing.assert_allclose(rows[position, 1:], best, atol=1e-4)


async def score(service: EngineService, request: ScoreRequest) -> ScoreResponse:
    response = await service.read(request)
    assert isinstance(response, ScoreResponse)
    return response


@pytest.mark.parametrize("engine_type", ["builtin", "huggingface"])
async def test_scores_in_batches_alone_and_in_chunks(folder: Path, engine_type: str) -> None:
    """Another request generates meanwhile. At the end, no job and no context is left."""
    config = parse_engine_config(
        {
            "engine_type": engine_type,
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "fill_chunk_size": 100,
        },
        "test",
    )
    service = create_service(config)
    await service.start()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = np.random.default_rng(3)
    inputs = [generator.integers(1, 250, size=n).tolist() for n in (1, 2, 64, 65, 230)]
    generation = GenerateRequest.model_validate(
        {
            "context_id": 1,
            "fills": [{"token_ids": [1, 2, 3]}],
            "sampling_config": {"max_gen_length": 60, "ignore_tokenizer_eos": True},
        }
    )
    generated = asyncio.ensure_future(service.generate(generation))
    together = await score(service, ScoreRequest(inputs=[*inputs], num_top=NUM_TOP))
    assert together.prompt_tokens == sum(map(len, inputs))
    for ids, found in zip(inputs, together.logprobs, strict=True):
        assert_as_transformers(found, model, ids)
        (alone,) = (await score(service, ScoreRequest(inputs=[ids], num_top=1))).logprobs
        assert alone.width == 2
        assert_as_transformers(alone, model, ids)
    assert len((await generated).generated_ids) == 60
    left = asyncio.ensure_future(score(service, ScoreRequest(inputs=[inputs[-1] * 2] * 8)))
    await asyncio.sleep(0)
    left.cancel()
    await service.free_contexts([1])
    with pytest.raises(PromptTooLong, match="input 1 has 513 tokens; the limit is 512"):
        await score(service, ScoreRequest(inputs=[[1], [1] * 513]))
    with pytest.raises(InvalidRequest, match="input 1 is empty"):
        await score(service, ScoreRequest(inputs=[[1], []]))
    await close_empty(service)


async def test_a_simulated_engine_refuses_scores() -> None:
    async with simulated() as engine:
        with pytest.raises(UnsupportedField, match="or score prompts"):
            await engine.score(ScoreRequest(inputs=["a"]))


async def test_a_foreign_server_scores_prompts_by_echo() -> None:
    """The token that the server generates is omitted."""
    fake = FakeOpenAI()
    async with foreign(fake) as service:
        answer = await score(service, ScoreRequest(inputs=["one two", "three"], num_top=2))
    assert answer.prompt_tokens == 3
    first, second = answer.logprobs
    assert [first.tokens[i] if i >= 0 else None for i in first.ids] == [
        b"one ", None, None, b"two", b"t", b"tw",
    ]  # fmt: skip
    assert list(first.values) == [0.0, -9999.0, -9999.0, -3.0, -1.0, -2.0]
    assert len(second) == 1
    body = fake.bodies[0]
    assert (body["prompt"], body["echo"], body["logprobs"]) == ("one two", True, 2)
    assert (body["max_tokens"], body["temperature"]) == (1, 0.0)


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]},
        {"tokens": ["x", "y"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{}, {}]},
    ],
)
async def test_a_foreign_server_without_echo_is_refused(logprobs: Any) -> None:
    choice = {"text": "x", "finish_reason": "stop", "logprobs": logprobs}
    whole = {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    async with foreign(FakeOpenAI(faults=[Fault(200, whole)])) as service:
        with pytest.raises(UnsupportedField, match="does not return log probabilities of prompts"):
            await score(service, ScoreRequest(inputs=["one two"]))


async def test_a_server_with_only_the_chat_endpoint_is_refused() -> None:
    async with serve_app(FakeOpenAI().app()) as url:
        instance = {"base_url": url + "/v1", "api_key": "k", "api_endpoint": "chat"}
        service = create_service(
            OpenAIConfig.model_validate({"model": "gpt-fake", "instance": instance})
        )
        await service.start()
        with pytest.raises(UnsupportedField, match="does not support `echo` for chats"):
            await score(service, ScoreRequest(inputs=["one two"]))
        await service.close()
