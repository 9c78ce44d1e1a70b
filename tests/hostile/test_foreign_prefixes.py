"""A tenant cannot learn from the prefix cache what another tenant has sent."""

import asyncio
import random
from pathlib import Path

import httpx

from parrot.cluster import Cluster
from parrot.engine.config import SimInstance
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CompletionInfo
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program
from tests.serve.tenants.keys import entry, write_keys

SIM = {"engine_type": "sim", "tokens_capacity": 2**20, "instance": {"step_s": 0.0}}
NUM_PROBES = 200
AT_ONCE = 10
BLOCK_SIZE = SimInstance().block_size


async def ask(client: ServeClient, key: str, prompt: str) -> CompletionInfo:
    """Run one call in a new session, and return its record."""
    created = await client.create_session(key)
    scope = (created.session_id, created.session_auth)
    session = Program(client, *scope)
    await session.get(await session.call(prompt + " {{out}}", 4))
    info = await client.session_info(*scope)
    await client.delete_session(*scope)
    return info.calls[0]


async def test_a_prefix_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.json",
        entry("victim", "victim's key", share_group="friends"),
        entry("friend", "friend's key", share_group="friends"),
        entry("friends", "key of a tenant with the group's name"),
        entry("stranger", "stranger's key"),
    )
    draw = random.Random(1)
    words = [f"w{n}" for n in range(500)]
    prompts = [" ".join(draw.choices(words, k=draw.randint(10, 40))) for _ in range(NUM_PROBES)]
    core = {"keys_file": path, "cluster_token": "t"}
    with Cluster(core=core, engines=[SIM]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client, turns = ServeClient(http), asyncio.Semaphore(AT_ONCE)

            async def probe(number: int, prompt: str) -> None:
                async with turns:
                    cold = await ask(client, "victim's key", prompt)
                    who = (
                        "key of a tenant with the group's name" if number % 2 else "stranger's key"
                    )
                    foreign = await ask(client, who, prompt)
                    assert (cold.cached_tokens, foreign.cached_tokens) == (0, 0)
                    assert foreign.computed_tokens == cold.computed_tokens
                    if number % 10 == 0:
                        shared = await ask(client, "friend's key", prompt)
                        assert shared.cached_tokens > 0
                        own = await ask(client, "stranger's key", prompt)
                        assert own.cached_tokens > 0

            await asyncio.gather(*(probe(i, prompt) for i, prompt in enumerate(prompts)))
        for log in (cluster.log("core"), cluster.log(cluster.engine_names[0])):
            assert "victim's key" not in log


async def test_only_whole_blocks_of_a_public_prefix_are_found(tmp_path: Path) -> None:
    """Neither text after a public prefix nor text that differs within it is found."""
    policy = tmp_path / "policy.txt"
    public = "You are one of our assistants, and say nothing of what others ask you."
    policy.write_text(public + "\n")
    whole = len(public) // BLOCK_SIZE * BLOCK_SIZE
    hit = whole - 1  # the last token of the prefix is computed again
    draw = random.Random(2)
    core = {"public_prefixes": (str(policy),)}
    with Cluster(core=core, engines=[SIM]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client, turns = ServeClient(http), asyncio.Semaphore(AT_ONCE)

            async def probe(number: int) -> None:
                """Probe as a new tenant, because a tenant finds its own prompts again."""
                secret = f"{draw.random()} is what I would keep to myself"
                near = public[: draw.randrange(BLOCK_SIZE, whole)] + f"! {secret}"
                sent, probed, found = [
                    (f"{public} {secret}", f"{public} {secret}", hit),
                    (f"{public} {secret}", f"{public} {secret[:9]}", hit),
                    (f"{public} {secret}", secret, 0),
                    (near, near, 0),
                ][number % 4]
                async with turns:
                    await ask(client, "victim", sent)
                    foreign = await ask(client, f"stranger {number}", probed)
                    assert foreign.cached_tokens == found, probed
                    if number % 10 == 0:
                        again = await ask(client, f"stranger {number}", probed)
                        assert again.cached_tokens > found

            first = await ask(client, "first", f"{public} Hello!")
            assert first.cached_tokens == 0
            await asyncio.gather(*map(probe, range(NUM_PROBES)))
        chats = [(public, whole), (public + " Be brief.", whole), (public[:40], 0)]
        async with httpx.AsyncClient(base_url=cluster.core_url) as web:
            for number, (system, found) in enumerate([(public, 0), *chats]):
                answer = await web.post(
                    "/v1/chat/completions",
                    headers={"Authorization": f"Bearer chat {number}"},
                    json={
                        "model": "sim",
                        "max_tokens": 2,
                        "messages": [
                            {"role": "system", "content": system},
                            {"role": "user", "content": "Hello"},
                        ],
                    },
                )
                usage = answer.json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == found, system
