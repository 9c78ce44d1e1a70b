"""The garbage collector visits few objects at a time, and eventually collects all garbage.

`test_collector.py` runs these tests in a separate process."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parrot.utils.collector import Collector, no_collections
from tests.support.manual_clock import ManualClock

YOUNG, MOST_OLD = 200, 1000
# Upper bound for the objects that one collection visits: 5 young collections per middle collection,
# 3 middle collections per full collection, and the survivors that are not frozen. Twice that,
# because Python delays a full collection by 25% of the objects.
AT_ONCE = 2 * (YOUNG * 5 * 3 + MOST_OLD)
HOUR_S = 3600.0


class Node:
    """One of two objects in a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    one, other = Node(), Node()
    one.other, other.other = other, one
    return one


class World:
    """A process with `size` memory blocks. `turn` runs the calls that the collector scheduled."""

    def __init__(self) -> None:
        self.clock, self.size, self.soon = ManualClock(), 10**6, list[Callable[[], None]]()
        self.looked_at: list[int] = []
        self.alive: list[Any] = []
        self.collector = Collector(
            self.soon.append,
            self.clock,
            young=YOUNG,
            most_old=MOST_OLD,
            num_blocks=lambda: self.size,
        )

    def note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and not self.soon:
            self.looked_at.append(
                sum(len(gc.get_objects(n)) for n in range(info["generation"] + 1))
            )

    def make(self, count: int) -> None:
        """Create `count` objects that stay alive."""
        self.alive += [[None] for _ in range(count)]

    def turn(self) -> int:
        """Run all scheduled calls and return their number."""
        due = self.soon[:]
        for call in due:
            call()
        self.soon.clear()
        return len(due)

    def lost_cycle(self) -> "weakref.ref[Node]":
        """A cycle that was frozen before it became garbage."""
        node = cycle()
        before = gc.get_freeze_count()
        while gc.get_freeze_count() <= before:  # Frozen objects may be freed.
            self.make(YOUNG)
        return weakref.ref(node)


@pytest.fixture(autouse=True)
def unfreezing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike collectors in the process of all tests."""
    monkeypatch.setattr("parrot.utils.collector.gc", gc)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with world.collector:
        gc.callbacks.append(world.note)
        yield world
        gc.callbacks.remove(world.note)


def test_a_collection_visits_few_objects(world: World) -> None:
    world.size *= 3
    world.make(100 * AT_ONCE)
    assert len(world.looked_at) > 100
    assert max(world.looked_at) < AT_ONCE
    assert gc.get_freeze_count() > 90 * AT_ONCE
    assert not world.soon


def test_a_small_heap_is_visited_completely(world: World) -> None:
    world.size *= 3
    lost = world.lost_cycle()
    gc.collect()
    assert lost() is not None
    world.size //= 3
    world.make(2 * AT_ONCE)
    assert world.turn() == 1
    assert lost() is None
    assert gc.get_freeze_count() > AT_ONCE
    world.make(YOUNG * 5)
    assert world.turn() == 0  # No object was frozen since.


def test_objects_of_a_journal_are_visited(world: World) -> None:
    lost = weakref.ref(one := cycle())
    gc.freeze()
    del one
    for _ in range(50):
        world.make(2 * YOUNG)
        world.alive.clear()
    assert world.turn() == 1
    assert lost() is None


async def test_objects_frozen_for_an_hour_are_visited_again(world: World) -> None:
    world.size *= 3
    lost = world.lost_cycle()
    await world.clock.advance(HOUR_S - 1)
    world.make(2 * AT_ONCE)
    world.size //= 2
    world.make(2 * AT_ONCE)  # The process is smaller here, so the hour starts again.
    world.size *= 2
    world.make(2 * AT_ONCE)
    await world.clock.advance(HOUR_S - 1)
    world.make(2 * AT_ONCE)
    assert world.turn() == 0
    await world.clock.advance(1)
    world.make(2 * AT_ONCE)
    assert world.turn() == 1
    assert lost() is None
    await world.clock.advance(2 * HOUR_S)
    world.make(2 * AT_ONCE)
    assert world.turn() == 0  # The process has not grown since.


def test_closing_restores_the_settings() -> None:
    gc.unfreeze()
    before = gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()
    with World().collector:
        assert gc.get_threshold() != before[0]
    assert (gc.get_threshold(), gc.callbacks, gc.get_freeze_count()) == before


def test_unvisited_objects_are_frozen_only_with_a_collector() -> None:
    gc.unfreeze()
    with no_collections():
        assert not gc.isenabled()
        lost = weakref.ref(cycle())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert gc.collect() > 0
    assert lost() is None
    with World().collector:
        with no_collections():
            lost = weakref.ref(cycle())
        gc.collect()
        assert lost() is not None
    gc.collect()
    assert lost() is None


def test_collections_that_were_disabled_stay_disabled() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
