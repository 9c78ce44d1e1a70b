"""The noise has Gumbel's distribution, so the chosen tokens have the probabilities of the
softmax."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from parrot.engine.core.steps import SampleSpec
from parrot.engine.kernels.noise import gumbel_noise, noise_keys
from parrot.engine.runner.sampling import sample
from parrot.protocol.sampling import ResolvedSampling


def noise(seed: int, position: int, num_tokens: int) -> torch.Tensor:
    return gumbel_noise(torch.from_numpy(noise_keys([seed], [position])), num_tokens)[0]


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The number of standard deviations by which the statistic exceeds its expectation."""
    keep = probs * counts.sum() >= 5
    expected = probs[keep] * counts.sum()
    statistic = float(((counts[keep] - expected) ** 2 / expected).sum())
    freedom = keep.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_noise_has_gumbels_distribution() -> None:
    values = noise(1, 2, 200_000).double().sort().values
    assert bool(values.isfinite().all())
    ideal = torch.arange(0.5, 200_000) / 200_000
    distance = ((-(-values).exp()).exp() - ideal).abs().max()
    assert distance < 1.6 / math.sqrt(200_000)  # The Kolmogorov-Smirnov test at 1%.


def test_neighbouring_seeds_positions_and_tokens_are_independent() -> None:
    rows = [noise(5, 7, 50_000), noise(6, 7, 50_000), noise(5, 8, 50_000), noise(5, 9, 50_000)]
    table = torch.stack([*rows, noise(5, 7, 50_001)[1:]]).double().numpy()
    others = np.corrcoef(table) - np.eye(5)
    assert np.abs(others).max() < 4.5 / math.sqrt(50_000)
    assert torch.equal(noise(5, 7, 100), noise(5, 7, 50_000)[:100])


def test_one_token_over_many_positions_and_seeds() -> None:
    for keys in (noise_keys([3] * 20_000, range(20_000)), noise_keys(range(20_000), [3] * 20_000)):
        values = gumbel_noise(torch.from_numpy(keys), 2).double().numpy()
        uniform = np.exp(-np.exp(-values))
        histogram = np.histogram(uniform[:, 0], bins=50, range=(0, 1))[0]
        assert chi_square(histogram, np.full(50, 1 / 50)) < 4
        assert abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 4 / math.sqrt(20_000)
        assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 4 / math.sqrt(20_000)


def test_large_seeds_and_positions() -> None:
    keys = noise_keys([2**63 - 1, 2**63 - 2, 0], [2**31 - 1] * 3)
    assert keys.dtype == np.int32
    assert len({tuple(key) for key in keys.tolist()}) == 3


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def exact_probabilities(logits: np.ndarray, config: ResolvedSampling) -> np.ndarray:
    """The probabilities by definition, in float64, for distinct logits."""
    weights = np.exp((logits - logits.max()) / config.temperature)
    order = np.argsort(-weights)
    kept = order[: config.top_k or len(order)]
    share = np.cumsum(weights[kept]) / weights[kept].sum()
    before = np.array([0.0, *share[:-1]])
    kept = kept[before < config.top_p] if config.top_p < 1 else kept
    kept = kept[weights[kept] >= (config.min_p or 0.0) * weights.max()]
    probs = np.zeros(len(logits))
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_tokens_have_their_exact_probabilities(fields: dict[str, Any]) -> None:
    config = ResolvedSampling(**fields)
    logits = np.random.default_rng(4).normal(size=60) * 2
    probs = exact_probabilities(logits, config)
    draws = 20_000
    rows = torch.from_numpy(logits).float().repeat(draws, 1)
    tokens = sample(rows, [SampleSpec(i, config, 11, i) for i in range(draws)]).tokens
    counts = np.bincount([*tokens.values()], minlength=len(logits))
    assert counts[probs == 0].sum() == 0
    assert chi_square(counts, probs) < 4


def test_a_sequence_of_positions_differs_from_a_sequence_of_seeds() -> None:
    config = ResolvedSampling()
    rows = torch.zeros(64, 1000)
    by_position = sample(rows.clone(), [SampleSpec(i, config, 0, i) for i in range(64)]).tokens
    by_seed = sample(rows.clone(), [SampleSpec(i, config, i, 0) for i in range(64)]).tokens
    both = [by_position[i] == by_seed[i] for i in range(64)]
    assert both[0]
    assert sum(both) < 4
    assert sum(a == b for a, b in pairwise(by_position.values())) < 4
