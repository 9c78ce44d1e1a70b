"""Calls without a reader run in the background. A fan-out that is read one by one takes hardly
longer than one that is read at once, and calls with a reader go first. Virtual time."""

import asyncio
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual
from parrot.simulation.cluster import PATIENT

STEP_S = 0.01
COSTS = {"step_s": STEP_S, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}


class Program:
    def __init__(self, client: ServeClient, scope: dict[str, Any]) -> None:
        self.client = client
        self.scope = scope

    async def call(self, length: int, **fields: Any) -> str:
        sampling = {"max_gen_length": length, "ignore_tokenizer_eos": True}
        output = {"name": "out", "is_output": True, "sampling_config": sampling}
        request = {"template": "Go on: {{out}}", "parameters": [output]} | fields
        response = await self.client.semantic_call(
            SemanticCallRequest.model_validate(self.scope | request)
        )
        return response.param_info[-1].var_id

    async def read(self, var_id: str) -> float:
        """Read a value, and return the time at which it was ready."""
        await self.client.get_var(**self.scope, var_id=var_id)
        return asyncio.get_running_loop().time()


def simulate(body: Any, *, on_demand: bool = False, **engine: Any) -> Any:
    """Simulate one engine with the limits of `engine`."""

    async def main() -> Any:
        config = SimConfig.model_validate({"instance": COSTS} | engine)
        async with SimCluster(1, engine=config, core=PATIENT) as cluster:
            client = cluster.client()
            scope = (await client.create_session(on_demand=on_demand)).model_dump()
            result = await body(Program(client, scope))
            await asyncio.sleep(1)
            cluster.check_integrity()
            return result

    return run_virtual(main())


async def read_one_by_one(program: Program) -> float:
    var_ids = [await program.call(400) for _ in range(8)]
    return [await program.read(var_id) for var_id in var_ids][-1]


async def read_at_once(program: Program) -> float:
    var_ids = [await program.call(400) for _ in range(8)]
    return max(await asyncio.gather(*map(program.read, var_ids)))


def test_a_fan_out_read_one_by_one_takes_as_long_as_one_read_at_once() -> None:
    at_once = simulate(read_at_once)
    assert simulate(read_one_by_one) < 1.05 * at_once
    assert simulate(read_one_by_one, on_demand=True) > 7 * at_once


def test_calls_submitted_after_the_first_read_run_at_once() -> None:
    async def body(program: Program) -> float:
        start = await program.read(await program.call(1))
        return await read_one_by_one(program) - start

    assert simulate(body) < 1.05 * simulate(read_at_once)


def test_calls_with_a_reader_go_first() -> None:
    """The engine runs one call at a time."""

    async def body(program: Program) -> list[float]:
        var_ids = [await program.call(10) for _ in range(6)]
        return [await program.read(var_ids[n]) for n in (4, 1, 5)]

    first, second, third = simulate(body, scheduler={"max_batch_size": 1}, tasks_capacity=1)
    one_call_s = 10 * STEP_S
    assert first == pytest.approx(one_call_s, rel=0.2)
    assert second < 3.5 * one_call_s  # After a call that was placed meanwhile.
    assert third < 5.5 * one_call_s


def test_an_abandoned_read_stops_only_its_own_work() -> None:
    async def body(program: Program) -> list[str]:
        var_ids = [await program.call(1000) for _ in range(3)]
        reading = asyncio.create_task(program.read(var_ids[0]))
        await asyncio.sleep(1)
        reading.cancel()
        await asyncio.sleep(1)
        states = await program.client.session_info(**program.scope)
        await program.client.delete_session(**program.scope)
        return [row.state for row in states.calls]

    assert simulate(body) == ["idle", "running", "running"]
