import gc
import weakref
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot.utils.heaps import LazyHeap, LruDict

ITEMS = st.integers(0, 12)


class HeapAgainstSorting(RuleBasedStateMachine):
    """Compares a `LazyHeap` with a dictionary that is sorted for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: LazyHeap[int, float] = LazyHeap()
        self.model: dict[int, tuple[float, int]] = {}
        self.num_set = 0

    def ordered(self) -> list[int]:
        return sorted(self.model, key=lambda item: self.model[item])

    @rule(item=ITEMS, key=st.sampled_from([0.0, 1.0, 2.0, float("inf")]))
    def set(self, item: int, key: float) -> None:
        self.heap.set(item, key)
        if self.model.get(item, (None, 0))[0] != key:
            self.num_set += 1
            self.model[item] = (key, self.num_set)

    @rule(item=ITEMS)
    def discard(self, item: int) -> None:
        self.heap.discard(item)
        self.model.pop(item, None)

    @rule()
    def pop(self) -> None:
        expected = self.ordered()[:1]
        popped = self.heap.pop()
        assert ([] if popped is None else [popped[1]]) == expected
        for item in expected:
            assert popped == (self.model.pop(item)[0], item)

    @rule(limit=st.floats(0, 3))
    def pop_until(self, limit: float) -> None:
        expected = [item for item in self.ordered() if self.model[item][0] <= limit]
        assert list(self.heap.pop_until(limit)) == expected
        for item in expected:
            del self.model[item]

    @rule(num_items=st.integers(0, 15))
    def smallest(self, num_items: int) -> None:
        assert self.heap.smallest(num_items) == self.ordered()[:num_items]

    @invariant()
    def agrees(self) -> None:
        assert len(self.heap) == len(self.model)
        assert sorted(self.heap) == sorted(self.model)
        first = self.ordered()[:1]
        assert self.heap.top() == (None if not first else (self.model[first[0]][0], first[0]))
        for item, (key, _) in self.model.items():
            assert item in self.heap
            assert self.heap.key(item) == key


TestHeapAgainstSorting = HeapAgainstSorting.TestCase


class LruAgainstList(RuleBasedStateMachine):
    """Compares an `LruDict` of strings, weighted by their length, with a list of pairs."""

    BOUND = 12

    def __init__(self) -> None:
        super().__init__()
        self.lru: LruDict[int, str] = LruDict(self.BOUND, weigh=len)
        self.model: list[tuple[int, str]] = []

    def take(self, key: int) -> str | None:
        value = dict(self.model).get(key)
        self.model = [pair for pair in self.model if pair[0] != key]
        return value

    @rule(key=ITEMS, value=st.text("ab", max_size=BOUND + 2))
    def put(self, key: int, value: str) -> None:
        self.lru.put(key, value)
        self.take(key)
        if len(value) <= self.BOUND:
            self.model.append((key, value))
        while sum(len(value) for _, value in self.model) > self.BOUND:
            del self.model[0]

    @rule(key=ITEMS)
    def get(self, key: int) -> None:
        expected = dict(self.model).get(key)
        assert self.lru.peek(key) == expected
        assert self.lru.get(key) == expected
        if expected is not None:
            self.take(key)
            self.model.append((key, expected))

    @rule(key=ITEMS)
    def pop(self, key: int) -> None:
        assert self.lru.pop(key) == self.take(key)

    @rule()
    def pop_oldest(self) -> None:
        expected = self.model[0] if self.model else None
        assert self.lru.pop_oldest() == expected
        del self.model[:1]

    @rule(data=st.data(), newest=st.booleans())
    def touch(self, data: st.DataObject, newest: bool) -> None:
        if self.model:
            key, value = data.draw(st.sampled_from(self.model))
            self.lru.touch(key, newest=newest)
            self.take(key)
            self.model.insert(len(self.model) if newest else 0, (key, value))

    @invariant()
    def agrees(self) -> None:
        assert list(self.lru) == [key for key, _ in self.model]
        assert list(self.lru.values()) == [value for _, value in self.model]
        assert self.lru.oldest() == (self.model[0] if self.model else None)
        assert self.lru.weight == sum(len(value) for _, value in self.model)


TestLruAgainstList = LruAgainstList.TestCase


@given(st.lists(ITEMS), st.integers(1, 5))
def test_without_weights_the_number_is_bounded(keys: list[int], bound: int) -> None:
    lru: LruDict[int, int] = LruDict(bound)
    for key in keys:
        lru.put(key, key)
    last_used = list(dict.fromkeys(reversed(keys)))[:bound]
    assert list(lru) == last_used[::-1]


class _Item:
    pass


def test_the_heap_keeps_few_items_alive_that_were_removed_or_set_again() -> None:
    heap: LazyHeap[_Item, float] = LazyHeap()
    kept = _Item()
    alive: list[Callable[[], _Item | None]] = []
    for i in range(5000):
        item = _Item()
        alive.append(weakref.ref(item))
        heap.set(item, i)
        heap.set(kept, 10_000 + i)
        heap.discard(item)
    del item
    gc.collect()
    assert sum(ref() is not None for ref in alive) < 200
    assert heap.pop() == (14_999, kept)


@given(st.lists(st.tuples(ITEMS, st.integers(0, 9))), st.integers(0, 9))
def test_is_before_others(entries: list[tuple[int, int]], key: int) -> None:
    heap: LazyHeap[int, float] = LazyHeap()
    for item, its_key in entries:
        heap.set(item, its_key)
    if (top := heap.top()) is None:
        return
    others = [heap.key(item) for item in heap if item != top[1]]
    assert not heap.is_before_others(key) or all(key <= other for other in others)
    if len(dict(entries)) == len(entries):
        assert heap.is_before_others(key) == all(key <= other for other in others)
