"""A simulated engine with a host tier, in virtual time. Copies take the configured time, and other
requests do not wait for them."""

import asyncio

from parrot.engine.config import SimConfig
from parrot.engine.metrics import EngineMetrics
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import GenerateRequest, Usage
from parrot.simulation.loop import LoopClock, run_virtual

COSTS = {
    "step_s": 0.0,
    "sequence_s": 0.0,
    "context_token_s": 0.0,
    "prefill_token_s": 1e-3,
    "host_token_s": 1e-5,
    "block_size": 16,
    "num_kv_cache_blocks": 64,
}


def make(**instance: float) -> SimService:
    config = SimConfig.model_validate({"instance": COSTS | instance})
    return SimService(config, LoopClock(), leaps=True)


async def ask(engine: SimService, context_id: int, text: str, length: int = 1) -> Usage:
    tokens = list(text.encode())
    answer = await engine.generate(
        GenerateRequest.model_validate(
            {
                "context_id": context_id,
                "fills": [{"context_id": context_id, "token_ids": tokens}],
                "sampling_config": {"max_gen_length": length},
            }
        )
    )
    await engine.free_contexts([context_id])
    return answer.usage


async def returning_turn(engine: SimService) -> tuple[float, Usage]:
    """A turn after another context has evicted the KV of the previous turn. Returns its seconds and
    usage."""
    await engine.start()
    await ask(engine, 1, "a" * 640)
    await asyncio.sleep(1.0)
    await ask(engine, 2, "b" * 1000)
    await asyncio.sleep(1.0)
    began = asyncio.get_running_loop().time()
    usage = await ask(engine, 3, "a" * 640 + "c" * 10)
    seconds = asyncio.get_running_loop().time() - began
    engine.check_integrity()
    return seconds, usage


def test_kv_is_loaded_in_the_time_of_its_copy():
    async def main():
        engine = make(num_host_kv_blocks=200)
        seconds, usage = await returning_turn(engine)
        info = engine.runtime_info()
        await engine.close()
        assert usage.cached_tokens == 640
        assert usage.host_tokens >= 600
        assert usage.computed_tokens == 10
        assert 10e-3 + 600e-5 <= seconds < 10e-3 + 700e-5
        assert info.host_tier.num_max_blocks == 200
        assert 0 < info.host_tier.num_free_blocks < 120
        assert info.host_tier.returned_bytes == usage.host_tokens * (128 << 10)
        assert abs(info.costs.host_token_s - 1e-5) < 1e-9
        assert info.prompt_tokens.host == usage.host_tokens
        assert info.prompt_tokens.device == 640 - usage.host_tokens
        assert info.prompt_tokens.nowhere == 640 + 1000 + 10
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in EngineMetrics("e", "m").families(info)
            for sample in family.samples
        }
        assert (
            samples["parrot_engine_prompt_tokens_by_source_total", "e", "m", "host"]
            == usage.host_tokens
        )
        copied = samples["parrot_engine_kv_copied_bytes_total", "e", "m", "device"]
        assert copied == info.host_tier.returned_bytes
        assert samples["parrot_engine_host_kv_blocks", "e", "m"] == 200

    run_virtual(main())


def test_without_a_host_tier_kv_is_computed_again():
    async def main():
        engine = make()
        seconds, usage = await returning_turn(engine)
        assert usage.computed_tokens >= 600
        assert usage.host_tokens == 0
        assert seconds >= 0.6
        assert engine.runtime_info().host_tier is None
        await engine.close()

    run_virtual(main())


def test_other_requests_are_served_while_kv_is_loaded():
    async def main():
        engine = make(num_host_kv_blocks=200, host_token_s=1e-4)
        await engine.start()
        await ask(engine, 1, "a" * 640)
        await asyncio.sleep(1.0)
        await ask(engine, 2, "b" * 1000)
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        returning = asyncio.create_task(ask(engine, 3, "a" * 640 + "c" * 10))
        await asyncio.sleep(1e-3)
        await ask(engine, 4, "d" * 20)
        other_s = loop.time() - began
        await returning
        assert other_s < 0.03 < loop.time() - began
        await engine.close()

    run_virtual(main())
