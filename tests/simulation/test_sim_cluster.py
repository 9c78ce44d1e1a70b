"""The real ServeCore over sim engines, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.protocol.engine_api import GenerateRequest, GenerateResponse
from parrot.protocol.errors import EngineFailed, NoEngine, NotFound, Unavailable
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import NativeCallRequest, SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig
from parrot.simulation import SimCluster, fixed, run_virtual, wan
from parrot.simulation.natives import NATIVE_S

COSTS = {"step_s": 0.01, "prefill_token_s": 1e-3, "sequence_s": 0.0, "context_token_s": 0.0}
ENGINE = SimConfig.model_validate({"instance": COSTS})


class Program:
    """One session with the methods that the tests need."""

    def __init__(self, client: ServeClient) -> None:
        self.client = client
        self.scope: dict[str, Any] = {}

    async def begin(self) -> "Program":
        self.scope = (await self.client.create_session()).model_dump()
        return self

    async def call(self, text: str, length: int = 10, **inputs: str) -> str:
        """Submit a call and return the id of its output. `inputs` are variable ids."""
        parameters: list[dict[str, Any]] = [
            {"name": name, "var_id": var_id} for name, var_id in inputs.items()
        ]
        sampling = {"max_gen_length": length}
        parameters.append({"name": "out", "is_output": True, "sampling_config": sampling})
        places = "".join(f"{{{{{name}}}}} " for name in inputs)
        request = {"template": f"{text} {places}{{{{out}}}}", "parameters": parameters}
        request["cache_prefix"] = False
        response = await self.client.semantic_call(
            SemanticCallRequest.model_validate(self.scope | request)
        )
        return response.param_info[-1].var_id

    async def read(self, var_id: str, **options: Any) -> str:
        return await self.client.get_var(**self.scope, var_id=var_id, **options)


def simulate(
    body: Callable[[SimCluster, Program], Awaitable[Any]],
    num_engines: int = 1,
    rtt_s: float = 0.0,
    **options: Any,
) -> Any:
    async def main() -> Any:
        async with SimCluster(num_engines, engine=ENGINE, engine_rtt_s=0.0, **options) as cluster:
            program = await Program(cluster.client(fixed(rtt_s))).begin()
            result = await body(cluster, program)
            await asyncio.sleep(1)
            cluster.check_integrity()
            return result

    return run_virtual(main())


@pytest.mark.parametrize(
    ("timeouts", "fails_after"),
    [
        ({"engine_heartbeat_timeout": 5}, 5),
        ({"engine_heartbeat_timeout": 5, "no_engine_timeout": 40}, 40),
        ({"engine_heartbeat_timeout": 40, "no_engine_timeout": 5}, 5),
    ],
)
def test_a_read_without_an_engine_is_rejected_after_its_own_timeout(
    timeouts: dict[str, float], fails_after: float
):
    async def body(cluster: SimCluster, program: Program) -> float:
        with pytest.raises(NoEngine):
            await program.read(await program.call("x"))
        return cluster.clock.now()

    core = CoreConfig.model_validate(timeouts)
    assert simulate(body, 0, core=core) == pytest.approx(fails_after, abs=0.1)


def test_the_time_of_a_call_is_that_of_its_steps():
    async def body(cluster: SimCluster, program: Program) -> float:
        await program.read(await program.call("x" * 99, length=10))
        return cluster.clock.now()

    # 99 characters and a space are 100 prompt tokens. Then 10 steps: the first is the fill's step.
    assert simulate(body) == pytest.approx(0.1 + 10 * 0.01)
    assert simulate(body, rtt_s=0.2) == pytest.approx(0.1 + 10 * 0.01 + 3 * 0.2)


def test_a_chain_needs_one_round_trip_for_its_value():
    async def body(cluster: SimCluster, program: Program) -> float:
        var_id = await program.call("start", length=5)
        for _ in range(4):
            var_id = await program.call("go on", length=5, before=var_id)
        began = cluster.clock.now()
        await program.read(var_id, criteria=PerformanceCriteria.LATENCY)
        return cluster.clock.now() - began

    alone = simulate(body)
    assert simulate(body, rtt_s=0.2) == pytest.approx(alone + 0.2)


def test_the_same_seed_gives_the_same_run():
    async def body(cluster: SimCluster, program: Program) -> list[tuple[float, str]]:
        far = await Program(cluster.client(wan(seed=3))).begin()
        seen: list[tuple[float, str]] = []

        async def one(owner: Program, n: int) -> None:
            text = await owner.read(await owner.call(f"Number {n}", length=5 + n))
            seen.append((cluster.clock.now(), text))

        await asyncio.gather(*(one(owner, n) for n in range(12) for owner in (program, far)))
        return seen

    first = simulate(body, num_engines=3)
    assert len(first) == 24
    assert simulate(body, num_engines=3) == first


def test_latency_does_not_slow_down_streams():
    async def body(cluster: SimCluster, program: Program) -> tuple[str, list[float]]:
        var_id = await program.call("tell", length=20)
        times = []
        text = ""
        async for delta in program.client.stream_var(**program.scope, var_id=var_id):
            text += delta
            times.append(cluster.clock.now())
        assert text == await program.read(var_id)
        return text, times

    near_text, _ = simulate(body)
    text, times = simulate(body, rtt_s=1.0)
    assert text == near_text
    assert len(times) > 15
    assert max(b - a for a, b in pairwise(times)) < 0.03


def test_a_killed_engine_costs_work_but_no_values():
    async def body(cluster: SimCluster, program: Program) -> tuple[list[str], int]:
        var_ids = [await program.call(f"part {n}", length=50) for n in range(6)]
        reads = [asyncio.ensure_future(program.read(var_id)) for var_id in var_ids]
        await asyncio.sleep(0.2)
        if kills:
            await cluster.engines["engine0"].kill()
        texts = await asyncio.gather(*reads)
        info = await program.client.session_info(**program.scope)
        return texts, max(call.attempts for call in info.calls)

    kills = False
    texts, attempts = simulate(body, num_engines=2)
    assert attempts == 1
    kills = True
    assert simulate(body, num_engines=2) == (texts, 2)


def test_a_slow_engine_is_slow_and_a_new_one_helps():
    async def body(cluster: SimCluster, program: Program) -> float:
        cluster.engines["engine0"].slow_down(10.0)
        began = cluster.clock.now()
        await program.read(await program.call("slowly", length=10))
        slow_s = cluster.clock.now() - began
        await cluster.engines["engine0"].kill()
        fresh = await cluster.add_engine(tasks_capacity=8)
        began = cluster.clock.now()
        await program.read(await program.call("quick!", length=10))
        assert slow_s == pytest.approx(10 * (cluster.clock.now() - began))
        return fresh.service.engine_info().tasks_capacity

    assert simulate(body) == 8


def test_an_engine_without_heartbeats_is_removed_and_rejoins():
    core = CoreConfig(engine_heartbeat_timeout=5.0)

    async def body(cluster: SimCluster, program: Program) -> int:
        engine = cluster.engines["engine0"]
        first_id = engine.engine_id
        await asyncio.sleep(20)
        assert engine.engine_id == first_id
        engine.is_alive = False  # The engine stops sending.
        await asyncio.sleep(6)
        assert cluster.core.models().data == []
        engine.is_alive = True
        await asyncio.sleep(2)
        await program.read(await program.call("back again"))
        return engine.engine_id - first_id

    assert simulate(body, core=core) == 1


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize("is_silent", [True, False])
def test_a_hung_engine_costs_its_reads_a_heartbeat_timeout_and_no_text(
    is_silent: bool, leaps: bool
) -> None:
    """The process hangs, or only its GPU. With a hung GPU it continues to send heartbeats."""
    timeout_s, alone_s, length = 5.0, 10.0, 1000

    async def body(cluster: SimCluster, program: Program) -> list[str]:
        var_ids = [await program.call(f"story {i}", length=length) for i in range(6)]
        reads = [asyncio.create_task(program.read(var_id)) for var_id in var_ids]
        # Longer than the timeout, because long work must not count as a hang.
        await asyncio.sleep(7)
        assert not any(read.done() for read in reads)
        victim = cluster.engines["engine0"]
        victim.slow_down(1e9)
        victim.is_alive = not is_silent
        texts = await asyncio.gather(*reads)
        assert cluster.clock.now() < 7 + timeout_s * 4 / 3 + 2.5 * alone_s
        info = await program.client.session_info(**program.scope)
        assert {call.engine for call in info.calls} == {"engine1"}
        victim.is_alive = False
        return texts

    core = CoreConfig(engine_heartbeat_timeout=timeout_s)
    texts = simulate(body, num_engines=2, core=core, leaps=leaps)
    assert {len(text) for text in texts} == {length}


def test_a_reset_connection_affects_no_other_call() -> None:
    async def body(cluster: SimCluster, program: Program) -> float:
        engine = cluster.engines["engine0"]
        generate, num_resets = engine.client.generate, 0

        async def hiccup(request: GenerateRequest) -> GenerateResponse:
            nonlocal num_resets
            if request.sampling_config.max_gen_length == 5:
                num_resets += 1
                raise Unavailable("one connection was reset")
            return await generate(request)

        engine.client.generate = hiccup
        bystanders = [await program.call(f"story {i}", length=1000) for i in range(8)]
        reads = [asyncio.create_task(program.read(var_id)) for var_id in bystanders]
        for _ in range(2):
            await asyncio.sleep(2)
            with pytest.raises(EngineFailed):
                await program.read(await program.call("unlucky", length=5))
        await asyncio.gather(*reads)
        assert num_resets == 6
        info = await program.client.session_info(**program.scope)
        assert {call.attempts for call in info.calls} == {1, 3}
        return cluster.clock.now()

    assert simulate(body, core=CoreConfig(engine_heartbeat_timeout=5.0)) < 12


def test_without_engines_a_read_ends_with_an_error_or_waits_for_one():
    async def body(cluster: SimCluster, program: Program) -> str:
        with pytest.raises(NotFound):
            await program.read("no such variable")
        var_id = await program.call("wait")
        read = asyncio.ensure_future(program.read(var_id))
        await asyncio.sleep(100)
        await cluster.add_engine()
        return await read

    assert len(simulate(body, num_engines=0)) == 10


def test_native_functions_really_run_and_take_virtual_time():
    async def body(cluster: SimCluster, program: Program) -> tuple[str, float]:
        source = await program.call("some text", length=8)
        request = {
            "func_name": "shout",
            "func_source": "def shout(text, out):\n    out.set(text.upper())",
            "parameters": [{"name": "text", "var_id": source}, {"name": "out", "is_output": True}],
        }
        response = await program.client.native_call(
            NativeCallRequest.model_validate(program.scope | request)
        )
        text = await program.read(source)
        began = cluster.clock.now()
        assert await program.read(response.param_info[-1].var_id) == text.upper()
        return cluster.clock.now() - began

    assert simulate(body) == pytest.approx(NATIVE_S)


def test_errors_have_latency_and_a_cancelled_read_ends_at_once():
    async def body(cluster: SimCluster, program: Program) -> None:
        began = cluster.clock.now()
        with pytest.raises(NotFound):
            await program.read("nothing")
        assert cluster.clock.now() - began == pytest.approx(0.2)
        var_id = await program.call("long", length=500)
        read = asyncio.ensure_future(program.read(var_id))
        await asyncio.sleep(0.5)
        assert cluster.core.readiness(sees_engines=True).engines[0].num_running == 1
        read.cancel()
        began = cluster.clock.now()
        await asyncio.gather(read, return_exceptions=True)
        assert cluster.clock.now() == began
        await asyncio.sleep(0)
        assert cluster.core.readiness(sees_engines=True).engines[0].num_running == 0

    simulate(body, rtt_s=0.2)
