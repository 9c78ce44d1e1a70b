"""How much each eviction rule recomputes when contexts do not fit, in the whole system."""

import asyncio
import random
import re
from typing import Any

from parrot.engine.config import SimConfig
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import GlobalSchedulerConfig
from parrot.simulation import PATIENT, SimCluster, run_virtual

TOOLS_S = {"quick": (1.0, 2.0), "slow": (20.0, 25.0)}
CAPACITY = 6000


async def call(client: ServeClient, scope: dict[str, Any], template: str, **fields: Any) -> Any:
    """Submit a call. Other `fields` are its inputs: texts or ids of variables."""
    own = {name: fields.pop(name) for name in ("func_name", "successor_of") if name in fields}
    inputs = [{"name": name, **value} for name, value in fields.items()]
    out = {"name": "out", "is_output": True, "sampling_config": {"max_gen_length": 5}}
    body = scope | own | {"template": template, "parameters": [*inputs, out]}
    return await client.semantic_call(SemanticCallRequest.model_validate(body))


async def chat(client: ServeClient, seed: int) -> None:
    draw = random.Random(seed)
    scope = (await client.create_session()).model_dump()
    previous = None
    for _ in range(10):
        tool = draw.choice(list(TOOLS_S))
        response = await call(
            client,
            scope,
            "{{message}}{{out}}",
            func_name=tool,
            successor_of=previous,
            message={"value": draw.randbytes(100).hex()},
        )
        previous = response.request_id
        await client.get_var(**scope, var_id=response.param_info[-1].var_id)
        await asyncio.sleep(draw.uniform(*TOOLS_S[tool]))
    info = await client.session_info(**scope)
    assert sum(c.recomputed_tokens for c in info.calls) <= sum(
        c.computed_tokens for c in info.calls
    )
    await client.delete_session(**scope)


def counters(cluster: SimCluster) -> dict[str, float]:
    lines = re.findall(
        r"^parrot_(?:kv_)?(\S+) (\S+)$", b"".join(cluster.core.metrics()).decode(), re.MULTILINE
    )
    return {name: float(value) for name, value in lines}


def run(body: Any, eviction: str) -> dict[str, float]:
    async def main() -> dict[str, float]:
        scheduler = GlobalSchedulerConfig.model_validate({"kv_eviction": eviction})
        core = PATIENT.model_copy(update={"global_scheduler": scheduler})
        engine = SimConfig(tokens_capacity=CAPACITY, tasks_capacity=2)
        async with SimCluster(1, engine=engine, core=core) as cluster:
            await body(cluster)
            cluster.check_integrity()
            (status,) = cluster.core.readiness(sees_engines=True).engines
            found = counters(cluster)
            assert status.hit_tokens == found["hit_tokens_total"]
            assert status.evicted_tokens == found.get('freed_tokens_total{reason="room"}', 0)
            for series in (
                "call_evicted_tokens_total{function",
                "app_call_evicted_tokens_total{app",
            ):
                evicted = [n for name, n in found.items() if name.startswith(series)]
                assert sum(evicted) == status.evicted_tokens
            return found

    return run_virtual(main())


async def chats(cluster: SimCluster) -> None:
    client = cluster.client()
    await asyncio.gather(*(chat(client, seed) for seed in range(12)))


RECOMPUTED = 'recomputed_tokens_total{reason="room"}'


def test_chats_with_slow_tools_are_evicted_before_chats_with_fast_tools() -> None:
    lru, next_use = run(chats, "lru"), run(chats, "next_use")
    assert next_use[RECOMPUTED] < 0.75 * lru[RECOMPUTED]
    assert next_use["hit_tokens_total"] > lru["hit_tokens_total"]
    slow, quick = (f'call_evicted_tokens_total{{function="{name}"}}' for name in ("slow", "quick"))
    assert next_use[slow] > next_use[quick] > 0


async def documents(cluster: SimCluster) -> None:
    """Run a session that reads its document again, and other sessions in the meantime."""
    client = cluster.client()
    scope = (await client.create_session()).model_dump()
    text = {"value": "d" * 3000}
    first = await call(client, scope, "Read {{doc}} so: {{out}}", doc=text)
    hint = await client.create_var(**scope, var_name="hint")
    again = await call(
        client, scope, "Read {{doc}} and {{hint}}: {{out}}", doc=text, hint={"var_id": hint}
    )
    reading = asyncio.ensure_future(client.get_var(**scope, var_id=again.param_info[-1].var_id))
    await client.get_var(**scope, var_id=first.param_info[-1].var_id)
    for i in range(5):
        other = (await client.create_session()).model_dump()
        passing = await call(client, other, "{{x}} {{out}}", x={"value": f"{i}" * 1500})
        await client.get_var(**other, var_id=passing.param_info[-1].var_id)
    await client.set_var(**scope, var_id=hint, content="then")
    await reading


def test_the_inputs_of_a_waiting_call_are_not_evicted() -> None:
    assert run(documents, "lru").get(RECOMPUTED, 0) > 3000
    assert run(documents, "next_use").get(RECOMPUTED, 0) < 100


async def retold(cluster: SimCluster) -> None:
    """Run a conversation in which each call has all earlier texts as inputs."""
    client = cluster.client()
    scope = (await client.create_session()).model_dump()
    said: dict[str, Any] = {}
    for turn in range(4):
        said[f"question_{turn}"] = {"value": f"{turn}" * 500}
        template = "".join(f"{{{{{name}}}}}" for name in said) + "{{out}}"
        response = await call(client, scope, template, **said)
        said[f"answer_{turn}"] = {"var_id": response.param_info[-1].var_id}
        await client.get_var(**scope, **said[f"answer_{turn}"])


def test_calls_find_the_kv_of_earlier_texts_of_a_conversation() -> None:
    found = run(retold, "next_use")
    assert found["hit_tokens_total"] == (1 + 2 + 3) * (500 + 5)
