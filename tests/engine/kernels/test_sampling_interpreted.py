"""The sampling kernels in Triton's interpreter choose the same tokens as the CPU's sampler."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from parrot.engine.kernels import sampling_kernels
from parrot.engine.kernels.sampling import best_tokens, draw_tokens, mask_logits
from parrot.engine.runner.sampling import sample
from parrot.protocol.sampling import ResolvedSampling
from tests.support.draws import (
    SETTINGS,
    adjusted,
    adjusted_exactly,
    adjustments_for,
    penalized,
    random_mask,
    settings_of,
    specs_of,
    without_newest,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or "Interpreted" not in type(sampling_kernels.best_of_rows_kernel).__name__,
    reason="the kernels were imported for a device; tests/gpu runs these cases",
)


def normal(rows: int, vocab_size: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + vocab_size)
    return torch.randn(rows, vocab_size, generator=generator) * scale


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_the_largest_logit(vocab_size: int) -> None:
    logits = normal(7, vocab_size + 3)[:, :vocab_size]
    assert best_tokens(logits).tolist() == logits.argmax(dim=-1).tolist()
    assert best_tokens(torch.zeros(2, vocab_size)).tolist() == [0, 0]


class SequentialShards:
    """`TokenShard`s of ranks that run one after the other. The last rank receives the values of all
    ranks."""

    def __init__(self, width: int, vocab_size: int) -> None:
        self._width, self._vocab_size = width, vocab_size
        self.first = self.count = 0
        self._sent: list[torch.Tensor] = []

    def select(self, rank: int) -> None:
        self.first = rank * self._width
        self.count = min(self._width, self._vocab_size - self.first)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._sent.append(x)
        return torch.cat(self._sent, dim=1)


def test_the_largest_logit_of_several_ranks() -> None:
    """Values after a rank's last token are ignored, and ties go to the first token."""
    logits = normal(6, 9001).round()
    logits[2, 8999], logits[3, 17] = float("nan"), float("inf")
    want = best_tokens(logits).tolist()
    assert want[2] == want[3] == -1
    shards = SequentialShards(5000, 9001)
    parts = (logits[:, :5000], torch.nn.functional.pad(logits[:, 5000:], (0, 999), value=99.0))
    for rank, part in enumerate(parts):
        shards.select(rank)
        found = best_tokens(part, shards)
    assert found.tolist() == want


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_get_no_token(bad: float) -> None:
    logits = normal(4, 5000)
    logits[1, 17], logits[2, 4999] = bad, bad
    tokens = best_tokens(logits)
    want = logits.argmax(dim=-1).tolist()
    assert tokens.tolist() == [want[0], -1, -1, want[3]]
    settings = settings_of(specs_of([ResolvedSampling(top_p=0.9)] * 4))
    draw_tokens(logits, tokens, settings, limited=True)
    assert (tokens >= 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_drawn_tokens_equal_those_of_the_cpu(fields: dict[str, Any]) -> None:
    logits = normal(4, 4100)
    specs = specs_of([ResolvedSampling.model_validate(fields)] * 4)
    tokens = best_tokens(logits)
    draw_tokens(logits, tokens, settings_of(specs), limited=True)
    want = sample(logits.clone(), specs).tokens
    assert tokens.tolist() == [want[s.job_id] for s in specs]
    assert fields.get("temperature") == 0 or len(set(tokens.tolist())) > 1


@pytest.mark.parametrize("vocab_size", [40, 4096, 9001])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_only_tokens_that_the_mask_allows_are_chosen(
    vocab_size: int, fields: dict[str, Any]
) -> None:
    logits = normal(5, vocab_size)
    logits[2, 3] = float("nan")
    words, allowed = random_mask(3, vocab_size)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    hidden = logits.clone()
    hidden[rows.long()] = hidden[rows.long()].masked_fill(~allowed, -1e30)
    hidden[2] = float("nan")
    mask_logits(logits, rows, words)
    tokens = best_tokens(logits)
    specs = specs_of([ResolvedSampling.model_validate(fields)] * 5)
    draw_tokens(logits, tokens, settings_of(specs), limited=True)
    want = sample(hidden, specs)
    assert tokens.tolist() == [want.tokens.get(spec.job_id, -1) for spec in specs]
    for row, bits in zip(rows.tolist(), allowed, strict=True):
        assert tokens[row] == -1 or bits[tokens[row]]


def test_equal_logits_are_kept_together() -> None:
    logits = normal(5, 600).round()
    specs = specs_of([ResolvedSampling(top_k=20, top_p=0.95)] * 5)
    tokens = best_tokens(logits)
    draw_tokens(logits, tokens, settings_of(specs), limited=True)
    assert tokens.tolist() == [*sample(logits.clone(), specs).tokens.values()]


def test_rows_of_all_kinds_do_not_influence_each_other() -> None:
    configs = [ResolvedSampling.model_validate(fields) for fields in SETTINGS]
    logits, specs = normal(len(configs), 37), specs_of(configs)
    together = best_tokens(logits)
    draw_tokens(logits, together, settings_of(specs), limited=True)
    assert together.tolist() == [*sample(logits.clone(), specs).tokens.values()]
    for row, spec in enumerate(specs):
        own = logits[row : row + 1]
        alone = best_tokens(own)
        limited = spec.sampling.top_p < 1 or spec.sampling.top_k is not None
        draw_tokens(own, alone, settings_of([spec]), limited=limited)
        assert alone[0] == together[row]


def test_top_k_of_a_nearly_flat_row() -> None:
    logits = torch.linspace(0.0, 1e-3, 5000).repeat(4, 1)
    specs = specs_of([ResolvedSampling(top_k=3)] * 4)
    tokens = best_tokens(logits)
    draw_tokens(logits, tokens, settings_of(specs), limited=True)
    assert set(tokens.tolist()) <= {4997, 4998, 4999}
    assert np.unique(tokens.numpy()).size > 1


@pytest.mark.parametrize("length", [2, 30, 3000])
def test_penalties_and_biases(length: int) -> None:
    """The reference is float64. A pending token counts like a known token."""
    specs = penalized(4100, length)
    logits = normal(len(specs), 4100)
    newest = [spec.context_ids[-1] for spec in specs]
    got = adjusted(logits, adjustments_for(specs, pending=False), newest)
    torch.testing.assert_close(got.double(), adjusted_exactly(logits, specs), rtol=1e-5, atol=1e-5)
    ahead = adjustments_for(without_newest(specs), pending=True)
    assert torch.equal(adjusted(logits, ahead, newest), got)


def test_penalties_change_no_other_rows_and_keep_values_that_are_not_finite() -> None:
    specs = penalized(500, 60)[:7]
    logits = normal(9, 500)
    logits[1, 17], logits[3, 499], logits[4, 3] = float("nan"), float("inf"), float("-inf")
    got = adjusted(logits, adjustments_for(specs, pending=False), [0])
    assert torch.equal(got[7:], logits[7:])
    assert (best_tokens(got) < 0).tolist() == [i in (1, 3, 4) for i in range(9)]
    sound = [0, 2, 5, 6]
    want = adjusted_exactly(logits[sound], [specs[i] for i in sound])
    torch.testing.assert_close(got[sound].double(), want, rtol=1e-5, atol=1e-5)


def test_penalized_tokens_equal_those_of_the_cpu() -> None:
    specs = penalized(259, 40)
    logits = normal(len(specs), 259)
    want = sample(logits.clone(), specs).tokens
    got = adjusted(logits, adjustments_for(specs, pending=False), [0])
    tokens = best_tokens(got)
    draw_tokens(got, tokens, settings_of(specs), limited=False)
    assert tokens.tolist() == [want[s.job_id] for s in specs]
