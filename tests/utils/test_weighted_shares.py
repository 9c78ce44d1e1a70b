"""The order in which tenants lose memory, compared with a model that sorts all tenants."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot.utils.weighted_shares import PRESENT_S, LossOrder, WeightedShare, WeightedShares
from tests.support.manual_clock import ManualClock

NAMES = st.integers(0, 5)
WEIGHTS = st.sampled_from([1.0, 2.0, 0.5, 2.0**-19, 2.0**29])


class SharesAgainstSorting(RuleBasedStateMachine):
    """`WeightedShares` with two orders by different amounts, next to a dictionary of all shares."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.shares: WeightedShares[WeightedShare] = WeightedShares(self.clock)
        self.known: dict[int, WeightedShare] = {}
        self.amounts: dict[WeightedShare, list[int]] = {}
        self.orders = [self.shares.order(lambda s: self.amounts[s][0])]
        self.orders.append(self.shares.order(lambda s: self.amounts[s][1]))
        self.members: list[set[WeightedShare]] = [set(), set()]

    def is_away(self, share: WeightedShare) -> bool:
        return share.seen <= self.clock.now() - PRESENT_S

    def key(self, share: WeightedShare, which: int) -> tuple[float, ...]:
        if self.is_away(share):
            return (0.0, share.seen)
        return (1.0, -self.amounts[share][which] / share.weight)

    @rule(name=NAMES, weight=WEIGHTS)
    def touch(self, name: int, weight: float) -> None:
        if name not in self.known:
            self.known[name] = WeightedShare(weight)
            self.amounts[self.known[name]] = [0, 0]
        self.shares.touch(self.known[name])
        assert self.known[name].seen == self.clock.now()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), which=st.integers(0, 1), change=st.integers(-3, 3))
    def change(self, data: st.DataObject, which: int, change: int) -> None:
        share = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        self.amounts[share][which] = max(0, self.amounts[share][which] + change)
        if change > 0:
            self.shares.grew(share)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), weight=WEIGHTS)
    def reweigh(self, data: st.DataObject, weight: float) -> None:
        share = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        self.shares.touch(share)
        self.shares.reweigh(share, weight)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), which=st.integers(0, 1))
    def move(self, data: st.DataObject, which: int) -> None:
        share = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        if share in self.members[which]:
            self.members[which].remove(share)
            self.orders[which].discard(share)
        else:
            self.members[which].add(share)
            self.orders[which].add(share)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        share = self.known.pop(data.draw(st.sampled_from(sorted(self.known))))
        for members, order in zip(self.members, self.orders, strict=True):
            members.discard(share)
            order.discard(share)
        self.shares.remove(share)
        del self.amounts[share]

    @rule(seconds=st.sampled_from([0.5, 1.0, 59.5, 120.0]))
    def wait(self, seconds: float) -> None:
        self.clock.pass_time(seconds)

    @rule(which=st.integers(0, 1))
    def lose(self, which: int) -> None:
        members = self.members[which]
        first = self.orders[which].first()
        assert (first is None) == (not members)
        if first is not None:
            assert self.key(first, which) == min(self.key(share, which) for share in members)
            assert first.is_away == self.is_away(first)

    @invariant()
    def adds_up(self) -> None:
        self.shares.check_integrity(set(self.known.values()))
        for order, members in zip(self.orders, self.members, strict=True):
            assert set(order) == members
            order.check_integrity()


TestSharesAgainstSorting = SharesAgainstSorting.TestCase


@given(st.lists(st.tuples(WEIGHTS, st.integers(0, 50)), min_size=1, max_size=8))
def test_shares_lose_memory_in_order_of_amount_over_weight(given: list[tuple[float, int]]) -> None:
    shares: WeightedShares[WeightedShare] = WeightedShares(ManualClock())
    amounts = {WeightedShare(weight): amount for weight, amount in given}
    order: LossOrder[WeightedShare] = shares.order(lambda share: amounts[share])
    for share in amounts:
        shares.touch(share)
        order.add(share)
    levels = []
    while (first := order.first()) is not None:
        levels.append(order.level(first))
        order.discard(first)
    assert levels == sorted((amount / weight for weight, amount in given), reverse=True)


def test_a_share_is_inactive_after_two_minutes_until_it_is_used() -> None:
    shares: WeightedShares[WeightedShare] = WeightedShares(clock := ManualClock())
    old, new = WeightedShare(3.0), WeightedShare(1.0)
    for share in (old, new):
        shares.touch(share)
        clock.pass_time(1.0)
    clock.pass_time(PRESENT_S - 2.0)
    shares.sweep()
    assert (old.is_away, new.is_away, shares.weight) == (True, False, 1.0)
    shares.touch(old)
    assert (old.is_away, shares.weight, shares.num_present) == (False, 4.0, 2)
