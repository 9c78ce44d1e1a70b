"""The sampling kernels on the device choose the tokens of the CPU's sampler."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.sampling import best_tokens, draw_tokens
from parrot.engine.runner.sampling import sample
from parrot.protocol.sampling import ResolvedSampling
from tests.support.draws import (
    SETTINGS,
    adjusted,
    adjusted_exactly,
    adjustments_for,
    penalized,
    settings_of,
    specs_of,
    without_newest,
)

pytestmark = pytest.mark.gpu

ROWS = 64


def normal(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [259, 32000, 151936])
def test_the_largest_logit(vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(ROWS, vocab_size, dtype)
    logits[3, 7] = float("nan")
    logits[4, vocab_size - 1] = float("-inf")
    logits[5, 0] = float("inf")
    tokens = best_tokens(logits.cuda()).cpu()
    assert tokens[[3, 4, 5]].tolist() == [-1, -1, -1]
    others = [i for i in range(ROWS) if i not in (3, 4, 5)]
    assert tokens[others].tolist() == logits[others].float().argmax(dim=-1).tolist()


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(259, torch.float32), (50257, torch.float32), (151936, torch.bfloat16)],
)
def test_drawn_tokens_equal_those_of_the_cpu(
    fields: dict[str, Any], vocab_size: int, dtype: torch.dtype
) -> None:
    """At most one token may differ, because two scores with noise, or a sum of weights and its
    limit, may differ by one rounding."""
    logits = normal(ROWS, vocab_size, dtype)
    specs = specs_of([ResolvedSampling.model_validate(fields)] * ROWS)
    outputs = []
    for _ in range(2):
        on_device = logits.cuda()
        tokens = best_tokens(on_device)
        draw_tokens(on_device, tokens, settings_of(specs, "cuda"), limited=True)
        outputs.append(tokens.tolist())
    assert outputs[0] == outputs[1]
    want = sample(logits.float(), specs).tokens
    differing = sum(want[s.job_id] != t for s, t in zip(specs, outputs[0], strict=True))
    assert differing <= 1


@pytest.mark.parametrize("length", [2, 30, 3000, 20000])
@pytest.mark.parametrize("vocab_size", [259, 151936])
def test_penalties_and_biases(vocab_size: int, length: int) -> None:
    """The reference is float64. A pending token gives the same bits as a known token."""
    specs = penalized(vocab_size, length)
    logits = normal(len(specs), vocab_size, torch.float32)
    newest = [spec.context_ids[-1] for spec in specs]
    known = adjustments_for(specs, pending=False)
    got = adjusted(logits, known, newest, "cuda")
    want = adjusted_exactly(logits, specs)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(adjusted(logits, known, newest, "cuda"), got)
    ahead = adjustments_for(without_newest(specs), pending=True)
    assert torch.equal(adjusted(logits, ahead, newest, "cuda"), got)


def test_penalties_keep_values_that_are_not_finite() -> None:
    specs = penalized(500, 60)[:7]
    logits = normal(9, 500, torch.float32)
    logits[1, 17], logits[3, 499], logits[4, 3] = float("nan"), float("inf"), float("-inf")
    got = adjusted(logits, adjustments_for(specs, pending=False), [0], "cuda")
    assert torch.equal(got[7:], logits[7:])
    assert (best_tokens(got.cuda()) < 0).tolist() == [i in (1, 3, 4) for i in range(9)]
