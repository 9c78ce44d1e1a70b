"""Placement by the real ServeCore on simulated engines."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.serve.baselines import cluster_with
from parrot.engine.config import SimConfig, SimInstance
from parrot.protocol.errors import PromptTooLong
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import GlobalSchedulerConfig
from parrot.simulation import PATIENT, SimCluster, run_virtual

NUM_ENGINES, SIBLINGS, PREFIX, OUTPUT = 3, 9, 3000, 24
ENGINE = SimConfig.model_validate(
    {"scheduler": {"max_num_batched_tokens": 2048}, "instance": {"sequence_s": 4e-4}}
)
Scope = dict[str, Any]


async def call(
    client: ServeClient, scope: Scope, model: str | None, number: int, prefix: str
) -> str:
    """Submit a sibling: the shared prefix and its own question."""
    sampling = {"max_gen_length": OUTPUT, "ignore_tokenizer_eos": True, "temperature": 1.0}
    request = SemanticCallRequest.model_validate(
        scope
        | {
            "template": "{{prefix}}{{question}}{{out}}",
            "func_name": "sibling",
            "models": [] if model is None else [model],
            "parameters": [
                {"name": "prefix", "value": prefix},
                {"name": "question", "value": f"question {number:04}" * 3},
                {"name": "out", "is_output": True, "sampling_config": sampling},
            ],
        }
    )
    return (await client.semantic_call(request)).param_info[-1].var_id


async def read_all(client: ServeClient, scope: Scope, outputs: list[str]) -> None:
    reads = [
        client.get_var(**scope, var_id=out, criteria=PerformanceCriteria.LATENCY) for out in outputs
    ]
    await asyncio.gather(*reads)


def makespan(split: tuple[int, ...] | None, placement: str = "predicted") -> float:
    """Of cold siblings; `split`: how many each engine is made to run."""
    config = GlobalSchedulerConfig.model_validate({"placement": placement})
    core = PATIENT.model_copy(update={"global_scheduler": config})

    async def main() -> float:
        async with SimCluster(0, engine=ENGINE, core=core) as cluster:
            for i in range(NUM_ENGINES):
                await cluster.add_engine(**({} if split is None else {"model": f"m{i}"}))
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            models = (
                [None] * SIBLINGS
                if split is None
                else [f"m{i}" for i, size in enumerate(split) for _ in range(size)]
            )
            outputs = [
                await call(client, scope, model, i, "x" * PREFIX) for i, model in enumerate(models)
            ]
            began = cluster.clock.now()
            await read_all(client, scope, outputs)
            cluster.check_integrity()
            return cluster.clock.now() - began

    return run_virtual(main())


def splits(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        if not total:
            yield ()
        return
    for size in range(min(total, most), -1, -1):
        yield from ((size, *rest) for rest in splits(total - size, parts - 1, size))


def test_cold_siblings_are_split_nearly_optimally() -> None:
    spans = {split: makespan(split) for split in splits(SIBLINGS, NUM_ENGINES, SIBLINGS)}
    best = min(spans.values())
    assert max(spans.values()) > 1.2 * best, "the split makes no difference here"
    assert makespan(None) <= 1.15 * best


def test_a_slow_engine_gets_less_from_the_first_call_on() -> None:
    async def main() -> Counter[str]:
        async with SimCluster(0, engine=ENGINE) as cluster:
            costs = ENGINE.instance.model_dump()
            slow = {k: 4 * v if k.endswith("_s") else v for k, v in costs.items()}
            await cluster.add_engine(instance=SimInstance(**slow))
            for _ in range(2):
                await cluster.add_engine()
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            outputs = [await call(client, scope, None, i, f"{i}" * 400) for i in range(18)]
            await read_all(client, scope, outputs)
            info = await client.session_info(**scope)
            return Counter(str(call.engine) for call in info.calls)

    counts = run_virtual(main())
    assert counts["engine0"] < counts["engine1"] / 2


def test_an_engine_that_becomes_slow_is_known_with_its_next_heartbeat() -> None:
    core = PATIENT.model_copy(update={"engine_heartbeat_timeout": 10.0})

    async def main() -> Counter[str]:
        async with SimCluster(2, engine=ENGINE, core=core) as cluster:
            cluster.engines["engine0"].slow_down(20.0)
            await asyncio.sleep(10)
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            outputs = [await call(client, scope, None, i, f"{i}" * 40) for i in range(4)]
            await read_all(client, scope, outputs)
            info = await client.session_info(**scope)
            return Counter(str(call.engine) for call in info.calls)

    assert run_virtual(main()) == {"engine1": 4}


async def submit(client: ServeClient, scope: Scope, prompt: str, length: int) -> str:
    sampling = {"max_gen_length": length, "ignore_tokenizer_eos": True}
    parameters = [
        {"name": "prompt", "value": prompt},
        {"name": "out", "is_output": True, "sampling_config": sampling},
    ]
    request = scope | {"template": "{{prompt}} {{out}}", "parameters": parameters}
    response = await client.semantic_call(SemanticCallRequest.model_validate(request))
    return response.param_info[-1].var_id


@pytest.mark.parametrize("placement", ["predicted", "round_robin", "prefix_aware"])
def test_calls_run_where_they_fit_and_are_not_cut(placement: str) -> None:
    """The estimate of the prompt's tokens is too low until the first answer corrects it."""

    async def main() -> list[int]:
        async with cluster_with(placement)() as cluster:
            for max_len in (2048, 2048, 2048, 2048, 2048, 2048, 32768, 1024):
                instance = SimConfig().instance.model_copy(update={"max_seq_len": max_len})
                await cluster.add_engine(instance=instance)
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            lengths = [(3000, 20), (1900, 400), (2100, 20), (1000, 1500), (3000, 20), (100, 20)]
            outputs = [
                await submit(client, scope, f"{i}" * prompt, length)
                for i, (prompt, length) in enumerate(lengths)
            ]
            reads = [client.get_var(**scope, var_id=out) for out in outputs]
            texts = await asyncio.gather(*reads)
            cluster.check_integrity()
            return [length - len(text) for (_, length), text in zip(lengths, texts, strict=True)]

    assert run_virtual(main()) == [0] * 6


def test_a_prompt_that_exceeds_all_engines_fails_with_its_cause() -> None:
    async def main() -> None:
        async with SimCluster(0) as cluster:
            for max_len in (512, 1024):
                instance = SimConfig().instance.model_copy(update={"max_seq_len": max_len})
                await cluster.add_engine(instance=instance)
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            with pytest.raises(PromptTooLong, match="the limit is 1023"):
                await client.get_var(**scope, var_id=await submit(client, scope, "x" * 2000, 5))
            text = await client.get_var(**scope, var_id=await submit(client, scope, "x" * 1000, 50))
            assert len(text) == 1024 - 1001  # The text is cut because no engine has more free KV.

    run_virtual(main())


def test_throughput_calls_start_next_to_latency_calls_after_a_wait() -> None:
    """The chats take 60 s each, so no other event occurs before."""
    instance = {"num_kv_cache_blocks": 65536, "max_seq_len": 400000}
    engine = SimConfig.model_validate({"instance": instance})

    async def main() -> float:
        async with SimCluster(1, engine=engine) as cluster:
            client = cluster.client()
            scope = (await client.create_session()).model_dump()
            chats = [await submit(client, scope, f"{i}" * 110_000, 6000) for i in range(5)]
            reading = asyncio.create_task(read_all(client, scope, chats))
            await asyncio.sleep(60)
            summary = await submit(client, scope, "z" * 500, 50)
            began = cluster.clock.now()
            await client.get_var(**scope, var_id=summary, criteria=PerformanceCriteria.THROUGHPUT)
            taken = cluster.clock.now() - began
            assert not reading.done()
            await reading
            return taken

    assert run_virtual(main()) < 5
