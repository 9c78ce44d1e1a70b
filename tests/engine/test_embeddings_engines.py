"""Embeddings from engines of each type: equal to transformers, or a clear refusal."""

import asyncio
import re
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import OpenAIConfig, SimConfig, parse_engine_config
from parrot.engine.engine_types import create_service
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import EmbedRequest, EmbedResponse, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    ParrotError,
    PromptTooLong,
    UnsupportedField,
)
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.tiny_model import make_tiny_model

TEXTS = ["a", "bcdef", "the quick brown fox " * 6, "z" * 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def expected(folder: Path, inputs: list[list[int]], pooling: str) -> list[Any]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in inputs:
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        vector = states.mean(0) if pooling == "mean" else states[-1]
        found.append((vector / vector.norm()).numpy())
    return found


def vectors(answer: EmbedResponse) -> list[Any]:
    return [np.frombuffer(b64decode(text), dtype="<f4") for text in answer.embeddings]


async def embed(service: EngineService, request: EmbedRequest) -> EmbedResponse:
    response = await service.read(request)
    assert isinstance(response, EmbedResponse)
    return response


@pytest.mark.parametrize("engine_type", ["builtin", "huggingface"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_embeddings_in_batches_alone_and_in_chunks(
    folder: Path, engine_type: str, pooling: str
) -> None:
    """Another request generates meanwhile. At the end, no job and no context is left."""
    config = parse_engine_config(
        {
            "engine_type": engine_type,
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "fill_chunk_size": 32,
            "instance": {"pooling": pooling},
        },
        "test",
    )
    service = create_service(config)
    await service.start()
    payload = service.tokenizer()
    assert payload is not None
    tokenizer = Tokenizer.from_str(payload.tokenizer_json)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    wanted = expected(folder, ids, pooling)
    generation = GenerateRequest.model_validate(
        {
            "context_id": 1,
            "fills": [{"token_ids": [1, 2, 3]}],
            "sampling_config": {"max_gen_length": 60, "ignore_tokenizer_eos": True},
        }
    )
    generated = asyncio.ensure_future(service.generate(generation))
    together = await embed(service, EmbedRequest(inputs=[*TEXTS[:2], *ids[2:]]))
    alone = [await embed(service, EmbedRequest(inputs=[one])) for one in ids]
    assert together.prompt_tokens == sum(map(len, ids))
    for found in (vectors(together), [vectors(answer)[0] for answer in alone]):
        for one, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)
    assert len((await generated).generated_ids) == 60
    left = asyncio.ensure_future(embed(service, EmbedRequest(inputs=[ids[2] * 3] * 8)))
    await asyncio.sleep(0)
    left.cancel()
    await service.free_contexts([1])
    with pytest.raises(PromptTooLong, match="input 1 has 513 tokens; the limit is 512"):
        await embed(service, EmbedRequest(inputs=[[1], [1] * 513]))
    with pytest.raises(InvalidRequest, match="input 1 is empty"):
        await embed(service, EmbedRequest(inputs=[[1], []]))
    with pytest.raises(InvalidRequest, match="300 is outside of the vocabulary"):
        await embed(service, EmbedRequest(inputs=[[1], [300]]))
    await close_empty(service)


@asynccontextmanager
async def simulated() -> AsyncIterator[EngineClient]:
    service = create_service(SimConfig())
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), SimConfig())
    async with serve_app(app) as url, HttpClient(url) as http:
        yield EngineClient(http)
    await service.close()


async def test_a_simulated_engine_refuses_embeddings() -> None:
    async with simulated() as engine:
        with pytest.raises(UnsupportedField, match="of type sim cannot compute embeddings"):
            await engine.embed(EmbedRequest(inputs=["a"]))


async def close_empty(service: EngineService) -> None:
    """Close an engine after checking that it holds no jobs and no KV."""
    await service.free_contexts([])
    service.check_integrity()
    info = service.runtime_info()
    assert (info.num_free_blocks, info.num_total_jobs) == (info.num_max_blocks, 0)
    await service.close()


@asynccontextmanager
async def foreign(fake: FakeOpenAI) -> AsyncIterator[EngineService]:
    async with serve_app(fake.app()) as url:
        config = OpenAIConfig.model_validate(
            {"model": "gpt-fake", "instance": {"base_url": url + "/v1", "api_key": "k"}}
        )
        service = create_service(config)
        await service.start()
        yield service
        service.check_integrity()
        assert service.runtime_info().num_total_jobs == 0
        await service.close()


async def test_a_foreign_server_makes_embeddings() -> None:
    fake = FakeOpenAI()
    async with foreign(fake) as service:
        answer = await embed(service, EmbedRequest(inputs=["ab", [5, 6, 7]]))
        for found, count in zip(vectors(answer), (2, 3), strict=True):
            assert found.tolist() == pytest.approx(
                [count / hypot(count, 0.5), 0.5 / hypot(count, 0.5)]
            )
        assert answer.prompt_tokens == 5
        assert fake.bodies[-1] == {
            "model": "gpt-fake",
            "input": ["ab", [5, 6, 7]],
            "encoding_format": "float",
        }


NO_EMBEDDINGS = "Llama model must be created with embedding=True to call this method"
INVALID = "1 validation error: {'type': 'string_type', 'loc': ('body', 'input', 'str')}"


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (404, "Not Found", UnsupportedField),
        (501, "not supported", UnsupportedField),
        (500, NO_EMBEDDINGS, UnsupportedField),
        (500, INVALID, InvalidRequest),
        (400, "The model does not support Embeddings API", InvalidRequest),
    ],
)
async def test_refusals_of_a_foreign_server(
    status: int, message: str, error: type[ParrotError]
) -> None:
    """The cases are responses of vLLM, llama.cpp's server and llama-cpp-python. The engine does not
    retry them."""
    fake = FakeOpenAI(faults=[Fault(status, {"error": {"message": message}})])
    async with foreign(fake) as service:
        with pytest.raises(error, match=re.escape(message[:20])):
            await embed(service, EmbedRequest(inputs=["ab"]))
        assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([{"embedding": [[1.0, 2.0], [3.0, 4.0]]}], UnsupportedField),
        ([{"embedding": [0.0, 0.0]}], EngineFailed),
        ([], EngineFailed),
        ([{"embedding": [1.0]}, {"embedding": [2.0]}], EngineFailed),
        ([{"embedding": "AAAA"}], EngineFailed),
    ],
)
async def test_invalid_embeddings_from_a_foreign_server(
    data: list[Any], error: type[ParrotError]
) -> None:
    """llama-cpp-python returns a vector for each token if it cannot pool the model's states."""
    fake = FakeOpenAI(faults=[Fault(200, {"data": data})])
    async with foreign(fake) as service:
        with pytest.raises(error):
            await embed(service, EmbedRequest(inputs=["ab"]))
