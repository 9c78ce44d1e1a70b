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
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.words_linear import words_of
from tests.support.assembly import computed, pair_of

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


def codes_of(words: torch.Tensor, source: str) -> torch.Tensor:
    """The codes in all bytes of words [outputs, 32], as the kernel extracts them."""
    pairs = words.to(torch.int64) & 0xFFFF
    found = computed(source, {"$1": pair_of(pairs[:, ::2], pairs[:, 1::2])})
    return torch.stack([found >> shift & 0xFF for shift in (0, 8, 16, 24)], 2).flatten(1)


def test_codes_have_the_places_of_their_inputs() -> None:
    """x has the same order: input 64 h + 32 s + j is number 2 j + h of set s."""
    codes = torch.randint(16, (16, GROUP), dtype=torch.uint8)
    scales, zeros = torch.ones(16, 1, dtype=torch.float16), torch.zeros(16, 1, dtype=torch.int32)
    weight = words_of(CodedMatrix.with_zeros(codes, scales, zeros))
    assert weight is not None
    in_order = codes.view(16, 2, 2, WIDTH).permute(0, 2, 3, 1).reshape(16, 2, 2 * WIDTH)
    sources = (chain_tiles._LOW_CODES.value, chain_tiles._HIGH_CODES.value)
    for part, source in enumerate(sources):
        assert torch.equal(codes_of(weight.words[0], source), in_order[:, part].long())
