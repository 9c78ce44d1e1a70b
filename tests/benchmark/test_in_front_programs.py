"""All compared clients send the same requests to the server."""

from typing import Any

import openai
import pytest

from benchmark.serve.in_front_programs import PackageProgram, PFuncClient
from parrot.cli.bench.agents import MultiAgent
from parrot.cli.bench.documents import Chain, MapReduce
from parrot.cli.bench.plan import Workload
from parrot.cli.bench.program import Program
from parrot.cli.bench.text import COMMON_WORDS, TextSource
from parrot.cluster import Cluster
from tests.support.app_server import running_in_thread
from tests.support.fake_openai import FakeOpenAI

DOCUMENT = {"document_tokens": 30, "chunk": 10, "output": 4}
WORKLOADS = [
    MapReduce(**DOCUMENT),
    Chain(**DOCUMENT),
    MultiAgent(factor=0.01, files=2, num_rounds=1),
]


async def sent(
    fake: FakeOpenAI, workload: Workload, program: Program
) -> tuple[list[tuple[Any, ...]], int]:
    """Return the fields of the program's requests, and its number of completed calls."""
    fake.bodies.clear()
    await program.prepare()
    (job,) = workload.plan(TextSource(COMMON_WORDS), 0).jobs[:1]
    await job.run(program)
    await program.end()
    fields = ("prompt", "max_tokens", "temperature", "ignore_eos")
    found = [tuple(body.get(name) for name in fields) for body in fake.bodies]
    return sorted(found), len(program.account.usages)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_all_clients_send_the_same_requests(is_batch: bool) -> None:
    fake = FakeOpenAI(reply="one two three four", owned_by="vllm")
    with running_in_thread(fake.app()) as url:
        core = {"host": "127.0.0.1", "servers": [{"url": f"{url}/v1"}]}
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        with Cluster(core, []) as cluster:
            pfunc = PFuncClient(cluster.core_url, "gpt-fake", is_batch=is_batch)
            for workload in WORKLOADS:
                pair = pfunc.program("app"), PackageProgram(client, "gpt-fake")
                through, direct = [await sent(fake, workload, program) for program in pair]
                assert through == direct
                assert through[1] == len(through[0]) >= 3
                assert len(pair[0].account.streams) == len(pair[1].account.streams) > 0
        await client.close()
