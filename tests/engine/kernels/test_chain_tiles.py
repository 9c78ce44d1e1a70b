"""Tiles of weights are copied from the right places. The kernel itself needs a GPU."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.linear.chain import fits_tiles, grouped_tiles, halved_tiles

SLICE, TILE, INPUTS = 128, 16, 2048


def tile(tiles: Any, chunk: int, group: int, output: int) -> torch.Tensor:
    """What a copy reads [outputs, inputs], with zeros for inputs that do not exist."""
    shape, strides, block = tiles.shape, tiles.strides, tiles.block_shape
    numbers = tiles.base.flatten()
    slices, groups, sets, outputs, inputs = block
    assert (groups, sets * outputs, inputs) == (1, TILE, SLICE)
    assert 0 <= group < shape[1]
    assert 0 <= output <= shape[3] - outputs
    found = torch.zeros(TILE, slices, inputs, dtype=torch.uint8)
    for index in range(slices):
        if (first := chunk * slices + index) < shape[0]:
            for half in range(sets):
                place = torch.tensor([first, group, half, output, 0]) @ torch.tensor(strides)
                rows = place + torch.arange(outputs)[:, None] * strides[3] + torch.arange(inputs)
                found[half * outputs : (half + 1) * outputs, index] = numbers[rows]
    return found.flatten(1)


def random_codes(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randint(1, 256, (outputs, inputs), dtype=torch.uint8)


def padded(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    found = torch.zeros(len(rows), INPUTS, dtype=torch.uint8)
    part = rows[:, chunk * INPUTS : (chunk + 1) * INPUTS]
    found[:, : part.shape[1]] = part
    return found


@pytest.mark.parametrize("inputs", [2048, 2176, 896])
def test_consecutive_outputs(inputs: int) -> None:
    weight = random_codes(64, inputs)
    tiles = grouped_tiles(weight, TILE)
    for group in range(4):
        for chunk in range(-(-inputs // INPUTS)):
            rows = weight[group * TILE : (group + 1) * TILE]
            assert torch.equal(tile(tiles, chunk, group, 0), padded(rows, chunk))


def test_dimensions_that_rotate_with_each_other() -> None:
    weight = random_codes(3 * 64, 256)
    tiles = grouped_tiles(weight, 64)
    for head in range(3):
        for dim in range(0, 32, 8):
            first = weight[head * 64 + dim : head * 64 + dim + 8]
            second = weight[head * 64 + 32 + dim : head * 64 + 32 + dim + 8]
            expected = padded(torch.cat((first, second)), 0)
            assert torch.equal(tile(tiles, 0, head, dim), expected)


def test_gate_and_up() -> None:
    weight = random_codes(2 * 128, 256)
    tiles = halved_tiles(weight)
    for output in range(0, 128, 8):
        rows = torch.cat((weight[output : output + 8], weight[128 + output : 128 + output + 8]))
        assert torch.equal(tile(tiles, 0, 0, output), padded(rows, 0))


@pytest.mark.parametrize(
    ("outputs", "inputs", "fits"), [(16, 128, True), (24, 128, False), (16, 192, False)]
)
def test_weights_consist_of_whole_tiles(outputs: int, inputs: int, fits: bool) -> None:
    assert fits_tiles(random_codes(outputs, inputs)) == fits
