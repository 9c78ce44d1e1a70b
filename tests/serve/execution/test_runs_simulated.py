"""Runs on simulated engines in virtual time: what one call does to others."""

import asyncio

from parrot.protocol.public import SemanticCallRequest
from parrot.simulation import SimClient, SimCluster, run_virtual

DOCUMENT = "d" * 3000


class User:
    """A program with one session that asks about one document."""

    def __init__(self, client: SimClient, scope: dict[str, object]) -> None:
        self.client = client
        self.scope = scope

    @classmethod
    async def of(cls, cluster: SimCluster) -> "User":
        client = cluster.client()
        return cls(client, (await client.create_session()).model_dump())

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
        """Each call's attempts, and when it ended."""
        info = await self.client.session_info(**self.scope)
        return [(call.attempts, call.finished_s) for call in info.calls]


def ends(*, cancelled: bool) -> list[tuple[int, float | None]]:
    """Six calls fork the context of a call that runs, which then is given up or is not."""

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


def test_giving_up_a_call_leaves_those_alone_that_forked_its_context():
    alone, disturbed = ends(cancelled=False), ends(cancelled=True)
    assert [attempts for attempts, _ in disturbed] == [1] * 6
    for (_, before), (_, after) in zip(alone, disturbed, strict=True):
        assert before is not None
        assert after is not None
        assert after <= before
