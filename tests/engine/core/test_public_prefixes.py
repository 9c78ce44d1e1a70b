"""A public prefix is computed once for all salts. Later tokens are not shared."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.block_pool import BlockHasher
from parrot.protocol.errors import InvalidRequest
from tests.support.core_harness import Harness, piece

PUBLIC = "abcdefghij"  # 10 tokens: two full blocks of 4, and two tokens.
SUFFIX = "klmnopqrstu"


def cached(engine: Harness, context_id: int, text: str, salt: str, public: int = 10) -> int:
    answer = engine.fill(piece(context_id, text, public=public), cache_salt=salt)
    engine.run()
    assert answer.response.cached_tokens + answer.response.computed_tokens == len(text)
    return answer.response.cached_tokens


def test_another_salt_finds_the_public_blocks_and_not_one_more():
    engine = Harness()
    assert cached(engine, 1, PUBLIC + SUFFIX, "one") == 0
    assert cached(engine, 2, PUBLIC + SUFFIX, "other") == 8
    assert cached(engine, 3, PUBLIC + SUFFIX, "one") == 20
    assert engine.context(1).block_ids[:2] == engine.context(2).block_ids[:2]
    assert not set(engine.context(1).block_ids[2:]) & set(engine.context(2).block_ids[2:])


def test_a_public_prefix_is_not_found_without_public_len():
    engine = Harness()
    cached(engine, 1, PUBLIC + SUFFIX, "one")
    assert cached(engine, 2, PUBLIC + SUFFIX, "other", public=0) == 0
    assert cached(engine, 3, PUBLIC + SUFFIX, "", public=0) == 0


def test_public_blocks_outlive_the_context_that_computed_them():
    engine = Harness()
    cached(engine, 1, PUBLIC + SUFFIX, "one")
    engine.free(1)
    assert cached(engine, 2, PUBLIC + SUFFIX, "other") == 8


@pytest.mark.parametrize(("length", "found"), [(6, 4), (8, 8), (11, 8), (16, 8)])
def test_a_fork_shares_its_part_of_the_public_prefix(length, found):
    """Later tokens belong to the fork, also if they equal the public prefix."""
    engine = Harness(num_blocks=32)
    cached(engine, 1, PUBLIC + SUFFIX, "one")
    rest = (PUBLIC + SUFFIX)[length:]
    fork = engine.fill(piece(2, rest + "!", parent=1, length=length), cache_salt="one")
    engine.run()
    assert fork.error is None
    engine.free(1)
    assert cached(engine, 3, PUBLIC + SUFFIX, "other") >= found
    assert cached(engine, 4, PUBLIC + SUFFIX, "third") == 8


def test_more_tokens_than_the_piece_has_cannot_be_public():
    engine = Harness()
    refused = engine.fill(piece(1, PUBLIC, public=11))
    engine.run()
    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.param == "public_len"
    assert engine.context(1) is None


@settings(max_examples=200)
@given(
    size=st.integers(1, 5),
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    public_len=st.integers(0, 30),
    other_public_len=st.integers(0, 30),
    salts=st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"])),
)
def test_keys_are_equal_only_where_both_are_public_or_have_one_salt(
    size, tokens, public_len, other_public_len, salts
):
    hasher = BlockHasher(size, secret=b"s")
    ids, num_blocks = array("i", tokens), len(tokens) // size
    chains: list[list[bytes]] = []
    for salt, length in zip(salts, (public_len, other_public_len), strict=True):
        chain: list[bytes] = []
        for end in range(num_blocks + 1):  # Block by block, as a context grows.
            hasher.extend(chain, hasher.root(salt, length), ids, end)
        assert len(set(chain)) == num_blocks
        chains.append(chain)
    ends = public_len // size, other_public_len // size
    has_one_root = salts[0] == salts[1] and ends[0] == ends[1]
    num_equal = num_blocks if has_one_root else min(*ends, num_blocks)
    assert chains[0][:num_equal] == chains[1][:num_equal]
    assert not set(chains[0][num_equal:]) & set(chains[1][num_equal:])


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    public=st.text("ab", min_size=1, max_size=12),
    suffix=st.text("ab", min_size=1, max_size=12),
)
def test_a_prompt_of_another_salt_shares_the_full_public_blocks(block_size, public, suffix):
    engine = Harness(num_blocks=128, block_size=block_size)
    text, whole = public + suffix, len(public) // block_size * block_size
    cached(engine, 1, text, "one", public=len(public))
    assert cached(engine, 2, text, "other", public=len(public)) == whole
    engine.core.check_integrity()
