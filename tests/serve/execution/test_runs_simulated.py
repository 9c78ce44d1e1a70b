"""Runs on simulated engines in virtual time: effects of one call on others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, run_virtual

DOCUMENT = "d" * 3000


class User:
    """A program with one session that asks about one document."""

    def __init__(self, client: ServeClient, scope: dict[str, object]) -> None:
        self.client = client
        self.scope = scope

    @classmethod
    async def of(cls, cluster: SimCluster, api_key: str | None = None) -> "User":
        client = cluster.client()
        return cls(client, (await client.create_session(api_key)).model_dump())

    async def ask(self, question: str, length: int) -> str:
        sampling = {"max_gen_length": length, "ignore_tokenizer_eos": True}
        request = self.scope | {
            "template": "Read {{document}} and {{question}}: {{out}}",
            "parameters": [
                {"name": "document", "value": DOCUMENT},
                {"name": "question", "value": question},
                {"name": "out", "is_output": True, "sampling_config": sampling},
            ],
        }
        response = await self.client.semantic_call(SemanticCallRequest.model_validate(request))
        return response.param_info[-1].var_id

    def reading(self, var_id: str) -> "asyncio.Task[str]":
        return asyncio.create_task(self.client.get_var(**self.scope, var_id=var_id))

    async def finished(self) -> list[tuple[int, float | None]]:
        """The number of attempts and the end time of each call."""
        info = await self.client.session_info(**self.scope)
        return [(call.attempts, call.finished_s) for call in info.calls]


def ends(*, cancelled: bool) -> list[tuple[int, float | None]]:
    """Six calls fork the context of a running call, which is then cancelled or not."""

    async def main() -> list[tuple[int, float | None]]:
        async with SimCluster(1) as cluster:
            first, others = await User.of(cluster), await User.of(cluster)
            shared = first.reading(await first.ask("0", 2000))
            await asyncio.sleep(0.05)
            readings = [others.reading(await others.ask(str(i), 2000)) for i in range(1, 7)]
            await asyncio.sleep(5)
            cluster.check_integrity()
            if cancelled:
                shared.cancel()
            await asyncio.gather(*readings)
            await asyncio.gather(shared, return_exceptions=True)
            await asyncio.sleep(1)
            cluster.check_integrity()
            return await others.finished()

    return run_virtual(main())


def test_cancelling_a_call_does_not_affect_forks_of_its_context():
    alone, disturbed = ends(cancelled=False), ends(cancelled=True)
    assert [attempts for attempts, _ in disturbed] == [1] * 6
    for (_, before), (_, after) in zip(alone, disturbed, strict=True):
        assert before is not None
        assert after is not None
        assert after <= before


async def read_in_turns(cluster: SimCluster) -> tuple[float, int]:
    """Race reads of six answers until all have finished. Returns the seconds, and the number of
    generated tokens."""
    user = await User.of(cluster)
    left = [await user.ask(str(i), 100 * i) for i in range(1, 7)]
    began = cluster.clock.now()
    while left:
        first, *_ = await user.client.first_vars(**user.scope, var_ids=left, k=1)
        left.remove(first.var_id)
    (engine,) = cluster.engines.values()
    return cluster.clock.now() - began, engine.service.runtime_info().num_steps


async def read_at_once(cluster: SimCluster) -> tuple[float, int]:
    user = await User.of(cluster)
    ids = [await user.ask(str(i), 100 * i) for i in range(1, 7)]
    began = cluster.clock.now()
    await asyncio.gather(*[user.reading(var_id) for var_id in ids])
    (engine,) = cluster.engines.values()
    return cluster.clock.now() - began, engine.service.runtime_info().num_steps


def test_a_race_candidate_that_lost_continues_when_it_is_read_again():
    async def simulate(read: Callable[[SimCluster], Awaitable[tuple[float, int]]]) -> Any:
        async with SimCluster(1) as cluster:
            return await read(cluster)

    in_turns_s, steps = run_virtual(simulate(read_in_turns))
    at_once_s, fewest = run_virtual(simulate(read_at_once))
    assert steps < fewest + 6 * 10
    assert in_turns_s < 1.1 * at_once_s
