"""Orders of eviction, on contexts whose next use the test sets."""

from hypothesis import given
from hypothesis import strategies as st

from parrot.serve.contexts.eviction import EvictionOrder, FarthestNextUse, LeastRecentlyUsed
from parrot.serve.contexts.index import LedgerContext
from tests.support.manual_clock import ManualClock


def make(context_id: int) -> LedgerContext:
    return LedgerContext(context_id, 0, 1, None, 0, 10, 0, 0.0, 0.0)


class Oracle:
    """Predicts the next uses that the test sets, and counts predictions."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.when: dict[int, float] = {}
        self.num_predictions = 0
        self.order = FarthestNextUse(self._predict, self.clock)

    def _predict(self, context: LedgerContext, now: float) -> float:
        self.num_predictions += 1
        return max(self.when[context.id], now)


def drain(order: EvictionOrder) -> list[int]:
    ids = []
    while (first := order.first_to_evict()) is not None:
        ids.append(first.id)
        order.discard(first)
    return ids


def test_least_recently_used_first_but_parents_without_forks_before() -> None:
    order = LeastRecentlyUsed()
    for i in range(3):
        order.add(make(i), recent=True)
    order.add(make(9), recent=False)
    order.add(make(0), recent=True)
    order.discard(make(2))
    assert drain(order) == [9, 1, 0]


@given(st.lists(st.integers(0, 1000), unique=True, max_size=40))
def test_farthest_first(times: list[int]) -> None:
    oracle = Oracle()
    oracle.when = dict(enumerate(map(float, times)))
    for i in oracle.when:
        oracle.order.add(make(i), recent=True)
    assert set(oracle.order.context_ids()) == set(oracle.when)
    assert drain(oracle.order) == sorted(oracle.when, key=lambda i: -oracle.when[i])


def test_a_context_that_is_now_expected_sooner_stays() -> None:
    oracle = Oracle()
    oracle.when = {0: 50.0, 1: 100.0}
    for i in oracle.when:
        oracle.order.add(make(i), recent=True)
    oracle.when[1] = 1.0
    first = oracle.order.first_to_evict()
    assert first is not None
    assert first.id == 0


async def test_an_overdue_prediction_is_repeated() -> None:
    oracle = Oracle()
    oracle.when = {0: 5.0, 1: 100.0}
    for i in oracle.when:
        oracle.order.add(make(i), recent=True)
    await oracle.clock.advance(6)
    oracle.when[0] = 1000.0
    first = oracle.order.first_to_evict()
    assert first is not None
    assert first.id == 0


async def test_an_eviction_makes_few_predictions_although_many_are_overdue() -> None:
    oracle = Oracle()
    for i in range(1000):
        oracle.when[i] = float(i)
        oracle.order.add(make(i), recent=True)
    await oracle.clock.advance(2000)
    oracle.num_predictions = 0
    for _ in range(100):
        first = oracle.order.first_to_evict()
        assert first is not None
        oracle.order.discard(first)
    assert oracle.num_predictions < 20 * 100


def test_stale_entries_do_not_accumulate() -> None:
    oracle = Oracle()
    context = make(0)
    oracle.when[0] = 5.0
    for _ in range(1000):
        oracle.order.add(context, recent=True)
        oracle.order.discard(context)
    assert len(oracle.order._by_next_use) < 200
    assert drain(oracle.order) == []
