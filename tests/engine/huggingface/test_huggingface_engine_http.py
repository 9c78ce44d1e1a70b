"""The huggingface engine with the engine's HTTP server. The model has a thread of its own."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import HuggingFaceConfig
from parrot.engine.engine_types import create_service
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import FillPiece, GenerateRequest, GenerateResponse
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import Cancelled, InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app

PROMPT = [7, 30, 2, 250, 99]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a byte tokenizer. The builtin engine does not support GPT-2."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=2048,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def make_config(folder: Path) -> HuggingFaceConfig:
    return HuggingFaceConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "instance": {"max_cached_tokens": 4096},
        }
    )


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[EngineService]:
    service = create_service(make_config(folder))
    await service.start()
    yield service
    await service.reset()
    service.check_integrity()
    assert service.runtime_info().num_cached_tokens == 0
    await service.close()


@pytest.fixture
async def client(service: EngineService, folder: Path) -> AsyncIterator[EngineClient]:
    async with (
        serve_app(create_app(service, ReorderBuffer(MonotonicClock()), make_config(folder))) as url,
        HttpClient(url) as http,
    ):
        yield EngineClient(http)


def call(context_id: int, ids: list[int], **sampling: Any) -> GenerateRequest:
    config = {"temperature": 0, "max_gen_length": 12, **sampling}
    return GenerateRequest(
        context_id=context_id,
        fills=[FillPiece(context_id=context_id, token_ids=ids)],
        sampling_config=SamplingConfig(**config),
    )


async def test_answers_equal_those_of_generate_alone_and_in_a_batch(
    client: EngineClient, folder: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [PROMPT[:n] for n in (5, 1, 3)]
    answers = await asyncio.gather(
        *(client.generate(call(i, prompt)) for i, prompt in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.generated_ids == output[0, len(prompt) :].tolist()
        assert answer.usage.output_tokens == 12
    events = [event async for event in client.generate_stream(call(9, PROMPT))]
    assert isinstance(events[-1], GenerateResponse)
    assert events[-1].generated_ids == answers[0].generated_ids
    assert "".join(e.text for e in events[:-1]) == answers[0].generated_text  # type: ignore[union-attr]


async def test_the_tokenizer_is_served_and_unsupported_fields_are_refused_by_name(
    client: EngineClient, service: EngineService
) -> None:
    tokenizer = await client.tokenizer()
    assert Tokenizer.from_str(tokenizer.tokenizer_json).encode("hi").ids
    assert service.engine_info().tokenizer_id is not None
    assert service.engine_info().max_seq_len == 2048
    assert service.engine_info().device == f"1 x cpu ({os.cpu_count()} cores)"
    with pytest.raises(UnsupportedField, match="huggingface engine does not support `n`"):
        await client.generate(call(1, PROMPT, n=2))
    with pytest.raises(PromptTooLong):
        await client.generate(call(2, [1] * 2048))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await client.generate(call(3, [256]))
    assert (await client.generate(call(4, PROMPT))).generated_ids


async def test_a_follower_gets_the_generation_from_its_first_token(client: EngineClient) -> None:
    whole = asyncio.create_task(client.generate(call(1, PROMPT, max_gen_length=200)))
    chunks = [chunk async for chunk in client.follow(1)]
    answer = await whole
    assert "".join(chunk.text for chunk in chunks) == answer.generated_text
    assert [i for chunk in chunks for i in chunk.ids] == answer.generated_ids
    assert len(chunks) > 1


async def test_freeing_a_context_stops_its_generation(client: EngineClient) -> None:
    stream = client.generate_stream(call(1, PROMPT, max_gen_length=2000))
    await anext(stream)
    await client.free_contexts([1])
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    assert (await client.ping()).num_total_jobs == 0
