"""The order of defaults for sampling: the request, then the engine's config, then the model's
files."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from parrot.engine.config import (
    AnyEngineConfig,
    BuiltinConfig,
    HuggingFaceConfig,
    SimConfig,
    parse_engine_config,
)
from parrot.engine.engine_types import create_service
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import FillPiece, GenerateRequest
from parrot.protocol.sampling import NEUTRAL_SAMPLING, DefaultSampling, SamplingConfig
from parrot.utils.config import ConfigError
from tests.support.tiny_model import make_tiny_model

Start = Callable[[AnyEngineConfig], Coroutine[Any, Any, EngineService]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    services: list[EngineService] = []

    async def start(config: AnyEngineConfig) -> EngineService:
        services.append(create_service(config))
        await services[-1].start()
        return services[-1]

    yield start
    for service in services:
        await service.close()


def model_with(folder: Path, **generation: Any) -> str:
    make_tiny_model(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def config_of(kind: str, model: str, **keys: Any) -> AnyEngineConfig:
    common = {"model": model, "device": "cpu", "dtype": "float32"} | keys
    types = {"builtin": BuiltinConfig, "huggingface": HuggingFaceConfig}
    return types[kind].model_validate(common)


async def tokens(service: EngineService, context_id: int, **sampling: Any) -> list[int]:
    """The generated tokens after a fixed prompt."""
    wanted = {"max_gen_length": 24, "ignore_tokenizer_eos": True} | sampling
    request = GenerateRequest(
        context_id=context_id,
        fills=[FillPiece(context_id=context_id, token_ids=[65, 66, 67])],
        sampling_config=SamplingConfig.model_validate(wanted),
    )
    return (await service.generate(request)).generated_ids


@pytest.mark.parametrize("kind", ["builtin", "huggingface"])
async def test_a_model_that_does_not_sample_is_greedy(
    kind: str, start: Start, tmp_path: Path
) -> None:
    model = model_with(tmp_path / "model", do_sample=False, temperature=0.7, eos_token_id=257)
    service = await start(config_of(kind, model))
    info = service.engine_info()
    assert info.architecture == ("LlamaForCausalLM" if kind == "builtin" else "")
    assert info.default_sampling == NEUTRAL_SAMPLING.model_copy(update={"temperature": 0.0})
    greedy = await tokens(service, 1, temperature=0)
    assert await tokens(service, 2, seed=1) == greedy
    assert await tokens(service, 3, seed=2) == greedy
    drawn = await tokens(service, 4, seed=2, temperature=1)
    assert drawn != greedy
    assert await tokens(service, 5, seed=2, temperature=1.0, top_p=1.0) == drawn


@pytest.mark.parametrize("kind", ["builtin", "huggingface"])
async def test_the_engines_config_overrides_the_model(
    kind: str, start: Start, tmp_path: Path
) -> None:
    generation = {"temperature": 0.9, "top_k": 1, "repetition_penalty": 1.5}
    model = model_with(tmp_path / "model", **generation)
    own = {"top_k": 0, "repetition_penalty": 10.0}
    service = await start(config_of(kind, model, default_sampling=own))
    assert service.engine_info().default_sampling == DefaultSampling(
        temperature=0.9, top_p=1.0, min_p=0.0, **own
    )
    unset = await tokens(service, 1, temperature=0)
    assert unset == await tokens(service, 2, temperature=0, repetition_penalty=10.0)
    assert unset != await tokens(service, 3, temperature=0, repetition_penalty=1)


async def test_an_output_with_a_grammar_may_repeat_itself(start: Start, tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", repetition_penalty=10.0)
    service = await start(config_of("builtin", model))
    asked = {"regex": "[a-z]{24}", "temperature": 0, "ignore_tokenizer_eos": False}
    unset = await tokens(service, 1, **asked)
    assert unset == await tokens(service, 2, **asked, repetition_penalty=1)
    assert unset != await tokens(service, 3, **asked, repetition_penalty=10)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "repetition_penalty"])
def test_invalid_values_of_a_model_are_ignored(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with(tmp_path / "model", **{"min_p": 0.1, field: "much"})
    found = open_checkpoint(model).default_sampling
    assert found == DefaultSampling(min_p=0.1)
    assert f"ignored `{field}` 'much'" in caplog.text


def test_the_defaults_of_the_embedded_model() -> None:
    wanted = DefaultSampling(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    assert open_checkpoint("embedded").default_sampling == wanted


async def test_a_simulated_engine_reports_its_defaults(start: Start) -> None:
    service = await start(SimConfig.model_validate({"default_sampling": {"temperature": 0.4}}))
    wanted = NEUTRAL_SAMPLING.model_copy(update={"temperature": 0.4})
    assert service.engine_info().default_sampling == wanted


def test_an_openai_engine_accepts_no_default_sampling() -> None:
    given = {"engine_type": "openai", "model": "m", "default_sampling": {"temperature": 0.4}}
    with pytest.raises(ConfigError, match="default_sampling"):
        parse_engine_config(given, "engine.json")
