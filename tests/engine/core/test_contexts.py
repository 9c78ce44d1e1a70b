from array import array

import pytest

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.contexts import Context, ContextTree, Fork, drop_kv, make_tree, unshare_tail
from parrot.engine.core.steps import BlockCopy


@pytest.fixture
def tree() -> ContextTree:
    return ContextTree(BlockPool(8, 4))


def grow(tree: ContextTree, context: Context, num_tokens: int) -> tuple[BlockCopy, ...]:
    """Append tokens and mark them as computed."""
    context.token_ids.extend(range(num_tokens))
    copies = tree.reserve(context, len(context.token_ids))
    assert copies is not None
    context.num_computed = len(context.token_ids)
    tree.check_integrity()
    return copies


def fork(tree: ContextTree, parent: Context, context_id: int, length: int) -> Context:
    child = tree.create(context_id, Fork(parent, length, None))
    tree.apply_fork(child, length)
    tree.check_integrity()
    return child


def test_a_fork_shares_the_blocks_of_its_prefix(tree):
    parent = tree.create(1)
    grow(tree, parent, 10)
    child = fork(tree, parent, 2, 10)
    assert child.block_ids == parent.block_ids
    assert child.token_ids == parent.token_ids
    assert child.num_missing == 0
    assert tree.pool.num_used == 3
    short = fork(tree, parent, 3, 5)
    assert short.block_ids == parent.block_ids[:2]
    assert len(short.token_ids) == short.num_computed == 5


def test_the_first_write_into_a_shared_block_copies_it(tree):
    parent = tree.create(1)
    grow(tree, parent, 10)
    child = fork(tree, parent, 2, 10)
    copies = grow(tree, child, 1)
    assert copies == (BlockCopy(parent.block_ids[2], child.block_ids[2], 2),)
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert grow(tree, child, 1) == ()
    assert grow(tree, parent, 1) == ()


def test_the_owner_continues_writing_without_a_copy_while_a_fork_reads(tree):
    parent = tree.create(1)
    grow(tree, parent, 9)
    child = fork(tree, parent, 2, 9)
    assert grow(tree, parent, 3) == ()
    assert grow(tree, child, 1) == (BlockCopy(parent.block_ids[2], child.block_ids[2], 1),)


def test_a_fork_at_a_block_boundary_needs_no_copy(tree):
    parent = tree.create(1)
    grow(tree, parent, 8)
    assert grow(tree, fork(tree, parent, 2, 8), 3) == ()


def test_the_last_holder_becomes_the_owner_of_the_block(tree):
    parent = tree.create(1)
    grow(tree, parent, 10)
    child = fork(tree, parent, 2, 9)
    assert tree.free(parent) == 10
    tail = child.block_ids[2]
    assert grow(tree, child, 2) == ()
    assert child.block_ids[2] == tail


def test_a_fork_computes_tokens_that_its_parent_has_not_computed(tree):
    parent = tree.create(1)
    grow(tree, parent, 5)
    parent.token_ids.extend([7, 8, 9])
    child = fork(tree, parent, 2, 7)
    assert child.token_ids == array("i", [0, 1, 2, 3, 4, 7, 8])
    assert child.num_computed == 5
    assert child.num_missing == 2


def test_a_failed_reservation_changes_nothing(tree):
    parent = tree.create(1)
    grow(tree, parent, 30)
    child = fork(tree, parent, 2, 30)
    child.token_ids.extend([1])
    assert tree.pool.num_free == 0
    assert tree.num_blocks_needed(child, 31) == 1
    before = list(child.block_ids)
    assert tree.reserve(child, 31) is None
    assert child.block_ids == before
    tree.check_integrity()


def test_unsharing_the_tail_avoids_the_copy(tree):
    parent = tree.create(1)
    grow(tree, parent, 30)
    child = fork(tree, parent, 2, 30)
    child.token_ids.extend([1])
    assert unshare_tail(tree, child, [parent]) == {parent}
    assert parent.num_computed == 28
    assert tree.reserve(child, 31) == ()
    assert unshare_tail(tree, child, [parent]) == set()


def test_rewinding_into_a_shared_block_copies_it(tree):
    parent = tree.create(1)
    grow(tree, parent, 8)
    child = fork(tree, parent, 2, 8)
    tree.rewind_one(child)
    assert child.num_missing == 1
    assert len(tree.reserve(child, 8)) == 1
    tree.rewind_one(parent)
    assert tree.reserve(parent, 8) == ()  # The parent is the only holder again.


def test_dropping_one_context_keeps_its_shared_blocks(tree):
    parent = tree.create(1)
    grow(tree, parent, 8)
    child = fork(tree, parent, 2, 8)
    grow(tree, child, 8)
    assert tree.pool.num_free == 4
    assert drop_kv(tree, [parent], 8) == set()
    assert drop_kv(tree, [child], 5) == {child}
    assert child.num_computed == 12
    assert drop_kv(tree, [child], 8) == {child}
    assert child.num_computed == 8
    assert len(child.token_ids) == 16
    tree.check_integrity()


def test_shared_blocks_are_dropped_if_all_their_holders_are_given(tree):
    parent = tree.create(1)
    grow(tree, parent, 8)
    child = fork(tree, parent, 2, 8)
    outside = fork(tree, parent, 3, 4)
    assert drop_kv(tree, [child, parent], 8) == {child, parent}
    assert parent.num_computed == child.num_computed == outside.num_computed == 4
    assert tree.pool.num_used == 1
    tree.check_integrity()


def test_integrity_check_finds_two_owners_and_tokens_without_blocks(tree):
    parent = tree.create(1)
    grow(tree, parent, 6)
    child = fork(tree, parent, 2, 6)
    child.owned_from = 0
    with pytest.raises(AssertionError, match="more than one owner"):
        tree.check_integrity()
    child.owned_from = 2
    child.num_computed = 7
    with pytest.raises(AssertionError):
        tree.check_integrity()


def test_an_id_is_created_once(tree):
    tree.create(1)
    with pytest.raises(AssertionError, match="exists"):
        tree.create(1)
    assert len(list(tree)) == 1
    assert tree.get(2) is None


def test_an_own_block_before_shared_ones_can_be_dropped():
    tree = make_tree(8, 4, publishes=True)
    parent, other = tree.create(1), tree.create(2)
    grow(tree, parent, 8)
    child = fork(tree, parent, 3, 8)
    grow(tree, other, 4)
    tree.publish(other)
    # The parent replaces its first block by that of `other`, and publishes its second.
    tree.publish(parent)
    assert [tree.pool.num_refs(block) for block in child.block_ids] == [1, 2]
    num_free = tree.pool.num_free
    assert drop_kv(tree, [child], num_free + 1) == {child}
    assert tree.pool.num_free == num_free + 1
    tree.check_integrity()
