"""Prefix hits of sessions and of common prefixes, with the sizes of Gemma 3 27B on a GPU."""

import random
from array import array

import pytest

from benchmark.engine.bench_windows import core_of, hit_rate, sizes_of
from benchmark.engine.core_load import serve_all

SIZES, WINDOW = sizes_of("gemma-3-27b", 40.0)


@pytest.mark.parametrize("occupancy", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("length", [8192, 20000])
def test_hits_are_nearly_ideal(length: int, occupancy: float) -> None:
    assert hit_rate(SIZES, WINDOW, length, occupancy)["hits_of_ideal"] >= 0.95


def test_more_windows_than_slots_leave_some_hits() -> None:
    found = hit_rate(SIZES, WINDOW, 4096, 0.9)
    assert found["slots"] > 1.5
    assert found["hits_of_ideal"] > 0.3


@pytest.mark.parametrize("gib", [14.0, 40.0])
def test_prompts_with_a_common_prefix_find_it_after_the_second(gib: float) -> None:
    """8 groups of 8 prompts. The groups take turns. The ideal number of hits is 56."""
    sizes, window = sizes_of("gemma-3-27b", gib)
    core, numbers = core_of(sizes, window), random.Random(0)
    prefixes = [numbers.choices(range(1, 250), k=1500) for _ in range(8)]
    num_hits = 0
    for _ in range(8):
        for prefix in prefixes:
            prompt = array("i", prefix + numbers.choices(range(1, 250), k=700))
            num_hits += serve_all(core, [(prompt, 8)]).usages[0].cached_tokens >= 1472
    core.check_integrity()
    assert num_hits >= 48
