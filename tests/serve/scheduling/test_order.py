"""Order policies, and the queue that uses them."""

import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.serve.baselines import ORDERS
from parrot.protocol.engine_api import StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.graph.nodes import CallOptions, Completion, Objective, SemanticVariable
from parrot.serve.prompts.encode import PieceKind
from parrot.serve.prompts.segments import Segment
from parrot.serve.scheduling.load import Charge
from parrot.serve.scheduling.queue import OrderPolicy, TaskQueue
from parrot.serve.scheduling.scheduler import order_maker
from parrot.serve.scheduling.task import CompletionTask
from tests.support.manual_clock import ManualClock

LATENCY, THROUGHPUT = PerformanceCriteria.LATENCY, PerformanceCriteria.THROUGHPUT


def charge(duration_s: float) -> Charge:
    """A charge with a predicted duration and no other load."""
    return Charge(1.0, 0.0, 0.0, duration_s, 0, 0, StepCosts(), 0.0)


class Line:
    """A queue of a server that runs one task at a time."""

    def __init__(self, policy: str = "critical_path", **config: object) -> None:
        self.clock = ManualClock()
        make = ORDERS.get(policy)
        if make is None:
            make = order_maker(GlobalSchedulerConfig.model_validate({"policy": policy, **config}))
        self.order = make(self.clock)
        self.queue = TaskQueue(self.order)
        self._num_tasks = 0

    def add(
        self,
        session: int = 1,
        *,
        path_s: float = 1.0,
        deadline: float | None = None,
        criteria: PerformanceCriteria = LATENCY,
        is_background: bool = False,
    ) -> CompletionTask:
        self._num_tasks += 1
        completion = Completion(
            id=self._num_tasks,
            request_id=1,
            session_id=session,
            options=CallOptions("f"),
            fill=(),
            output=SemanticVariable("v", "v", session),
            sampling=SamplingConfig(),
            objective=Objective(
                criteria, 0, path_s, deadline=deadline, is_background=is_background
            ),
        )
        segments = [Segment(PieceKind.CONSTANT, "text", None, True)]
        task = CompletionTask(completion, segments, (b"key",), self.clock.now(), 10)
        self.order.arrived(task)
        self.queue.push(task)
        return task

    def remain(self, session: int, seconds: float) -> None:
        for group in self.order.update_remaining_work(session, seconds):
            self.queue.touch(group)

    def later(self, seconds: float) -> None:
        self.clock._now += seconds

    def place(self, work_s: float = 1.0) -> CompletionTask:
        for task in self.order.due():
            if task in self.queue:
                self.queue.remove(task)
                self.queue.push(task)
        top = self.queue.top()
        assert top is not None
        task = top[1]
        self.queue.remove(task)
        self.order.placed(task, 0, charge(work_s))
        return task

    def end(self, task: CompletionTask) -> None:
        self.order.released(task, 0, charge(0.0), 0.0)
        self.order.finished(task)

    def run(self, work_s: float = 1.0) -> list[CompletionTask]:
        """Place and finish all queued tasks one by one."""
        done = []
        while self.queue:
            done.append(self.place(work_s))
            self.end(done[-1])
        assert self.queue.top() is None
        return done


def test_fcfs_sorts_by_arrival_only() -> None:
    line = Line("fcfs")
    tasks = []
    for session in (1, 2, 1, 2):
        tasks.append(line.add(session, path_s=session * 10.0, criteria=THROUGHPUT))
        line.remain(session, 10.0 / session)
        line.later(1)
    assert line.run() == tasks


def test_app_fifo_finishes_the_older_application() -> None:
    line = Line("app_fifo")
    one = line.add(1)
    line.later(1)
    two = line.add(2)
    line.later(1)
    three = line.add(1)
    assert line.run() == [one, three, two]


def test_las_serves_in_turns_of_equal_service() -> None:
    line = Line("las")
    tasks = [line.add(session) for session in (1, 1, 1, 2, 2)]
    first = [line.place(work_s=2.0) for _ in range(4)]
    assert [task.completion.session_id for task in first] == [1, 2, 1, 2]
    new = line.add(3)
    assert line.place() is new  # The new application has received no service.
    assert line.place() is tasks[2]


def test_without_applications_order_is_by_arrival() -> None:
    line = Line(app_fifo=False)
    tasks = [line.add(session) for session in (1, 2, 1)]
    assert line.run() == tasks


def test_the_least_remaining_work_goes_first_and_the_longest_path_in_it() -> None:
    line = Line()
    line.remain(1, 30.0)
    line.remain(2, 3.0)
    far = [line.add(1, path_s=path_s) for path_s in (2.0, 9.0)]
    near = [line.add(2, path_s=path_s) for path_s in (1.0, 2.0)]
    assert line.run() == [near[1], near[0], far[1], far[0]]


def test_finished_work_moves_an_application_forward() -> None:
    line = Line()
    line.remain(1, 30.0)
    line.remain(2, 20.0)
    one, two = line.add(1), line.add(2)
    line.remain(1, 10.0)
    assert line.place() is one
    line.remain(2, 40.0)  # More calls were submitted.
    line.remain(3, 30.0)
    three = line.add(3)
    assert line.run() == [three, two]


def test_read_calls_are_before_background_work_of_their_application() -> None:
    line = Line()
    background = line.add(criteria=THROUGHPUT, path_s=20.0, is_background=True)
    line.later(30)
    read = line.add(criteria=THROUGHPUT)
    assert line.run() == [read, background]


def test_latency_work_before_throughput_work() -> None:
    line = Line()
    batch, soon = line.add(1, criteria=THROUGHPUT), line.add(2)
    line.remain(1, 1.0)
    line.remain(2, 2.0)
    assert line.run() == [soon, batch]


@pytest.mark.parametrize("work_s", [1.0, 10.0, 60.0])
def test_a_long_application_waits_in_proportion_and_no_longer(work_s: float) -> None:
    """Short applications arrive without end, faster than they can be served."""
    line = Line()
    line.remain(0, work_s)
    long = line.add(0, criteria=THROUGHPUT)
    for session in range(1, 1000):
        line.remain(session, 0.5)
        line.add(session)
        line.later(1.0)
        if line.place() is long:
            break
    assert work_s < line.clock.now() < 2 * work_s + 15


def test_new_applications_pass_one_that_never_ends() -> None:
    line = Line()
    line.add(1)
    line.later(1.0)
    late = line.add(2)
    for _ in range(1000):
        line.later(1.0)
        task = line.place()
        line.end(task)
        if task is late:
            return
        line.add(1)
    pytest.fail("starved")


def test_an_application_that_paused_gets_a_new_start_time() -> None:
    line = Line()
    line.add(1)
    line.run()
    line.later(60)
    newer = line.add(2)
    line.later(1)
    again = line.add(1)
    assert line.run() == [newer, again]


def test_closed_sessions_leave_no_account() -> None:
    line = Line()
    line.remain(1, 5.0)
    task = line.add(1)
    line.remain(2, 5.0)
    line.order.forget(2)
    line.order.forget(1)
    assert line.run() == [task]
    line.remain(1, 0.0)  # The last update may come late.
    line.order.forget(1)
    assert line.order._accounts == {}  # type: ignore[attr-defined]


# Deadlines


def test_a_call_is_first_while_its_deadline_is_at_risk() -> None:
    line = Line()
    line.remain(1, 1.0)
    line.remain(2, 50.0)
    short, timed = line.add(1), line.add(2, path_s=10.0, deadline=40.0)
    line.later(18.9)  # 21.1 s are left for 10 s of work: not urgent.
    assert line.place() is short
    other = line.add(1)
    line.later(0.2)
    assert line.place() is timed
    assert line.place() is other


def test_a_call_with_an_unreachable_deadline_is_not_urgent() -> None:
    line = Line()
    line.remain(1, 1.0)
    line.remain(2, 50.0)
    timed = line.add(2, path_s=10.0, deadline=20.0)
    short = line.add(1)
    line.later(15.5)  # 4.5 s are left for 10 s of work.
    assert line.run() == [short, timed]


def test_among_urgent_calls_the_latest_start_decides() -> None:
    line = Line()
    calls = [(5.0, 9.0), (1.0, 4.0), (6.0, 9.5)]  # Path, deadline. Latest starts: 4, 3 and 3.5.
    tasks = [line.add(i, path_s=path_s, deadline=end) for i, (path_s, end) in enumerate(calls)]
    line.later(1.5)
    assert line.run() == [tasks[1], tasks[2], tasks[0]]


def test_finished_tasks_with_far_deadlines_are_dropped() -> None:
    line = Line()
    for _ in range(1000):
        line.add(1, deadline=1e6)
        line.run()
    assert len(line.order._deadlines._changes) < 100  # type: ignore[attr-defined]


# The queue


class Chaos(OrderPolicy):
    """Group keys that change at any time."""

    def __init__(self) -> None:
        self.keys = {group: float(group) for group in range(5)}

    def group(self, task: CompletionTask) -> Hashable:
        return task.completion.session_id

    def group_key(self, group: Hashable) -> float:
        assert isinstance(group, int)
        return self.keys[group]

    def task_key(self, task: CompletionTask) -> float:
        return task.remaining_path_s


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_queue_is_sorted_whatever_the_keys_do(seed: int) -> None:
    rng, line, order = random.Random(seed), Line(), Chaos()
    queue = TaskQueue(order)
    line.queue = queue
    present: list[CompletionTask] = []
    for _ in range(300):
        match rng.randrange(5):
            case 0 | 1:
                task = line.add(rng.randrange(5), path_s=rng.randrange(10))
                present.append(task)
            case 2 if present:
                queue.remove(present.pop(rng.randrange(len(present))))
            case 3:
                group = rng.randrange(5)
                order.keys[group] = rng.random()
                queue.touch(group)
            case _:
                top = queue.top()
                keys = [(order.keys[t.completion.session_id], t.remaining_path_s) for t in present]
                assert (top is None) == (not present)
                if top is not None:
                    assert top[0] == min(keys)
                    assert top[1] in present
        assert len(queue) == len(present)
        assert queue.num_groups == len({task.completion.session_id for task in present})
    assert set(queue.tasks()) == set(present)


@pytest.mark.parametrize("policy", ["critical_path", "las", "app_fifo"])
def test_tasks_of_a_stage_have_one_priority_on_an_engine(policy: str) -> None:
    line = Line(policy)
    tasks = [line.add(1) for _ in range(3)]
    line.remain(1, 30.0)
    places = []
    for task in tasks:
        places.append(line.order.priority_s(task))
        line.order.placed(task, 0, charge(10.0))
    assert len(set(places)) == 1


def test_critical_path_sends_only_urgency_to_engines() -> None:
    line = Line()
    line.remain(1, 90.0)
    calm = [line.add(1), line.add(2)]
    batch = line.add(2, criteria=THROUGHPUT)
    urgent = line.add(3, path_s=5.0, deadline=6.0)
    places = [line.order.priority_s(task) for task in (urgent, *calm, batch)]
    assert places[0] < places[1] == places[2] < places[3]


def test_running_applications_with_smaller_keys_are_ahead() -> None:
    line = Line()
    tasks = []
    for session in range(6):
        line.remain(session, float(session))
        tasks.append(line.add(session))
    task = tasks.pop(3)
    for other in tasks:
        line.order.placed(other, 7, charge(1.0))
    assert line.order.count_ahead(task, 7) == (3, 5)
    assert line.order.count_ahead(task, 8) == (0, 0)
    line.remain(0, 10.0)
    assert line.order.count_ahead(task, 7) == (2, 5)
    line.order.released(tasks[1], 7, charge(0.0), 0.0)
    line.order.finished(tasks[1])
    assert line.order.count_ahead(task, 7) == (1, 4)
    assert not Line("las").order.limits_concurrency


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_count_ahead_equals_a_walk_over_all_tasks(seed: int) -> None:
    rng, line = random.Random(seed), Line()
    queued: list[CompletionTask] = []
    placed: dict[CompletionTask, int] = {}
    for _ in range(80):
        session = rng.randrange(6)
        match rng.randrange(6):
            case 0 | 1:
                criteria = rng.choice([LATENCY, THROUGHPUT])
                deadline = rng.choice([None, line.clock.now() + rng.random() * 20])
                queued.append(line.add(session, path_s=5.0, criteria=criteria, deadline=deadline))
            case 2 if queued:
                task = queued.pop(rng.randrange(len(queued)))
                line.queue.remove(task)
                placed[task] = rng.randrange(2)
                line.order.placed(task, placed[task], charge(rng.random() * 5))
            case 3 if placed:
                task = rng.choice(list(placed))
                line.order.released(task, placed.pop(task), charge(0.0), 0.0)
                line.order.finished(task)
            case 4:
                line.remain(session, rng.random() * 20)
            case 5 if placed:
                task = rng.choice(list(placed))  # It must run again.
                line.order.released(task, placed.pop(task), charge(0.0), 0.0)
                line.order.updated(task)
                line.queue.push(task)
                queued.append(task)
            case _:
                line.later(rng.random() * 5)
        for task in queued[:2]:
            for engine_id in (0, 1):
                assert line.order.count_ahead(task, engine_id) == walk(
                    line, task, placed, engine_id
                )


def walk(
    line: Line, task: CompletionTask, placed: dict[CompletionTask, int], engine_id: int
) -> tuple[int, int]:
    there = [other for other, place in placed.items() if place == engine_id]
    others = {other.completion.session_id: other for other in there}
    others.pop(task.completion.session_id, None)
    keys = [line.order.group_key(line.order.group(other)) for other in others.values()]
    return sum(key <= line.order.group_key(line.order.group(task)) for key in keys), len(keys)


def test_a_held_group_returns_at_the_end_of_the_round() -> None:
    line = Line()
    line.remain(2, 10.0)
    first = [line.add(1), line.add(1)]
    second = line.add(2)
    assert line.queue.num_groups == 2
    line.queue.hold(first[0])
    assert line.place() is second
    assert line.queue.top() is None
    assert len(line.queue) == 2
    assert line.queue.num_groups == 1
    line.queue.end_round()
    assert line.run() == first
    assert line.queue.num_groups == 0


def test_the_priority_of_an_application_changes_when_a_call_finishes() -> None:
    line = Line("las")
    first, second = line.add(1), line.add(1)
    before = line.order.priority_s(first)
    line.order.placed(first, 0, charge(10.0))
    line.end(first)
    assert line.order.priority_s(second) > before  # The application has received more service.
