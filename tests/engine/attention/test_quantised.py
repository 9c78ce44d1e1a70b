"""Rows of numbers that are stored in e4m3, with a power of two as their scale."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.attention.quantised import dequantise, quantise

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def through(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return dequantise(*quantise(torch.tensor(values, dtype=dtype)), dtype)


@given(st.lists(FINITE, min_size=1, max_size=16))
def test_numbers_change_by_at_most_a_sixteenth_or_a_small_part_of_the_largest(
    values: list[float],
) -> None:
    largest = max(map(abs, values))
    for before, after in zip(values, through(values).tolist(), strict=True):
        assert abs(after - before) <= max(abs(before) / 16, largest * 2.0**-17, 2.0**-49)


@given(st.lists(FINITE, min_size=1, max_size=16))
def test_numbers_that_were_stored_once_do_not_change_again(values: list[float]) -> None:
    once = through(values)
    assert torch.equal(through(once.tolist()), once)


@given(st.lists(FINITE, min_size=1, max_size=8), st.integers(-20, 20))
def test_a_power_of_two_changes_the_exponent_alone(values: list[float], shift: int) -> None:
    x = torch.tensor(values)
    if not 2.0**-20 < float(x.abs().max()) < 2.0**80:
        return
    codes, exponents = quantise(x)
    same, moved = quantise(x * 2.0**shift)
    if float(x.abs().max()) * 2.0**shift > 2.0**-31:  # Exponents have a lower limit.
        assert torch.equal(codes, same)
        assert int(moved) == int(exponents) + shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_comes_back_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    finite = values.isfinite()
    numbers = dequantise(codes, torch.tensor(131, dtype=torch.uint8), dtype)
    assert torch.equal(numbers[finite].double(), values[finite] * 16)
    assert torch.equal(quantise(numbers[finite])[0], codes[finite])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other_row(bad: float) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, bad, 3.0]])
    numbers = dequantise(*quantise(rows), torch.float32)
    assert torch.equal(numbers[0], rows[0])
    assert not numbers[1].isfinite().all()
