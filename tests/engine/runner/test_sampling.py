"""The effect of each sampling field, and that rows never influence each other."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.steps import SampleSpec
from parrot.engine.runner.sampling import sample
from parrot.protocol.errors import ModelNumerics
from parrot.protocol.sampling import ResolvedSampling

GREEDY: dict[str, Any] = {"temperature": 0}


def spec(job_id: int = 0, **fields: Any) -> SampleSpec:
    extra = {
        name: fields.pop(name)
        for name in ("seed", "position", "output_ids", "context_ids")
        if name in fields
    }
    return SampleSpec(job_id, ResolvedSampling(**fields), **({"seed": 0, "position": 0} | extra))


def draw(logits: list[float], count: int = 400, **fields: Any) -> Counter[int]:
    rows = torch.tensor([logits]).repeat(count, 1)
    specs = [spec(i, position=i, **fields) for i in range(count)]
    result = sample(rows, specs)
    assert not result.errors
    return Counter(result.tokens.values())


def one(logits: list[float], **fields: Any) -> int:
    return sample(torch.tensor([logits]), [spec(**fields)]).tokens[0]


def test_greedy_takes_the_best() -> None:
    assert one([0.1, 2.0, 1.9], **GREEDY) == 1
    assert one([0.1, 2.0, 1.9], temperature=5.0, top_k=1) == 1


def test_temperature_shapes_the_distribution() -> None:
    probs = np.array([0.6, 0.3, 0.1])
    counts = draw(np.log(probs).tolist(), 4000)
    assert np.allclose([counts[i] / 4000 for i in range(3)], probs, atol=0.03)
    flat = draw(np.log(probs).tolist(), 4000, temperature=50.0)
    assert min(flat.values()) > 1200
    assert draw(np.log(probs).tolist(), 400, temperature=0.01) == {0: 400}


def test_top_k_keeps_the_k_best() -> None:
    assert set(draw([1.0, 0.9, 0.8, 0.7], top_k=2)) == {0, 1}
    assert set(draw([1.0, 0.9], top_k=50)) == {0, 1}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {2}), (0.61, {2, 0}), (0.95, {2, 0, 1})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draw(np.log([0.3, 0.1, 0.6]).tolist(), top_p=top_p)) == kept


def test_top_p_applies_to_the_tokens_that_top_k_keeps() -> None:
    """The probabilities are 0.4, 0.3, 0.2 and 0.1. Of the two best tokens, the first has 57%."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(draw(logits, top_k=2, top_p=0.55)) == {0}
    assert set(draw(logits, top_k=2, top_p=0.6)) == {0, 1}


def test_a_presence_penalty_counts_once_and_a_frequency_penalty_each_time() -> None:
    assert one([1.5, 3.0], **GREEDY, presence_penalty=1.0, output_ids=[1, 1, 1]) == 1
    assert one([1.5, 3.0], **GREEDY, frequency_penalty=1.0, output_ids=[1, 1, 1]) == 0


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert set(draw(logits, min_p=0.5)) == {0, 1}
    assert set(draw(logits, min_p=0.2, top_p=0.99)) == {0, 1, 2}
    assert set(draw(logits, min_p=1.0)) == {0}


def test_top_p_over_a_flat_large_vocabulary_is_exact() -> None:
    """The nucleus has more tokens than the sampler's first candidates."""
    rows = torch.zeros(300, 5000)
    rows[:, :2500] = 1e-3
    result = sample(rows, [spec(i, position=i, top_p=0.5) for i in range(300)])
    tokens = set(result.tokens.values())
    assert max(tokens) < 2502
    assert len([t for t in tokens if t > 1024]) > 50


def test_openai_penalties_count_the_output_only() -> None:
    logits = [2.0, 1.5, 1.0]
    assert one(logits, **GREEDY, output_ids=[0], presence_penalty=0.6) == 1
    assert one(logits, **GREEDY, output_ids=[0], context_ids=[1], presence_penalty=0.4) == 0
    assert one(logits, **GREEDY, output_ids=[0, 0, 0], frequency_penalty=0.2) == 1
    assert one(logits, **GREEDY, output_ids=[0, 0], frequency_penalty=0.2) == 0
    assert one(logits, **GREEDY, output_ids=[1] * 9, presence_penalty=-0.6) == 1


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    context = [3, 3, 9, 20, 41]
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([context]), logits.clone())
    sample(logits, [spec(**GREEDY, repetition_penalty=1.7, context_ids=context)])
    torch.testing.assert_close(logits, want)
    for off in (0.0, 1.0):
        before = logits.clone()
        sample(logits, [spec(**GREEDY, repetition_penalty=off, context_ids=context)])
        assert torch.equal(logits, before)


def test_logit_bias() -> None:
    logits = [3.0, 2.0, 1.0]
    assert one(logits, **GREEDY, logit_bias={2: 5.0}) == 2
    assert one(logits, **GREEDY, logit_bias={0: -100.0}) == 1
    assert one(logits, **GREEDY, logit_bias={99: 5.0}) == 0
    assert set(draw(logits, 100, logit_bias={1: -100.0})) == {0, 2}


@pytest.mark.parametrize("fields", [GREEDY, {}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_only_their_own_job(
    fields: dict[str, Any], bad: float
) -> None:
    rows = torch.tensor([[1.0, 2.0, 9.0], [1.0, bad, 3.0], [9.0, 2.0, 1.0]])
    result = sample(rows, [spec(10, **GREEDY), spec(11, **fields), spec(12, **GREEDY)])
    assert result.tokens == {10: 2, 12: 0}
    assert isinstance(result.errors[11], ModelNumerics)


ROW_SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1, "top_k": 20},
    {"repetition_penalty": 1.3, "context_ids": [1, 2, 3]},
    {"presence_penalty": 1.0, "output_ids": [4, 5]},
    {**GREEDY, "logit_bias": {7: 3.0}},
]


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(ROW_SETTINGS), st.integers(0, 2**63 - 1), st.integers(0, 4000)),
        min_size=1,
        max_size=8,
    ),
    salt=st.integers(0, 1000),
)
def test_a_row_is_the_same_in_every_batch(
    rows: list[tuple[dict[str, Any], int, int]], salt: int
) -> None:
    logits = torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(salt)) * 3
    specs = [
        spec(i, seed=seed, position=position, **f) for i, (f, seed, position) in enumerate(rows)
    ]
    together = sample(logits.clone(), specs).tokens
    alone = {i: sample(logits[i : i + 1].clone(), [specs[i]]).tokens[i] for i in range(len(rows))}
    reverse = sample(logits.flip(0).clone(), specs[::-1]).tokens
    assert together == alone == reverse


def test_equal_logits_are_kept_together() -> None:
    """The limit is the last of the k best tokens, or the token at which the sum reaches p."""
    assert set(draw([2.0, 1.0, 1.0, 0.0], top_k=2)) == {0, 1, 2}
    assert set(draw([1.0] * 8, top_k=1 + 1)) == set(range(8))
    assert set(draw([1.0, 1.0, 0.0], top_p=0.3)) == {0, 1}


def test_more_than_the_first_candidates_of_top_k() -> None:
    rows = torch.arange(3000.0).mul(1e-4).repeat(300, 1)
    tokens = set(
        sample(rows, [spec(i, position=i, top_k=2000) for i in range(300)]).tokens.values()
    )
    assert 1000 <= min(tokens) < 1100


def test_the_smallest_temperature_is_almost_greedy() -> None:
    assert draw([1.0, 1.1], 50, temperature=1e-9) == {1: 50}
