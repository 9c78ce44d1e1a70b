"""Leases of one engine: never more than it has in sum, whatever comes in which order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parrot.engine.owners.division import Claim, Division, divide
from parrot.protocol.engine_api import Lease, LeaseUse

claims = st.builds(Claim, wanted=st.integers(0, 2000), least=st.integers(0, 1200))


@given(st.integers(1, 1000), st.lists(claims, min_size=1, max_size=6), st.data())
def test_all_of_it_is_given_and_fairly(
    capacity: int, wanted: list[Claim], data: st.DataObject
) -> None:
    turn = data.draw(st.integers(0, len(wanted) - 1))
    parts = divide(capacity, wanted, turn)
    assert sum(parts) == capacity
    assert min(parts) >= 0
    assert parts[turn] >= min(wanted[turn].least, capacity)
    floor = capacity // len(wanted) // 8
    if sum(max(floor, claim.least) for claim in wanted) > capacity:
        return
    for part, claim in zip(parts, wanted, strict=True):
        assert part >= max(floor, claim.least)
        if part < claim.wanted:  # then nobody has more, but for what they need at least
            pairs = zip(parts, wanted, strict=True)
            assert all(p <= part + 1 or p <= max(floor, c.least) for p, c in pairs)


def test_what_is_idle_is_lent_but_for_a_floor() -> None:
    assert divide(800, [Claim(wanted=5000), Claim()]) == [750, 50]
    assert divide(800, [Claim(), Claim()]) == [400, 400]
    assert divide(800, [Claim(wanted=100), Claim(wanted=5000)]) == [100, 700]


def test_calls_that_fit_one_at_a_time_run_in_turn() -> None:
    huge = [Claim(wanted=900, least=700)] * 2
    assert divide(800, huge, 1) == [100, 700]
    assert divide(800, huge, 0) == [700, 100]
    assert divide(800, [Claim(900, 800), Claim(900, 10)], 0) == [800, 0]


class Core:
    """A ServeCore that keeps to its latest lease, and calls of so many tokens, which may end at any
    time."""

    def __init__(self) -> None:
        self.lease = Lease()
        self.running: list[int] = []
        self.queued: list[int] = []

    def take(self, lease: Lease) -> LeaseUse:
        if lease.number > self.lease.number:
            self.lease = lease
        latest, calls = self.lease, self.running + self.queued
        return LeaseUse(
            number=latest.number,
            tokens=max(latest.tokens, sum(self.running)),
            calls=max(latest.calls, len(self.running)),
            wanted_tokens=sum(calls),
            wanted_calls=len(calls),
            least_tokens=max(self.queued, default=0),
        )

    def place(self) -> None:
        lease = self.lease
        while self.queued and len(self.running) < lease.calls:
            if sum(self.running) + self.queued[0] > lease.tokens:
                return
            self.running.append(self.queued.pop(0))


def wanting(lease: Lease, calls: int, running: int = 0) -> LeaseUse:
    used = max(lease.calls, running)
    return LeaseUse(number=lease.number, tokens=0, calls=used, wanted_calls=calls)


def test_whose_lease_somebody_waits_for_is_due() -> None:
    division = Division(2)
    assert division.due() == []
    division.answered(0, wanting(division.offer(0, 0, 8), 8, 8))
    division.answered(1, wanting(division.offer(1, 0, 8), 0))
    assert division.due() == []
    division.answered(1, wanting(division.offer(1, 0, 8), 3))
    assert division.due() == [0], "it has more than its part"
    lease = division.offer(0, 0, 8)
    assert (lease.calls, lease.is_wanted) == (5, True)
    division.answered(0, wanting(lease, 8, 8))
    assert division.due() == [1], "others wait for what it may come not to use"
    division.answered(1, wanting(division.offer(1, 0, 8), 3))
    assert division.due() == [], "all is in use"
    division.answered(0, wanting(lease, 7, 7))
    assert division.due() == [1]
    lease = division.offer(1, 0, 8)
    assert (lease.calls, lease.is_wanted) == (1, True)
    division.answered(1, wanting(lease, 3))
    assert division.due() == []
    division.lost(0)
    assert division.due() == [1]
    lease = division.offer(1, 0, 8)
    assert (lease.calls, lease.is_wanted) == (8, False)


def test_who_may_use_less_is_told_that_others_wait() -> None:
    division = Division(2)
    leases = [division.offer(index, 0, 8) for index in (0, 1, 0, 1)]
    division.answered(0, wanting(leases[2], 8, 4))
    division.answered(1, wanting(leases[3], 8))
    lease = division.offer(0, 0, 8)
    assert (lease.calls, lease.is_wanted) == (4, True)
    division.answered(0, wanting(lease, 8, 4))
    assert division.due() == [1], "each has its part, and must say when it does not need it"
    assert division.offer(1, 0, 8).is_wanted


@given(st.lists(st.lists(st.integers(1, 30), max_size=8), min_size=2, max_size=4), st.data())
def test_all_queued_calls_run_by_the_heartbeats_that_are_due_alone(
    queues: list[list[int]], data: st.DataObject
) -> None:
    """And by those that are asked for when calls come and when they end."""
    division, cores = Division(len(queues)), [Core() for _ in queues]

    def beat(index: int) -> None:
        use = cores[index].take(division.offer(index, 40, 4))
        division.answered(index, use)
        cores[index].place()

    def settle(index: int) -> None:
        beat(index)
        for _ in range(100):
            for one in division.due():
                beat(one)
        assert len(division.due()) < len(cores), "each has told, and still all wait"

    for index in range(len(cores)):
        beat(index)
    for index, queue in enumerate(queues):
        cores[index].queued += queue
        cores[index].place()
        settle(index)
    while any(core.running for core in cores):
        index = data.draw(st.sampled_from([i for i, core in enumerate(cores) if core.running]))
        del cores[index].running[0]
        cores[index].place()
        settle(index)
    assert not any(core.queued for core in cores), [core.queued for core in cores]


TOKENS, CALLS, COUNT = 64, 5, 3
SIZES = [1, 1, 2, 3, 20, 50, TOKENS]
indices = st.integers(0, COUNT - 1)


class SharedEngine(RuleBasedStateMachine):
    """Beats and their answers get lost and come late, and ServeCores die, in any order."""

    @initialize()
    def start(self) -> None:
        self.division = Division(COUNT)
        self.cores = [Core() for _ in range(COUNT)]
        self.late: list[list[Lease]] = [[] for _ in range(COUNT)]
        self.answers: list[LeaseUse | None] = [None] * COUNT

    @rule(index=indices)
    def beat_that_hangs(self, index: int) -> None:
        self.late[index].append(self.division.offer(index, TOKENS, CALLS))

    @precondition(lambda self: any(self.late))
    @rule(data=st.data(), is_lost=st.booleans())
    def late_beat(self, data: st.DataObject, is_lost: bool) -> None:
        index = data.draw(st.sampled_from([i for i in range(COUNT) if self.late[i]]))
        lease = self.late[index].pop(data.draw(st.integers(0, len(self.late[index]) - 1)))
        answer = self.cores[index].take(lease)
        if not is_lost:
            self.division.answered(index, answer)

    @rule(index=indices)
    def beat(self, index: int) -> None:
        lease = self.division.offer(index, TOKENS, CALLS)
        self.division.answered(index, self.cores[index].take(lease))

    @rule(index=indices, sizes=st.lists(st.sampled_from(SIZES), max_size=8))
    def calls_come(self, index: int, sizes: list[int]) -> None:
        self.cores[index].queued += sizes

    @rule()
    def calls_begin(self) -> None:
        for core in self.cores:
            core.place()

    @rule(index=indices, count=st.integers(1, CALLS))
    def calls_end(self, index: int, count: int) -> None:
        del self.cores[index].running[:count]

    @rule(index=indices)
    def core_dies(self, index: int) -> None:
        """Its registration is over: what it sent is refused, what was sent to it is ignored."""
        self.division.lost(index)
        self.cores[index], self.late[index] = Core(), []

    @invariant()
    def never_more_than_there_is(self) -> None:
        leases = [self.division.lease(index) for index in range(COUNT)]
        assert sum(tokens for tokens, _ in leases) <= TOKENS
        assert sum(calls for _, calls in leases) <= CALLS
        for (tokens, calls), core in zip(leases, self.cores, strict=True):
            assert sum(core.running) <= tokens
            assert len(core.running) <= calls
            assert core.lease.tokens <= tokens
            assert core.lease.calls <= calls

    def teardown(self) -> None:
        """Nobody starves: all that was queued runs, once beats come through and calls end."""
        num_left = sum(len(core.queued) for core in self.cores)
        for _ in range(4 * num_left + 4):
            for index, core in enumerate(self.cores):
                self.beat(index)
                core.place()
                del core.running[:1]
            self.never_more_than_there_is()
        assert not any(core.queued for core in self.cores), [core.queued for core in self.cores]


TestSharedEngine = SharedEngine.TestCase
TestSharedEngine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
