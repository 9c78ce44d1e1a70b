"""Prefix hits of sessions that take turns, with the sizes of Gemma 3 27B on a GPU."""

import pytest

from benchmark.engine.bench_windows import hit_rate, sizes_of

SIZES, WINDOW = sizes_of("gemma-3-27b", 40.0)


@pytest.mark.parametrize("occupancy", [0.25, 0.6, 0.9])
@pytest.mark.parametrize("length", [8192, 20000])
def test_hits_are_nearly_ideal(length: int, occupancy: float) -> None:
    assert hit_rate(SIZES, WINDOW, length, occupancy)["hits_of_ideal"] >= 0.95


def test_more_windows_than_slots_leave_some_hits() -> None:
    found = hit_rate(SIZES, WINDOW, 4096, 0.9)
    assert found["slots"] > 1.5
    assert found["hits_of_ideal"] > 0.3
