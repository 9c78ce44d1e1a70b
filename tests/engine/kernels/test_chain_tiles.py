"""Tiles of weights are copied from the right places. The kernel itself needs a GPU."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.linear import chain_tiles
from parrot.engine.kernels.linear.chain import (
    ChainWeight,
    CodedWeight,
    Tiles,
    fits_tiles,
)
from parrot.engine.kernels.linear.words_layout import Words
from tests.support.assembly import computed, halves, pair_of

TILE, GROUP, WIDTH = 16, 128, 32


def coded(outputs: int, inputs: int) -> CodedWeight:
    codes = torch.randint(1, 256, (outputs, inputs), dtype=torch.uint8)
    return CodedWeight(codes, torch.ones(outputs))


def words(outputs: int, inputs: int) -> Words:
    blocks = inputs // GROUP
    found = torch.randint(1, 2**15, (blocks, outputs, WIDTH), dtype=torch.int16)
    factors = torch.randint(1, 2**31, (blocks, outputs), dtype=torch.int32)
    return Words(found, factors, inputs, 4, True, False)


def rows_of(weight: ChainWeight) -> tuple[torch.Tensor, int]:
    """Numbers [outputs, slices, slice] as they are in memory, and the slices of half a tile."""
    if isinstance(weight, Words):
        return weight.words.transpose(0, 1), 16
    return weight.codes.view(len(weight.codes), -1, 128), 8


def copied(tiles: Any, chunk: int, group: int, output: int) -> torch.Tensor:
    """The numbers that a copy reads [outputs, slices, ...]. Slices that do not exist are zeros."""
    shape, strides, (slices, groups, sets, outputs, *rest) = (
        tiles.shape,
        tiles.strides,
        tiles.block_shape,
    )
    assert (groups, sets * outputs) == (1, TILE)
    assert 0 <= group < shape[1]
    assert 0 <= output <= shape[3] - outputs
    numbers: torch.Tensor = tiles.base.flatten()
    width = rest[0] if rest else 1
    found = numbers.new_zeros(TILE, slices, width)
    for index in range(slices):
        if (first := chunk * slices + index) < shape[0]:
            for half in range(sets):
                place = sum(map(int.__mul__, (first, group, half, output), strides))
                places = place + torch.arange(outputs)[:, None] * strides[3] + torch.arange(width)
                found[half * outputs : (half + 1) * outputs, index] = numbers[places]
    return found


def padded(rows: torch.Tensor, slices: int, chunk: int) -> torch.Tensor:
    """A chunk of rows, with zeros after the last slice."""
    part = rows[:, chunk * slices : (chunk + 1) * slices]
    found = rows.new_zeros(len(rows), slices, rows.shape[2])
    found[:, : part.shape[1]] = part
    return found


MAKE: dict[str, Callable[[int, int], ChainWeight]] = {"e4m3": coded, "words": words}


@pytest.mark.parametrize("inputs", [2048, 4096, 4224, 896])
@pytest.mark.parametrize("make", MAKE)
def test_consecutive_outputs(make: str, inputs: int) -> None:
    weight = MAKE[make](64, inputs)
    rows, slices = rows_of(weight)
    tiles = Tiles.grouped(weight, TILE).codes
    for group in range(4):
        for chunk in range(-(-rows.shape[1] // slices)):
            expected = padded(rows[group * TILE : (group + 1) * TILE], slices, chunk)
            assert torch.equal(copied(tiles, chunk, group, 0), expected)


@pytest.mark.parametrize("make", MAKE)
def test_dimensions_that_rotate_with_each_other(make: str) -> None:
    weight = MAKE[make](3 * 64, 256)
    rows, slices = rows_of(weight)
    tiles = Tiles.grouped(weight, 64).codes
    for head in range(3):
        for dim in range(0, 32, 8):
            first = rows[head * 64 + dim : head * 64 + dim + 8]
            second = rows[head * 64 + 32 + dim : head * 64 + 32 + dim + 8]
            expected = padded(torch.cat((first, second)), slices, 0)
            assert torch.equal(copied(tiles, 0, head, dim), expected)


def test_gate_and_up_with_their_factors() -> None:
    weight = words(2 * 128, 256)
    rows, slices = rows_of(weight)
    tiles = Tiles.halved(weight)
    factor_rows = weight.factors.T[:, :, None]
    for output in range(0, 128, 8):
        index = torch.cat((torch.arange(8), torch.arange(128, 136))) + output
        assert torch.equal(copied(tiles.codes, 0, 0, output), padded(rows[index], slices, 0))
        expected = padded(factor_rows[index], 2 * slices, 0)
        assert torch.equal(copied(tiles.factors, 0, 0, output), expected)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (coded(16, 128), True),
        (coded(24, 128), False),
        (coded(16, 192), False),
        (words(16, 256), True),
        (words(24, 256), False),
        (Words(torch.zeros(2, 16, 32), torch.zeros(8, 16), 256, 4, True, False), False),
        (Words(torch.zeros(2, 16, 32), torch.zeros(2, 16), 224, 4, True, False), False),
        (Words(torch.zeros(4, 16, 32), torch.zeros(2, 16), 256, 8, True, False), False),
    ],
)
def test_weights_consist_of_whole_tiles(weight: ChainWeight, expected: bool) -> None:
    assert fits_tiles(weight) == expected


@pytest.mark.parametrize("part", range(4))
def test_the_instructions_that_make_numbers_of_codes(part: int) -> None:
    """All pairs of codes, with and without neighbours."""
    low, high = torch.arange(16)[:, None].expand(16, 16), torch.arange(16).expand(16, 16)
    source = getattr(chain_tiles, f"_NUMBERS_{part}").value
    for others in (0, 0xFFFF & ~(15 << (4 * part))):
        words = [codes << (4 * part) | others for codes in (low, high)]
        found = halves(computed(source, {"$1": pair_of(*words)}), torch.float16)
        assert torch.equal(found[0], (low + (256, 16)[part % 2]).double())
        assert torch.equal(found[1], (high + (256, 16)[part % 2]).double())
