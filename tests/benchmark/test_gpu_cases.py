"""The minimum times of `bench_gpu` can be computed without a GPU."""

import pytest

from benchmark.engine.gpu_cases import DECODES, MODELS, OTHER_MODELS, PREFILLS, Decode, Shape


@pytest.mark.parametrize("model", [*MODELS, *OTHER_MODELS])
def test_each_case_has_a_floor(model: str) -> None:
    shape = Shape.of(model)
    assert all(shape.decode_floor_ms(case) > 0 for case in DECODES[model])
    assert all(shape.prefill_floor_ms(tokens) > 0 for tokens, _ in PREFILLS[model])


def test_layers_with_windows_read_the_keys_inside() -> None:
    """In Gemma 3 27B, 10 of 62 layers read all keys, and 52 layers read 1,024 keys."""
    shape = Shape.of("gemma-3-27b")
    assert shape.window == 1024
    assert shape.window_bytes * 10 == shape.token_bytes * 52
    one, two = (Decode("", 1, length) for length in (50_000, 50_001))
    growth_ms = shape.decode_floor_ms(two) - shape.decode_floor_ms(one)
    assert growth_ms == pytest.approx(shape.token_bytes / 4.3e12 * 1e3, rel=0.01)


def test_a_fork_inside_the_window_reads_the_shared_keys_once() -> None:
    shape = Shape.of("gemma-3-27b")
    forks = shape.decode_floor_ms(Decode("", 16, 64, shared=94_208))
    assert forks < 1.15 * shape.decode_floor_ms(Decode("", 1, 64, shared=94_208))
