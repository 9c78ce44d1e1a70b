"""An engine that cannot register with a ServeCore serves direct clients and keeps their
contexts."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.cluster.process import ServerProcess
from parrot.protocol.engine_api import FillRequest, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import ParrotError
from parrot.protocol.http import HttpClient

HANGS_S = 60
NUM_TOKENS = (
    150  # 3 s: the engine tries to register 0, 0.25, 0.75 and 1.75 s after its first attempt
)
SIM = {"engine_type": "sim", "heartbeat_interval": 0.3, "instance": {"step_s": 0.02}}
HOST = "127.0.0.1"


@pytest.fixture
def engine_alone(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The config of an engine whose ServeCore is down."""
    ports: set[int] = set()
    port, unused = free_port(HOST, ports), free_port(HOST, ports)
    core = {"host": HOST, "port": unused}
    config = {"host": HOST, "port": port, "cluster_token": "a-token", "serve_core": core}
    module = "parrot.engine.http_server"
    process = ServerProcess("engine", module, [], tmp_path / "engine.log", {}, lambda _: None)
    process.start(SIM | config)
    yield config
    process.stop()
    assert "retrying" in process.log()


async def ready(client: EngineClient) -> None:
    async with asyncio.timeout(HANGS_S):
        while True:
            try:
                await client.tokenizer()
                return
            except ParrotError:
                await asyncio.sleep(0.05)


def fork_of(context_id: int, parent_id: int, num_tokens: int) -> GenerateRequest:
    sampling = {"max_gen_length": num_tokens, "ignore_tokenizer_eos": True}
    wanted = {"context_id": context_id, "parent_context_id": parent_id}
    return GenerateRequest.model_validate(wanted | {"sampling_config": sampling})


async def work_through_attempts(client: EngineClient) -> None:
    """Check that a context and a long output survive the engine's attempts to register."""
    await client.fill(FillRequest(context_id=1, token_ids=[97] * 64))
    long = await client.generate(fork_of(2, 1, NUM_TOKENS))
    assert len(long.generated_ids) == NUM_TOKENS
    short = await client.generate(fork_of(3, 1, 4))
    assert short.generated_ids == long.generated_ids[:4]
    assert await client.free_contexts([1, 2, 3]) > 64 + NUM_TOKENS


async def test_contexts_survive_attempts_to_register_with_a_stopped_core(
    engine_alone: dict[str, Any],
) -> None:
    url = f"http://{HOST}:{engine_alone['port']}"
    async with HttpClient(url, bearer_token=engine_alone["cluster_token"]) as http:
        client = EngineClient(http)
        await ready(client)
        await work_through_attempts(client)


async def test_contexts_survive_rejected_registrations(tmp_path: Path) -> None:
    audit = tmp_path / "audit"

    def num_refused() -> int:
        lines = map(json.loads, audit.read_text().splitlines())
        return sum(line["what"] == "POST /register_engine" for line in lines)

    with Cluster({"audit_path": str(audit)}, []) as cluster:
        name = cluster.add_engine(SIM | {"cluster_token": "a-token-that-is-wrong"})
        async with HttpClient(cluster.url(name), bearer_token="a-token-that-is-wrong") as http:
            client = EngineClient(http)
            await ready(client)
            before = num_refused()
            await work_through_attempts(client)
        assert num_refused() >= before + 2
