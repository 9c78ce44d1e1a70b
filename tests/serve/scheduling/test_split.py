"""The split of a block over engines, compared with all possible splits."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.serve.scheduling.placement import Site, balance, split


def ways(rooms: list[int], total: int) -> Iterator[list[int]]:
    if not rooms:
        if not total:
            yield []
        return
    for share in range(min(rooms[0], total) + 1):
        for rest in ways(rooms[1:], total - share):
            yield [share, *rest]


def cost(sites: list[Site], shares: list[int], total: int) -> float:
    used = [(site, share) for site, share in zip(sites, shares, strict=True) if share]
    end_s = max(site.start_s + share * site.each_s for site, share in used)
    return end_s + sum(s.harm_s + n * s.harm_each_s for s, n in used) / total


def sites(*, harm: float, max_room: int) -> st.SearchStrategy[list[Site]]:
    seconds = st.floats(0.01, 2.0)
    site = st.builds(
        Site,
        engine_id=st.just(0),
        start_s=seconds,
        each_s=st.floats(0.001, 0.5),
        harm_s=st.floats(0.0, harm),
        harm_each_s=st.floats(0.0, harm),
        room=st.integers(0, max_room),
    )
    lists = st.lists(site, min_size=1, max_size=4)
    return lists.map(lambda found: [s._replace(engine_id=i) for i, s in enumerate(found)])


@settings(max_examples=150)
@given(sites(harm=0.0, max_room=12), st.integers(1, 12))
def test_a_block_finishes_near_the_earliest_possible_time(found: list[Site], total: int) -> None:
    shares = dict(split(found, total, tolerance=0.1))
    fitting = min(total, sum(site.room for site in found))
    assert sum(shares.values()) == fitting
    assert all(0 < share <= found[i].room for i, share in shares.items())
    if not fitting:
        return
    best = min(cost(found, way, fitting) for way in ways([s.room for s in found], fitting))
    chosen = cost(found, [shares.get(i, 0) for i in range(len(found))], fitting)
    assert chosen <= 1.1 * best + 1e-9


@settings(max_examples=100)
@given(sites(harm=0.3, max_room=12), st.integers(1, 10))
def test_harm_to_others_counts(found: list[Site], total: int) -> None:
    """The split is not optimal, because shares are balanced by finishing times only. It is never
    worse than a single engine that is tried first."""
    fitting = min(total, sum(site.room for site in found))
    shares = dict(split(found, total, tolerance=0.0))
    usable = [site for site in found if site.room]
    if not usable:
        assert not shares
        return
    first = min(usable, key=lambda s: s.start_s + s.each_s + s.harm_s / total + s.harm_each_s)
    if first.room >= fitting:
        chosen = [shares.get(i, 0) for i in range(len(found))]
        alone = [fitting if site is first else 0 for site in found]
        assert cost(found, chosen, fitting) <= cost(found, alone, fitting) + 1e-9


def test_a_split_uses_the_fewest_engines_within_the_tolerance() -> None:
    idle = [Site(i, 1.0, 0.01, 0.0, 0.0, 100) for i in range(8)]
    assert len(split(idle, 8, tolerance=0.1)) == 1  # 1.08 s instead of 1.01 s.
    assert len(split(idle, 32, tolerance=0.1)) == 3
    assert len(split(idle, 32, tolerance=0.0)) == 8


def test_a_split_exceeds_the_limit_of_engines_only_for_lack_of_room() -> None:
    idle = [Site(i, 1.0, 0.01, 0.0, 0.0, 20) for i in range(8)]
    assert len(split(idle, 16, tolerance=0.0, most=1)) == 1
    assert len(split(idle, 32, tolerance=0.0, most=2)) == 2
    assert sum(share for _, share in split(idle, 32, tolerance=0.0, most=1)) == 32


def test_slower_engines_get_fewer_tasks() -> None:
    shares = dict(split([Site(0, 0.1, 0.1, 0, 0, 99), Site(1, 0.4, 0.4, 0, 0, 99)], 50, 0.0))
    assert shares[0] == pytest.approx(4 * shares[1], rel=0.15)


def test_an_engine_without_room_gets_no_tasks() -> None:
    assert split([], 3, 0.1) == []
    assert split([Site(0, 0.1, 0.1, 0, 0, 0)], 3, 0.1) == []
    assert split([Site(0, 0.1, 0.1, 0, 0, 2), Site(1, 9.0, 0.1, 0, 0, 2)], 9, 0.1) == [
        (0, 2),
        (1, 2),
    ]


def test_equal_engines_get_equal_shares() -> None:
    same = [Site(i, 0.5, 0.1, 0, 0, 99) for i in range(3)]
    assert [share for _, share in balance(same, 10)] == [4, 3, 3]
