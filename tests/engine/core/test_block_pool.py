import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.core.block_pool import BlockPool


def test_allocates_all_or_nothing():
    pool = BlockPool(3, 4)
    assert len(set(pool.allocate(2))) == 2
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    assert len(pool.allocate(1)) == 1
    assert pool.num_used == 3


def test_a_block_is_free_when_its_last_holder_releases_it():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    assert pool.num_refs(blocks[0]) == 1
    pool.release(blocks[:1])
    assert pool.num_free == 2
    assert pool.num_releases == 3


def test_misuse_fails_an_assertion():
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="free and cannot be shared"):
        pool.share([0])
    with pytest.raises(AssertionError, match="already free"):
        pool.release([1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens, blocks):
    assert BlockPool(1, 4).blocks_for(tokens) == blocks


def test_integrity_check_finds_missing_and_extra_references():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(2)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match="refs"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="refs"):
        pool.check_integrity([blocks, blocks[:1]])
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity([[blocks[0], blocks[0]]])


@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 5)), max_size=40))
def test_random_operations_keep_the_reference_counts(history):
    pool = BlockPool(8, 2)
    tables: list[list[int]] = []
    for verb, number in history:
        if verb == "a":
            blocks = pool.allocate(number)
            if blocks is None:
                assert number > pool.num_free
            else:
                tables.append(blocks)
        elif tables and verb == "s":
            table = tables[number % len(tables)]
            pool.share(table[:number])
            tables.append(table[:number])
        elif tables:
            pool.release(tables.pop(number % len(tables)))
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8
