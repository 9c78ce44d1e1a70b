"""Programs on two vLLM servers whose caches hold only some of the programs' prefixes."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from tests.foreign.conftest import start_server
from tests.foreign.servers import MODEL, Vllm, engine_config
from tests.foreign.test_foreign_engines import HITS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 128  # Tokens of a block of vLLM on a CPU.
NUM_BLOCKS = 18  # Blocks of each server. Sequences of 2,048 tokens need at least 16.
NUM_PROGRAMS = 4
NUM_TURNS = 4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    started: list[Vllm] = []
    try:
        for _ in range(2):
            folder = tmp_path_factory.mktemp("pair")
            started.append(start_server(Vllm, folder, num_blocks=NUM_BLOCKS))
        yield started
    finally:
        for server in started:
            server.end()


async def ask(http: aiohttp.ClientSession, program: int, turn: int) -> int:
    """Send a turn of a program, and return the number of its prompt tokens."""
    beginning = f"You are program {program}, which knows a lot about parrots. " * 60
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": beginning},
            {"role": "user", "content": f"Question {turn}: what do parrots eat?"},
        ],
        "max_tokens": 8,
        "temperature": 0,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        payload = await response.json()
        assert response.status == 200, payload
    num_tokens: int = payload["usage"]["prompt_tokens"]
    return num_tokens


async def test_each_program_stays_at_the_server_with_its_prefix(
    servers: list[Vllm],
) -> None:
    """The programs take turns, so load does not influence the placement."""
    num_reusable = 0
    hits = sum(server.metric(HITS) for server in servers)
    with Cluster(engines=[engine_config(server) for server in servers]) as cluster:
        timeout = aiohttp.ClientTimeout(300)
        async with aiohttp.ClientSession(cluster.core_url, timeout=timeout) as http:
            for turn in range(NUM_TURNS):
                for program in range(NUM_PROGRAMS):
                    num_tokens = await ask(http, program, turn)
                    num_blocks = num_tokens // BLOCK
                    assert 2 * num_blocks + 2 < NUM_BLOCKS < NUM_PROGRAMS * num_blocks
                    num_reusable += (num_blocks - 1) * BLOCK if turn else 0
    found = sum(server.metric(HITS) for server in servers) - hits
    assert found > 0.8 * num_reusable
