"""Fair sharing between tenants: the bound of the virtual token counter for random arrivals, and no
empty slot while tasks are queued."""

from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.contexts.index import Boundary, LedgerContext
from parrot.serve.scheduling.fairness import Counters
from parrot.serve.scheduling.load import service_s
from parrot.serve.scheduling.task import CompletionTask
from tests.serve.scheduling.scheduler_bench import LATENCY, THROUGHPUT, Bench

WEIGHTS = {"a": 1.0, "b": 1.0, "heavy": 3.0}
MAX_PROMPT, MAX_OUTPUT = 2000, 400
COSTS = StepCosts()


class Cluster(Bench):
    """One engine whose tasks finish when the test calls `end`. Output lengths differ from the
    predictions."""

    def __init__(self, slots: int) -> None:
        super().__init__(policy="fcfs", weigh=WEIGHTS.__getitem__)
        self.slots = slots
        self.engines(1, slots=slots, tokens=10**9)
        self.queued: Counter[str] = Counter()
        self.running: list[CompletionTask] = []
        self.served: defaultdict[str, float] = defaultdict(float)

    def arrive(self, tenant: str, prompt: int, output: int) -> CompletionTask:
        task = self.task(tenant=tenant, prefix_len=prompt, output=output)
        self.queued[tenant] += 1
        self.add(task)
        self.go_on()
        return task

    def end(self, which: int, fraction: float) -> None:
        """Finish a running task after `fraction` of its longest output."""
        task = self.running.pop(which % len(self.running))
        task.used = (task.prompt_len, 1 + int(fraction * (task.max_output - 1)))
        self.scheduler.finished(task, 0)
        self.served[task.completion.options.tenant] += task.service_s
        self.go_on()

    def go_on(self) -> None:
        self.later(0.01)
        for placement in self.scheduler.schedule():
            self.queued[placement.task.completion.options.tenant] -= 1
            self.running.append(placement.task)
        waiting = sum(self.queued.values())
        assert not waiting or len(self.running) >= self.slots, "a slot is empty"
        assert len(self.running) <= 2 * self.slots

    @property
    def bound(self) -> float:
        """The largest difference in service between two waiting tenants. Each may have had all
        slots at the start and at the end, twice with overcommitted tasks, and be one call ahead."""
        dearest = service_s(COSTS, MAX_PROMPT + 1, MAX_PROMPT + 1, MAX_OUTPUT)
        return 2 * (2 * 2 * self.slots + 1) * dearest


ARRIVAL = st.tuples(
    st.sampled_from(sorted(WEIGHTS)), st.integers(1, MAX_PROMPT), st.integers(1, MAX_OUTPUT)
)
END = st.tuples(st.integers(0, 100), st.floats(0.0, 1.0))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(ARRIVAL, min_size=20, max_size=60),
    st.lists(st.one_of(ARRIVAL, END, END), max_size=150),
)
def test_two_waiting_tenants_differ_by_at_most_the_bound(
    slots: int, first: list[tuple[str, int, int]], events: list[tuple[str | int, ...]]
) -> None:
    cluster = Cluster(slots)
    for tenant, prompt, output in first:
        cluster.arrive(tenant, prompt, output)
    # By pair: the smallest and the largest difference since both tenants wait.
    extremes: dict[tuple[str, str], tuple[float, float]] = {}
    for event in events:
        if len(event) == 3:
            cluster.arrive(*event)  # type: ignore[arg-type]
        elif cluster.running:
            cluster.end(*event)  # type: ignore[arg-type]
        for pair in (("a", "b"), ("a", "heavy"), ("b", "heavy")):
            if not all(cluster.queued[tenant] for tenant in pair):
                extremes.pop(pair, None)
                continue
            one, other = (cluster.served[tenant] / WEIGHTS[tenant] for tenant in pair)
            least, most = extremes.get(pair, (one - other, one - other))
            extremes[pair] = min(least, one - other), max(most, one - other)
            assert extremes[pair][1] - extremes[pair][0] <= cluster.bound
    while cluster.running:
        cluster.end(0, 0.5)
        cluster.scheduler.check_integrity()
    assert not +cluster.queued, "a tenant starved"
    cluster.scheduler.check_integrity()


def test_one_call_does_not_wait_for_ten_thousand_of_another_tenant() -> None:
    cluster = Cluster(slots=4)
    for _ in range(1000):
        cluster.arrive("a", 500, 100)
    for _ in range(20):
        cluster.end(0, 1.0)
    chat = cluster.arrive("b", 500, 100)
    cluster.end(0, 1.0)
    assert chat in cluster.running


def test_weights_divide_the_service() -> None:
    cluster = Cluster(slots=4)
    for _ in range(1000):
        cluster.arrive("a", 500, 100)
        cluster.arrive("heavy", 500, 100)
    for _ in range(1000):
        cluster.end(0, 0.5)
    assert cluster.served["heavy"] == pytest.approx(3 * cluster.served["a"], rel=0.02)


def test_inactivity_earns_no_credit() -> None:
    """A tenant that returns or starts late gets no compensation for the time before."""
    cluster = Cluster(slots=1)
    cluster.arrive("b", 100, 100)
    cluster.end(0, 1.0)
    for _ in range(500):
        cluster.arrive("a", 500, 100)
    for _ in range(300):
        cluster.end(0, 1.0)
    for _ in range(100):
        cluster.arrive("b", 500, 100)
    before = dict(cluster.served)
    for _ in range(100):
        cluster.end(0, 1.0)
    gained = {tenant: cluster.served[tenant] - before[tenant] for tenant in "ab"}
    assert gained["a"] == pytest.approx(gained["b"], rel=0.05)


def test_a_short_absence_keeps_the_debt() -> None:
    cluster = Cluster(slots=1)
    for _ in range(50):
        cluster.arrive("a", 500, 100)
        cluster.arrive("b", 500, 100)
    for _ in range(10):
        cluster.arrive("heavy", MAX_PROMPT, MAX_OUTPUT)
        while not any(t.completion.options.tenant == "heavy" for t in cluster.running):
            cluster.end(0, 1.0)
        cluster.end(0, 1.0)  # The tenant has no task now, and returns at once.
    share = cluster.served["heavy"] / WEIGHTS["heavy"]
    assert share <= cluster.served["a"] + cluster.bound / 3


def test_the_first_user_pays_for_a_shared_prefix() -> None:
    bench = Bench()
    bench.engines(1)
    first, second = [
        bench.task("shared", prefix_len=1000, output=100, tenant=tenant) for tenant in "ab"
    ]
    bench.add(first)
    bench.run()
    bench.later(0.1)
    bench.add(second)
    bench.run()
    bench.later(1e6)
    for task in (first, second):
        bench.scheduler.finished(task, 0)
    output = first.expected_output
    assert first.service_s == pytest.approx(service_s(COSTS, 1001, 1001, output))
    assert second.service_s == pytest.approx(service_s(COSTS, 1, 1, output))


def test_a_stopped_call_pays_for_the_time_that_it_ran() -> None:
    bench = Bench()
    bench.engines(1)
    early, late = bench.task(output=400), bench.task(output=400)
    bench.add(early)
    bench.run()
    bench.scheduler.finished(early, 0)
    assert early.service_s == 0
    bench.add(late)
    bench.run()
    bench.later(0.2)
    bench.scheduler.finished(late, 0)
    assert 0 < late.service_s < service_s(COSTS, late.prompt_len, late.prompt_len, 201)


def test_the_order_policy_applies_inside_a_tenant() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    slow = bench.task(criteria=THROUGHPUT, path=50, tenant="a")
    short, long = bench.task(path=1, tenant="a"), bench.task(path=9, tenant="a")
    others = [bench.task(session=2, criteria=LATENCY, tenant="b") for _ in range(3)]
    bench.add(slow, short, long, *others)
    order = []
    while bench.scheduler.num_queued:
        ((task, engine_id),) = bench.run().items()
        order.append(task)
        bench.later(60)
        bench.scheduler.finished(task, engine_id)
    assert [task for task in order if task not in others] == [long, short, slow]
    tenants = [task.completion.options.tenant for task in order]
    assert sorted(tenants[:2]) == sorted(tenants[2:4]) == ["a", "b"]


def test_small_calls_of_one_tenant_do_not_starve_a_large_one_of_another() -> None:
    bench = Bench(policy="fcfs")
    bench.engines(1, tokens=2000)
    running: deque[tuple[CompletionTask, int]] = deque()

    def small() -> CompletionTask:
        return bench.task(tenant="b", prefix_len=200, criteria=THROUGHPUT)

    bench.add(*(small() for _ in range(8)))
    running.extend(bench.run().items())
    large = bench.task(tenant="a", prefix_len=1700)
    bench.add(large)
    num_ended = 0
    while large not in dict(running):
        bench.add(small())
        bench.later(0.01)
        bench.scheduler.finished(*running.popleft())
        running.extend(bench.run().items())
        num_ended += 1
        assert num_ended < 100, "the large call starves"
    assert num_ended > 10


def test_an_overcommitted_chat_stays_with_its_cached_prefix() -> None:
    """The engine limits the effect of the other tenant's calls, so a less loaded engine is not
    better."""
    bench = Bench()
    for length in (4000, 10):  # The first engine has the long prompts.
        bench.engines(1, slots=8)
        bench.add(*(bench.task(tenant="a", prefix_len=length, output=800) for _ in range(8)))
        while bench.run():
            pass
    bench.later(10.0)
    crowded, other = bench.scheduler.engines
    assert crowded.num_tasks == other.num_tasks == 8
    assert crowded.step_s > 1.1 * other.step_s
    bench.add(*(bench.task(tenant="a", output=800) for _ in range(50)))
    assert bench.run() == {}
    chat = bench.task("conversation", tenant="b", prefix_len=1000, output=400)
    context = LedgerContext(1, crowded.id, "b", None, 0, 1000, 0, 0.0, 0.0)
    bench.index.publish(context, Boundary(chat.keys[0], 1000, 0))
    bench.add(chat)
    assert bench.run() == {chat: crowded.id}


@pytest.mark.parametrize(("criteria", "num_placed"), [(LATENCY, 4), (THROUGHPUT, 0)])
def test_interactive_calls_exceed_the_slots_within_their_tenants_share(
    criteria: PerformanceCriteria, num_placed: int
) -> None:
    """Two tenants have equal weights, so each has half of the engine's slots."""
    bench = Bench(policy="fcfs")
    for model in ("x", "y", "z"):
        bench.engines(1, model=model, slots=8)
    bench.add(*(bench.task(tenant="a") for _ in range(24)))
    assert len(bench.run()) == 24
    bench.add(*(bench.task(tenant="b", models=("x",), criteria=criteria) for _ in range(8)))
    placed = [task for _ in range(8) for task in bench.run()]
    assert len(placed) == num_placed


@pytest.mark.parametrize(
    ("running", "tenant", "num_placed"),
    [
        ({"heavy": 8}, "a", 2),  # A quarter of the slots.
        ({"a": 8}, "heavy", 5),  # Until it has half of what its weight stands for.
        ({"heavy": 1, "a": 2}, "heavy", 1),
    ],
)
def test_the_share_of_the_slots_is_weighted(
    running: dict[str, int], tenant: str, num_placed: int
) -> None:
    bench = Bench(policy="fcfs", weigh=WEIGHTS.__getitem__)
    num_running = sum(running.values())
    bench.engines(1, slots=num_running)
    bench.add(*(bench.task(tenant=name) for name, num in running.items() for _ in range(num)))
    assert len(bench.run()) == num_running
    bench.add(*(bench.task(tenant=tenant) for _ in range(8)))
    placed = [task for _ in range(8) for task in bench.run()]
    assert len(placed) == num_placed


@pytest.mark.parametrize(("num_running", "is_first"), [(3, False), (4, True)])
def test_whether_a_tenant_is_crowded_out_depends_on_weights(
    num_running: int, is_first: bool
) -> None:
    """The engine computes calls of a tenant first that has fewer calls per weight than others."""
    bench = Bench(policy="fcfs", weigh=WEIGHTS.__getitem__)
    bench.engines(1, slots=8)
    others = [bench.task(tenant="heavy") for _ in range(num_running)]
    bench.add(*others, bench.task(tenant="b", criteria=THROUGHPUT, models=("other",)))
    priorities = [placement.priority for placement in bench.scheduler.schedule()]
    bench.add(bench.task(tenant="a"))
    (placement,) = bench.scheduler.schedule()
    assert (placement.priority < min(priorities)) is is_first


def test_counters_of_many_idle_tenants_are_forgotten() -> None:
    counters = Counters(lambda tenant: 1.0)
    for n in range(10_000):
        counters.queued(f"tenant {n}")
        counters.unqueued(f"tenant {n}")
    assert len(counters._idle) < 5000
    counters.check_integrity({}, {})
