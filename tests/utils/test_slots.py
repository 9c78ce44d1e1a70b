"""Slots that are granted to owners in turn."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from parrot.utils.slots import FairSlots


class Book:
    """The owners that hold a slot, and all grants in order."""

    def __init__(self, num_slots: int) -> None:
        self.slots = FairSlots(num_slots)
        self.inside: Counter[str] = Counter()
        self.order: list[str] = []
        self._ends: dict[str, list[asyncio.Event]] = {}

    def enter(self, owner: str) -> "asyncio.Task[None]":
        return asyncio.create_task(self._stay(owner))

    async def _stay(self, owner: str) -> None:
        async with self.slots.slot(owner):
            self.inside[owner] += 1
            self.order.append(owner)
            end = asyncio.Event()
            self._ends.setdefault(owner, []).append(end)
            try:
                await end.wait()
            finally:
                self.inside[owner] -= 1

    async def leave(self, owner: str) -> None:
        self._ends[owner].pop(0).set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_owner_never_has_all() -> None:
    book = Book(3)
    tasks = [book.enter("greedy") for _ in range(10)]
    await settle()
    assert book.inside["greedy"] == 2
    tasks.append(book.enter("other"))
    await settle()
    assert book.inside["other"] == 1
    for task in tasks:
        task.cancel()


async def test_a_single_slot_is_available_to_every_owner() -> None:
    book = Book(1)
    task = book.enter("a")
    await settle()
    assert book.inside["a"] == 1
    task.cancel()


async def test_owners_take_turns() -> None:
    book = Book(1)
    tasks = [book.enter(owner) for owner in ("a", "a", "a", "a", "b", "b", "c")]
    await settle()
    for _ in range(6):
        await book.leave(book.order[-1])
    assert book.order == ["a", "a", "b", "c", "a", "b", "a"]
    for task in tasks:
        task.cancel()


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "cancel", "leave"]))),
)
def test_slots_are_neither_lost_nor_duplicated(
    num_slots: int, steps: list[tuple[str, str]]
) -> None:
    async def run() -> None:
        book = Book(num_slots)
        share = max(1, num_slots - 1)
        tasks: dict[str, list[asyncio.Task[None]]] = {owner: [] for owner in "abc"}
        for owner, step in steps:
            if step == "enter":
                tasks[owner].append(book.enter(owner))
            elif step == "cancel" and tasks[owner]:
                tasks[owner].pop().cancel()
            elif step == "leave" and book.inside[owner]:
                await book.leave(owner)
            if len(steps) % 2:
                await settle()
            assert sum(book.inside.values()) <= num_slots
            assert max(book.inside.values(), default=0) <= share
        for task in (task for some in tasks.values() for task in some):
            task.cancel()
        await settle()
        again = [book.enter(owner) for owner in "abcd" for _ in range(num_slots)]
        await settle()
        assert sum(book.inside.values()) == num_slots
        for task in again:
            task.cancel()
        await settle()
        assert not book.slots._waiting
        assert not book.slots._held

    asyncio.run(run())
