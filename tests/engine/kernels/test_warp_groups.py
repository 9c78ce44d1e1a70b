"""The shapes of products on warp groups, and the order of their tiles. The kernel needs a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.kernels.linear.products import UndividedRows
from parrot.engine.kernels.linear.warp_group_tiles import (
    WarpGroupProduct,
    can_read,
    fits_warp_groups,
)
from parrot.engine.kernels.linear.warp_groups import words_tiles
from parrot.engine.kernels.linear.words_layout import Words


def words(outputs: int, inputs: int, *, group: int = 128, bits: int = 4) -> Words:
    blocks = inputs // 128
    found = torch.arange(blocks * outputs * 32).view(blocks, outputs, 32).to(torch.int16)
    factors = torch.zeros(inputs // group, outputs, dtype=torch.int32)
    return Words(found, factors, inputs, bits, True, False)


def test_splits_occupy_the_multiprocessors() -> None:
    assert WarpGroupProduct(8, 6144, 32).num_splits == 5
    assert WarpGroupProduct(64, 4096, 32).num_splits == 8
    assert WarpGroupProduct(64, 4096, 112).num_splits == 8
    assert WarpGroupProduct(128, 4096, 112).num_splits == 4, "two programs have the rows"
    assert WarpGroupProduct(64, 28672, 32).num_splits == 1, "there are enough programs"
    assert WarpGroupProduct(1, 1024, 7).num_splits == 3, "a split has two blocks or more"
    assert WarpGroupProduct(1, 1024, 1).num_splits == 1


@given(st.integers(1, 300), st.integers(1, 400).map(lambda tiles: 16 * tiles), st.integers(1, 200))
def test_splits_have_all_blocks(rows: int, outputs: int, blocks: int) -> None:
    product = WarpGroupProduct(rows, outputs, blocks)
    splits = product.num_splits
    size = product.split_blocks(splits)
    assert (splits - 1) * size < blocks <= splits * size, "no split is empty"
    assert rows <= product.members * -(-rows // product.members)
    assert product.members in (8, 16, 32, 64)


@pytest.mark.parametrize("halved", [False, True])
def test_the_order_of_outputs(halved: bool) -> None:
    """A tile has eight outputs of each of two sets."""
    weight = words(96, 256)
    tiles = words_tiles(weight, halved=halved)
    assert tiles.shape == [2, 6, 2, 8, 32]
    found = torch.as_strided(tiles.base, tiles.shape, tiles.strides)
    first, second = found[:, :, 0].flatten(1, 2), found[:, :, 1].flatten(1, 2)
    if halved:
        assert torch.equal(torch.cat((first, second), 1), weight.words)
    else:
        assert torch.equal(found.flatten(1, 3), weight.words)


def test_other_weights_do_not_fit() -> None:
    assert fits_warp_groups(words(96, 256))
    assert not fits_warp_groups(words(96, 256, group=64))
    assert not fits_warp_groups(words(96, 256, bits=8))
    assert not fits_warp_groups(words(88, 256))


def test_rows_that_are_not_read() -> None:
    rows = torch.zeros(4, 256, dtype=torch.bfloat16)
    assert can_read(rows)
    assert can_read(rows[:, :200])
    assert not can_read(rows.half())
    assert not can_read(rows[:, 1:]), "the address is no multiple of 16 bytes"
    assert not can_read(torch.zeros(4, 257, dtype=torch.bfloat16)), "nor are those of rows"
    assert can_read(UndividedRows(rows, torch.zeros(4, 128), 1e-5))
    assert not can_read(UndividedRows(rows, torch.zeros(4, 129), 1e-5)), "too many parts"
