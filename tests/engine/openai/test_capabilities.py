"""The openai engine probes the capabilities of its foreign server and uses them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.dialects import DIALECTS
from parrot.engine.openai.service import OpenAIService
from parrot.protocol.engine_api import (
    Capabilities,
    EmbedRequest,
    FillPiece,
    GenerateRequest,
)
from parrot.protocol.errors import UnsupportedField
from parrot.protocol.http import HttpClient
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.config import ConfigError, parse_config
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI

Start = Callable[..., Any]
NOTHING = Capabilities()
CACHE = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"%s} 1.0\n'
METRICS = "# HELP x y\nvllm:num_requests_running 0.0\n" + CACHE


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a service for the fake server. Keywords are keys of `instance`."""
    async with AsyncExitStack() as stack:

        async def start_service(fake: FakeOpenAI, **keys: Any) -> OpenAIService:
            url = await stack.enter_async_context(serve_app(fake.app()))
            config = {"model": "gpt-fake", "instance": {"base_url": f"{url}/v1", **keys}}
            service = OpenAIService(OpenAIConfig.model_validate(config), environ={})
            stack.push_async_callback(service.close)
            await service.start()
            return service

        yield start_service


def ask(priority: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        context_id=1,
        fills=[FillPiece(context_id=1, text="a")],
        priority=priority,
        cache_salt="acme",
        sampling_config=SamplingConfig(**sampling),
    )


TOO_MANY = 'vllm:cache_config_info{num_gpu_blocks="99999999999",block_size="99999999999"} 1'


def server_with(owner: str, responses: dict[str, Any]) -> FakeOpenAI:
    return FakeOpenAI(owned_by=owner, responses=responses)


PS = {
    "models": [
        {"name": "other", "context_length": 7},
        {"name": "gpt-fake"} | {"context_length": 8192},
    ]
}


@pytest.mark.parametrize(
    ("fake", "server", "max_len"),
    [
        (
            server_with("llamacpp", {"/props": {"default_generation_settings": {"n_ctx": 2048}}}),
            "llama.cpp",
            2048,
        ),
        (server_with("library", {"/api/version": {"version": "0.9"}}), "ollama 0.9", None),
        (server_with("library", {"/api/ps": PS}), "ollama", 8192),
        (
            server_with(
                "organization_owner",
                {"/api/v0/models/gpt-fake": {"max_context_length": 4096}},
            ),
            "lm-studio",
            4096,
        ),
        (
            server_with("library", {"/api/ps": {"models": [None, {"name": "gpt-fake"}]}}),
            "ollama",
            None,
        ),
        (FakeOpenAI(owned_by="parrot", max_model_len=77), "parrot", 77),
        (FakeOpenAI(owned_by="vllm", max_model_len=-1), "vllm", None),
    ],
)
async def test_the_context_length_is_that_of_the_server(
    start: Start, fake: FakeOpenAI, server: str, max_len: int | None
) -> None:
    service = await start(fake)
    info = service.engine_info()
    assert info.capabilities.server == server
    assert info.max_seq_len == (4096 if max_len is None else max_len)


@pytest.mark.parametrize(
    ("fake", "server", "kept_tokens", "kept_prompts"),
    [
        (server_with("vllm", {"/version": {"version": "0.32.0"}}), "vllm 0.32.0", None, None),
        (server_with("vllm", {"/metrics": METRICS % ""}), "vllm", 1600, None),
        (
            server_with("vllm", {"/metrics": METRICS % ',kv_cache_size_tokens="1500"'}),
            "vllm",
            1500,
            None,
        ),
        (
            server_with("vllm", {"/metrics": METRICS % ',enable_prefix_caching="False"'}),
            "vllm",
            0,
            None,
        ),
        (server_with("vllm", {"/metrics": "x" * 5_000_000, "/version": [1]}), "vllm", None, None),
        (
            server_with(
                "sglang", {"/server_info": {"version": "0.5", "max_total_num_tokens": 20480}}
            ),
            "sglang 0.5",
            20480,
            None,
        ),
        (
            server_with("sglang", {"/get_server_info": {"disable_radix_cache": True}}),
            "sglang",
            0,
            None,
        ),
        (
            server_with("llamacpp", {"/props": {"build_info": "b8681", "total_slots": 4}}),
            "llama.cpp b8681",
            None,
            4,
        ),
        (server_with("llamacpp", {"/props": {"total_slots": "many"}}), "llama.cpp", None, None),
        (server_with("me", {}), "llama-cpp-python", None, 1),
        (server_with("some maker", {"/version": {"version": "1"}}), "openai", None, None),
        (
            server_with("vllm", {"/version": {"version": "9" * 9_000}}),
            "vllm " + "9" * 256,
            None,
            None,
        ),
        (
            server_with("vllm", {"/metrics": TOO_MANY, "/version": {"version": [1]}}),
            "vllm",
            None,
            None,
        ),
        (
            server_with("sglang", {"/server_info": {"max_total_num_tokens": -5}}),
            "sglang",
            None,
            None,
        ),
    ],
)
async def test_capabilities_are_read_from_the_server(
    start: Start,
    fake: FakeOpenAI,
    server: str,
    kept_tokens: int | None,
    kept_prompts: int | None,
) -> None:
    service = await start(fake)
    found = service.engine_info().capabilities
    assert (found.server, found.kept_tokens) == (server, kept_tokens)
    assert found.kept_prompts == kept_prompts
    assert service.runtime_info().capabilities == found


async def test_sglang_gets_priorities_only_if_low_values_run_first(start: Start) -> None:
    for lowest_first in (True, False):
        info = {"enable_priority_scheduling": True}
        info["schedule_low_priority_values_first"] = lowest_first
        fake = server_with("sglang", {"/server_info": info})
        service = await start(fake)
        await service.generate(ask(priority=-3))
        assert fake.bodies[0].get("priority") == (-3 if lowest_first else None)
        assert len(fake.bodies[0]["cache_salt"]) == 64


async def test_the_configuration_overrides_the_probed_capabilities(start: Start) -> None:
    fake = server_with("a proxy", {"/metrics": METRICS % ""})
    features = {"priority": True, "cache_salt": False, "regex": False, "n": True}
    service = await start(fake, server="vllm", features=features, kept_tokens=7, kept_prompts=2)
    found = service.engine_info().capabilities
    assert found == Capabilities(
        server="vllm",
        features=(DIALECTS["vllm"].features(False) | {"priority", "n"}) - {"cache_salt", "regex"},
        kept_tokens=7,
        kept_prompts=2,
    )
    await service.generate(ask(priority=5))
    assert fake.bodies[0]["priority"] == 5
    assert "cache_salt" not in fake.bodies[0]
    with pytest.raises(UnsupportedField, match="regex"):
        await service.generate(ask(regex="a"))


async def test_an_unreachable_server_is_probed_again_later(start: Start) -> None:
    """The engine probes again when a request depends on the capabilities."""
    fake = FakeOpenAI(owned_by="vllm", models_status=503)
    service = await start(fake)
    assert service.engine_info().capabilities == Capabilities()
    fake.models_status = 200
    await service.generate(ask(top_k=3))
    found = service.runtime_info().capabilities
    assert found is not None
    assert found.server == "vllm"


async def test_the_servers_span_is_a_child_of_the_callers_span(start: Start) -> None:
    span = f"00-{'ab' * 16}-{'cd' * 8}-01"
    fake = FakeOpenAI()
    service = await start(fake)
    for given, sent in ((span, span), ("no span\r\nx: y", None), ("", None)):
        request = ask().model_copy(update={"traceparent": given})
        await service.generate(request)
        async for _ in service.generate_stream(request):
            pass
        await service.read(EmbedRequest(inputs=["a"], traceparent=given))
        assert [headers.get("traceparent") for headers in fake.headers] == [sent] * 3
        fake.headers.clear()


def test_a_feature_that_does_not_exist_is_refused() -> None:
    payload = {"model": "m", "instance": {"features": {"regexp": True}}}
    with pytest.raises(ConfigError, match="unknown feature `regexp`"):
        parse_config(OpenAIConfig, payload, "test")


async def test_capabilities_are_sent_to_serve_core(start: Start) -> None:
    """The registration and each heartbeat contain the capabilities."""
    service = await start(FakeOpenAI(owned_by="vllm"))
    core = ServeCore(CoreConfig())
    async with serve_app(create_app(core)) as url, HttpClient(url) as http:
        client = RegistrationClient(http)
        info = service.engine_info()
        terms = await client.register_engine(info.model_copy(update={"capabilities": NOTHING}))
        assert core.fleet.views()[0].info.capabilities == NOTHING
        await client.engine_heartbeat(terms.engine_id, info.engine_name, service.runtime_info())
        assert core.fleet.views()[0].info.capabilities == info.capabilities
    await core.close()


@pytest.mark.parametrize("length", [-1, 0, 10**30])
async def test_implausible_context_lengths_are_ignored(start: Start, length: int) -> None:
    service = await start(FakeOpenAI(owned_by="vllm", max_model_len=length))
    assert service.engine_info().max_seq_len == 4096  # The default.
