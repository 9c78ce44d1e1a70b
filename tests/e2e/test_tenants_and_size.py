"""Prefixes are shared within a tenant only, and programs may have more calls than the queue."""

import asyncio

from parrot import P
from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CompletionInfo
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program

FAST_SIM = {"engine_type": "sim", "model": "sim", "instance": {"step_s": 0.0}}
INSTRUCTIONS = "You are a helpful assistant who follows a long list of rules. " * 40


async def ask_once(client: ServeClient, api_key: str, question: str) -> CompletionInfo:
    """Run one call in a new session, end the session, and return the record of the call."""
    created = await client.create_session(api_key)
    scope = (created.session_id, created.session_auth)
    session = Program(client, *scope)
    template = INSTRUCTIONS + "{{question}} {{out}}"
    await session.get(await session.call(template, 4, inputs={"question": question}))
    info = await client.session_info(*scope)
    await client.delete_session(*scope)
    return info.calls[0]


async def test_a_prefix_is_shared_within_a_tenant_only() -> None:
    with Cluster(core={"api_keys": ["one", "two"]}, engines=[FAST_SIM]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client = ServeClient(http)
            first = await ask_once(client, "one", "What is the time?")
            assert first.cached_tokens == 0
            again = await ask_once(client, "one", "Who is there?")
            assert again.cached_tokens > 100
            assert again.computed_tokens < 20
            stranger = await ask_once(client, "two", "What is the time?")
            assert stranger.cached_tokens == 0
            assert stranger.computed_tokens == first.computed_tokens
        log = cluster.log("core")
    assert INSTRUCTIONS[:20] not in log


async def test_background_calls_do_not_evict_the_prefix_of_another_tenant() -> None:
    """The background calls are running, so only the other tenant has idle contexts."""
    small = FAST_SIM | {"tokens_capacity": 12_288}
    with Cluster(core={"api_keys": ["crowd", "quiet"]}, engines=[small]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client = ServeClient(http)
            cold = await ask_once(client, "quiet", "What is the time?")
            assert cold.computed_tokens > 2000
            created = await client.create_session("crowd")
            crowd = Program(client, created.session_id, created.session_auth)
            calls = [
                await crowd.call(f"{number} of many. " * 100 + "{{out}}", 40)
                for number in range(40)
            ]
            await asyncio.gather(*map(crowd.get, calls))
            warm = await ask_once(client, "quiet", "Who is there?")
            assert warm.cached_tokens > 2000


def test_a_map_larger_than_the_queue_and_its_reduce() -> None:
    """A single program may exceed the queue limit."""
    short = P.SamplingConfig(max_gen_length=2)
    with Cluster(engines=[FAST_SIM]) as cluster:
        vm = P.VirtualMachine(cluster.core_url)
        output = P.Parameter("o", P.ParamType.OUTPUT_LOC, short)
        part = vm.define_function(
            "part", "Sum up {{x}}: {{o}}", [P.Parameter("x", P.ParamType.INPUT_LOC), output]
        )
        inputs = [P.Parameter(f"x{n}", P.ParamType.INPUT_LOC) for n in range(600)]
        template = "Join " + " ".join(f"{{{{{p.name}}}}}" for p in inputs) + ": {{o}}"
        join = vm.define_function("join", template, [*inputs, output])
        with vm.running_scope():
            parts = [part(f"part {n}") for n in range(1200)]
            halves = [join(*parts[:600]), join(*parts[600:])]
            whole = vm.define_function(
                "whole", "Of {{x0}} and {{x1}}: {{o}}", [*inputs[:2], output]
            )
            assert whole(*halves).get(timeout=60)
            states = [call.state for call in vm.session_info().calls]
        assert states == ["done"] * 1203
