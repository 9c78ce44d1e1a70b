"""Ids from which clients cannot compute how many ids were created between two of them."""

import random
from itertools import pairwise

import pytest

from parrot.utils.hidden_ids import HiddenIds

FIRST = 1_800_000_000_000


@pytest.mark.parametrize("step", [1, 64])
def test_each_number_has_its_own_id_and_can_be_recovered(step: int) -> None:
    ids = HiddenIds(b"secret", step)
    numbers = range(FIRST, FIRST + 5000 * step, step)
    made = [ids.id_of(number) for number in numbers]
    assert len(set(made)) == len(made)
    assert [ids.number_of(one) for one in made] == list(numbers)
    assert all(2**52 <= one < 2**53 for one in made)  # Exact in JSON parsers that use doubles.
    assert {one % step for one in made} == {FIRST % step}  # The shard of an id.
    gaps = [after - before for before, after in pairwise(made)]
    assert 0.45 < sum(gap > 0 for gap in gaps) / len(gaps) < 0.55


def test_ids_depend_on_the_secret_and_old_ids_are_their_own_numbers() -> None:
    one, other = HiddenIds(b"one", 1), HiddenIds(b"other", 1)
    assert one.id_of(FIRST) != other.id_of(FIRST)
    assert one.number_of(FIRST) == FIRST


def test_any_integer_has_a_number() -> None:
    draw = random.Random(7)
    for step in (1, 64):
        ids = HiddenIds(b"secret", step)
        for bits in (52, 53, 63):
            assert ids.number_of(draw.getrandbits(bits)) >= 0
