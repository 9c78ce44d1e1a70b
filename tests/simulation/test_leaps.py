"""Combining predictable engine steps into one event does not change the results."""

import asyncio
import random
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.protocol.public import SemanticCallRequest
from parrot.simulation import SimCluster, VirtualLoop, fixed, run_virtual

PREFIX = "All calls of this family begin with these words, and some have even more of them. " * 4
Seen = list[tuple[float, int, str]]


async def program(cluster: SimCluster, number: int, seen: Seen) -> None:
    """Calls that depend on each other, with random times for reads, streams and abandoned reads."""
    rng = random.Random(number)
    client = cluster.client(fixed(rng.choice([0.0, 0.01])))
    await asyncio.sleep(rng.uniform(0, 2))
    scope = (await client.create_session()).model_dump()
    var_ids: list[str] = []
    for step in range(rng.randint(1, 4)):
        inputs = rng.sample(var_ids, min(len(var_ids), rng.randint(0, 2)))
        parameters: list[dict[str, Any]] = [
            {"name": f"in{n}", "var_id": var_id} for n, var_id in enumerate(inputs)
        ]
        sampling: dict[str, Any] = {"max_gen_length": rng.randint(1, 120)}
        if rng.random() < 0.1:
            sampling["stop_str"] = "et"
        parameters.append({"name": "out", "is_output": True, "sampling_config": sampling})
        places = " ".join(f"{{{{in{n}}}}}" for n in range(len(inputs)))
        template = PREFIX * rng.randint(0, 3) + f"{number}, {step}: {places} {{{{out}}}}"
        body = scope | {"template": template, "parameters": parameters}
        response = await client.semantic_call(SemanticCallRequest.model_validate(body))
        var_ids.append(response.param_info[-1].var_id)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 0.5))
    read = asyncio.create_task(client.get_var(**scope, var_id=var_ids[0]))
    if rng.random() < 0.2:
        await asyncio.sleep(rng.uniform(0, 0.2))
        read.cancel()
    if rng.random() < 0.2:
        text = "".join([d async for d in client.stream_var(**scope, var_id=var_ids[-1])])
    else:
        text = await client.get_var(**scope, var_id=var_ids[-1])
    seen.append((cluster.clock.now(), number, text))
    await asyncio.gather(read, return_exceptions=True)
    if rng.random() < 0.5:
        await client.delete_session(**scope)


def run(*, leaps: bool, blocks: int, batch: int, trouble: bool) -> tuple[Seen, int, int]:
    """The results of the programs, the engines' steps, and the number of timers."""

    async def main() -> tuple[Seen, int, int]:
        engine = SimConfig.model_validate(
            {
                "instance": {"num_kv_cache_blocks": blocks, "context_token_s": 1e-6},
                "scheduler": {"max_batch_size": batch},
            }
        )
        seen: Seen = []
        async with SimCluster(3, engine=engine, leaps=leaps) as cluster:
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(program(cluster, number, seen))
                if trouble:
                    await asyncio.sleep(0.7)
                    cluster.engines["engine0"].slow_down(3.0)
                    await asyncio.sleep(0.3333)
                    await cluster.engines["engine1"].kill()
                    await cluster.add_engine()
                    cluster.engines["engine0"].slow_down(0.5)
            await asyncio.sleep(1)
            cluster.check_integrity()
            steps = [e.service.runtime_info().num_steps for e in cluster.engines.values()]
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return seen, sum(steps), loop.num_timers

    return run_virtual(main())


@pytest.mark.parametrize(
    ("blocks", "batch", "trouble"),
    [(4096, 256, False), (4096, 256, True), (4096, 4, True), (160, 256, True)],
    ids=["plenty", "trouble", "small batch", "little memory"],
)
def test_programs_see_the_same_at_the_same_times(blocks, batch, trouble):
    seen, num_steps, num_timers = run(leaps=True, blocks=blocks, batch=batch, trouble=trouble)
    each, num_each, num_timers_each = run(leaps=False, blocks=blocks, batch=batch, trouble=trouble)
    assert [what[1:] for what in seen] == [what[1:] for what in each]
    assert [what[0] for what in seen] == pytest.approx([what[0] for what in each], abs=1e-9)
    assert trouble or num_steps == num_each  # The killed engine counts only delivered steps.
    assert num_timers < num_timers_each
