"""The load of a foreign server, including other clients, from its metrics."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.dialects import DIALECTS
from parrot.engine.openai.server_load import read_load
from parrot.engine.openai.service import OpenAIService
from parrot.protocol.engine_api import FillPiece, GenerateRequest
from parrot.protocol.sampling import SamplingConfig
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI

# Recorded from vLLM 0.32 with three requests.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="smol"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.17647058823529416
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="2304"} 1.0
"""
OLD_VLLM = """\
vllm:num_requests_running{model_name="m",engine="0"} 30.0
vllm:num_requests_running{model_name="m",engine="1"} 10.0
vllm:num_requests_waiting{model_name="m",engine="0"} 9.0
vllm:num_requests_waiting{model_name="m",engine="1"} 1.0
vllm:gpu_cache_usage_perc{model_name="m",engine="0"} 0.9
vllm:gpu_cache_usage_perc{model_name="m",engine="1"} 0.5
"""
# From SGLang's documentation, with the labels of later versions.
SGLANG = """\
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0",pp_rank="0"} 0.28
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",priority=""} 162.0
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0",priority="1"} 100.0
sglang:num_running_reqs{model_name="m",tp_rank="1",pp_rank="0",priority=""} 162.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",pp_rank="0",priority=""} 2826.0
"""
LLAMA_CPP = """\
llamacpp:tokens_predicted_total 17029
llamacpp:requests_processing 4
llamacpp:requests_deferred 46
"""


@pytest.mark.parametrize(
    ("dialect", "metrics", "num_sent", "load"),
    [
        ("vllm", VLLM, 1, (3, 0, 2, 0.17647058823529416, 271)),
        ("vllm", VLLM, 9, (3, 0, 0, 0.17647058823529416, 0)),
        ("vllm", OLD_VLLM, 25, (40, 10, 25, 0.7, 806)),
        ("sglang", SGLANG, 0, (162, 2826, 2988, 0.28, 645)),
        ("llama.cpp", LLAMA_CPP, 10, (4, 46, 40, None, 0)),
    ],
)
def test_loads_of_servers(
    dialect: str, metrics: str, num_sent: int, load: tuple[int, int, int, float | None, int]
) -> None:
    names = DIALECTS[dialect].load
    assert names is not None
    found = read_load(metrics, names, num_sent, kv_tokens=2304)
    assert found is not None
    told = (found.num_running, found.num_waiting, found.num_others)
    assert (*told, found.kv_usage, found.other_tokens) == load


@given(
    value=st.one_of(st.floats().map(str), st.text("0123456789.eE+-naNif", max_size=9)),
    labels=st.text('a="},{', max_size=20),
    num_sent=st.integers(0, 2**53),
)
def test_any_metrics_text_gives_a_load_or_none(value: str, labels: str, num_sent: int) -> None:
    names = DIALECTS["vllm"].load
    assert names is not None
    named = (*names.running, *names.waiting, *names.usage)
    lines = [f"{name}{{{labels}}} {value}" for name in named]
    read_load("\n".join(lines), names, num_sent, kv_tokens=2**53)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is a server's
            await asyncio.sleep(0.01)


async def service_for(fake: FakeOpenAI, url: str) -> OpenAIService:
    config = {"model": "gpt-fake", "instance": {"base_url": f"{url}/v1"}}
    service = OpenAIService(OpenAIConfig.model_validate(config), environ={})
    await service.start()
    return service


async def test_a_heartbeat_has_the_load_that_was_read_since_the_last_one() -> None:
    """The engine's own requests do not count as requests of other clients."""
    fake = FakeOpenAI(owned_by="vllm", responses={"/metrics": VLLM}, hold=asyncio.Event())
    async with serve_app(fake.app()) as url:
        service = await service_for(fake, url)
        assert service.runtime_info({}).server_load is None
        await until(lambda: service.runtime_info().server_load is not None)
        found = service.runtime_info({}).server_load
        assert found is not None
        assert found.num_others == 3

        request = GenerateRequest(
            context_id=1,
            fills=[FillPiece(context_id=1, text="a")],
            sampling_config=SamplingConfig(),
        )
        asked = asyncio.create_task(service.generate(request))
        await fake.wait_for_requests()
        await until(lambda: service.runtime_info({}).server_load != found)
        now = service.runtime_info().server_load
        assert now is not None
        assert (now.num_running, now.num_others) == (3, 2)
        assert fake.hold is not None
        fake.hold.set()
        await asked
        await service.close()


async def test_an_old_load_is_dropped_if_it_cannot_be_read_again() -> None:
    fake = FakeOpenAI(owned_by="vllm", responses={"/metrics": VLLM})
    async with serve_app(fake.app()) as url:
        service = await service_for(fake, url)
        await until(lambda: service.runtime_info({}).server_load is not None)
        del fake.responses["/metrics"]
        await until(lambda: service.runtime_info({}).server_load is None)
        fake.responses["/metrics"] = VLLM
        await until(lambda: service.runtime_info({}).server_load is not None)
        await service.close()


async def test_a_server_without_load_metrics_is_not_queried() -> None:
    fake = FakeOpenAI(responses={"/metrics": VLLM})
    async with serve_app(fake.app()) as url:
        service = await service_for(fake, url)
        for _ in range(3):
            assert service.runtime_info({}).server_load is None
            await asyncio.sleep(0)
        await service.close()
