"""Places for programs: never more than an engine holds, and nobody waits for ever."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import StepCosts
from parrot.serve.contexts.think_time import Source, ThinkTimes
from parrot.serve.scheduling.admission import Admission
from parrot.serve.scheduling.task import CompletionTask
from tests.serve.scheduling.scheduler_bench import Bench

MEMORY, ROOM = 7112, 6400  # tokens of KV that an engine has, and of which it gives places


class Programs(Bench):
    """Programs whose turns continue each other, on engines with room for `ROOM` tokens."""

    def __init__(self, num_engines: int = 1, *, token_s: float = 0.0) -> None:
        super().__init__(policy="fcfs", admission=True)
        self.engines(num_engines)
        for load in self.scheduler.engines:
            self.admission.add_engine(load.id, MEMORY, StepCosts(prefill_s=token_s))
        self.before = self.task().completion

    def turn(self, session: int, size: int) -> CompletionTask:
        """A turn of so many tokens, which continues another; it is queued."""
        task = self.task(session=session, prefix_len=1, own_len=size - 2, output=1)
        task.expected_output = 1
        task.completion.previous = self.before
        self.add(task)
        return task

    def end(self, *tasks: CompletionTask) -> None:
        for task in tasks:
            (engine_id,) = [load.id for load in self.scheduler.engines if task in load.tasks]
            self.think_times.ended(task.completion.session_id, Source.of(task.completion))
            self.scheduler.ended(task, engine_id)

    def used(self, engine_id: int) -> int:
        return self.admission._rooms[engine_id].used

    @property
    def engine_id(self) -> int:
        return next(iter(self.scheduler.engines)).id


def test_as_many_run_as_fit_and_the_others_wait_whole_turns() -> None:
    bench = Programs()
    tasks = [bench.turn(session, 2000) for session in range(5)]
    assert list(bench.run()) == tasks[:3]
    assert bench.scheduler.num_queued == bench.admission.num_waiting == 2
    assert bench.run() == {}


def test_a_program_keeps_its_place_while_it_thinks_and_has_no_credit_to_lose_it() -> None:
    bench = Programs(token_s=1.0)  # computing anything again costs the credit of hours
    first = [bench.turn(session, 2000) for session in range(3)]
    bench.run()
    waiting = bench.turn(9, 2000)
    bench.run()
    bench.end(first[0])  # there is credit for the first to give way
    assert list(bench.run()) == [waiting]
    assert bench.given_up == [(bench.engine_id, 0)]
    bench.end(first[1], waiting)
    late = bench.turn(0, 2000)
    assert bench.run() == {}
    again = bench.turn(1, 2100)  # it has its place, and goes before who waits
    assert list(bench.run()) == [again]
    assert late in bench.scheduler.queued(())


def test_whoever_waits_gets_in_when_there_is_credit_again() -> None:
    bench = Programs(token_s=1e-3)
    first = [bench.turn(session, 2000) for session in range(3)]
    bench.run()
    bench.end(*first)
    for session in range(3, 6):
        bench.turn(session, 2000)
    assert len(bench.run()) == 1 + 1  # 2 s of credit, of which each takes 2 s
    when = bench.scheduler.next_change()
    assert when is not None
    bench.later(when - bench.clock.now() + 1e-6)
    assert len(bench.run()) == 1


def test_the_farthest_next_turn_gives_way() -> None:
    bench = Programs(token_s=1.0)
    tasks = {name: bench.turn(i, 2000) for i, name in enumerate(("slow", "quick", "other"))}
    for name, task in tasks.items():
        options = replace(task.completion.options, func_name=name)
        task.completion.options = options
        pause_s = {"slow": 60.0, "quick": 2.0, "other": 5.0}[name]
        for session in range(100, 120):
            source = Source.of(task.completion)
            bench.think_times.ended(session, source)
            bench.think_times.continued(session, source, pause_s)
    bench.run()
    bench.end(*tasks.values())
    bench.turn(7, 2000)
    bench.run()
    assert bench.given_up == [(bench.engine_id, 0)]


def test_small_programs_and_calls_that_nothing_continues_never_wait() -> None:
    bench = Programs()
    for session in range(4):
        bench.turn(session, 3000)
    bench.run()
    assert bench.admission.num_waiting == 2
    small = [bench.turn(session, ROOM // 64) for session in range(10, 30)]
    single = bench.task(session=40, own_len=5000)
    bench.add(single)
    assert set(bench.run()) == {*small, single}


def test_a_program_that_fits_goes_before_one_that_does_not_but_not_for_ever() -> None:
    bench = Programs(token_s=1.0)
    held = bench.turn(0, 3200)
    bench.run()
    large = bench.turn(1, 6000)
    bench.run()
    for session in range(2, 100):
        passing = bench.turn(session, 1000)
        if passing not in bench.run():
            break
        bench.end(passing)
        bench.scheduler.forget_session(session)
    assert 10 < session < 99
    bench.end(held)
    bench.scheduler.forget_session(0)
    assert list(bench.run()) == [large]


def test_a_program_runs_where_it_has_its_place_or_where_there_is_one() -> None:
    bench = Programs(2)
    tasks = [bench.turn(session, 3000) for session in range(4)]
    placed = bench.run()
    assert set(placed) == set(tasks)
    engines = [load.id for load in bench.scheduler.engines]
    assert [bench.used(engine_id) for engine_id in engines] == [6000, 6000]
    bench.end(*tasks)
    again = [bench.turn(session, 3000) for session in (3, 2, 1, 0)]
    now = bench.run()
    where = {task.completion.session_id: engine_id for task, engine_id in placed.items()}
    assert {task.completion.session_id: now[task] for task in again} == where


def test_who_waits_for_an_engine_that_is_lost_goes_elsewhere() -> None:
    bench = Programs()
    held = bench.turn(0, 6000)
    bench.run()
    waiting = bench.turn(1, 6000)
    assert bench.run() == {}
    lost = bench.engine_id
    bench.end(held)
    bench.admission.remove_engine(lost)
    bench.scheduler.engines.remove(lost)
    assert bench.run() == {}
    bench.engines(1)
    assert list(bench.run()) == [waiting]


def test_a_call_that_is_cancelled_while_it_waits_waits_no_more() -> None:
    bench = Programs()
    bench.turn(0, 6000)
    bench.run()
    waiting = bench.turn(1, 6000)
    bench.run()
    bench.scheduler.update(waiting)
    bench.run()
    bench.scheduler.remove(waiting)
    assert bench.admission.num_waiting == bench.scheduler.num_queued == 0
    bench.scheduler.check_integrity()


@settings(deadline=None)
@given(
    st.lists(st.integers(50, 4000), min_size=2, max_size=12),
    st.floats(0.0, 1e-2),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_places_never_exceed_the_room_and_nobody_starves(
    sizes: list[int], token_s: float, num_engines: int, seed: int
) -> None:
    """Whoever lets a large program in has room for all: only growth and small ones exceed it."""
    bench, draw = Programs(num_engines, token_s=token_s), random.Random(seed)
    thinking: dict[int, float] = dict.fromkeys(range(len(sizes)), 0.0)
    running: dict[CompletionTask, float] = {}
    waiting_since: dict[int, float] = {}
    entered = 0
    for _ in range(400):
        now = bench.clock.now()
        for session in [s for s, until in thinking.items() if until <= now]:
            del thinking[session]
            waiting_since[session] = now
            bench.turn(session, sizes[session])
        for task in [task for task, end in running.items() if end <= now]:
            del running[task]
            bench.end(task)
            thinking[task.completion.session_id] = now + draw.uniform(0.1, 30.0)
        for task in bench.run():
            running[task] = now + draw.uniform(0.1, 3.0)
            entered += 1
            del waiting_since[task.completion.session_id]
        for load in bench.scheduler.engines:
            small = sum(size for size in sizes if size <= ROOM / 64)
            assert bench.used(load.id) <= ROOM + small
        longest = max(sizes) * token_s / 0.2 * len(sizes) + 1000.0
        assert all(now - since < longest for since in waiting_since.values())
        bench.later(draw.uniform(0.1, 3.0))
    assert entered > len(sizes)


def test_without_engines_that_were_added_nobody_waits() -> None:
    bench = Bench(policy="fcfs")
    bench.engines(1)
    assert bench.admission.next_change() is None
    tasks = [bench.task(session=session, own_len=100_000) for session in range(5)]
    bench.add(*tasks)
    assert len(bench.run()) == 5


@pytest.mark.parametrize("order", ["arrived", "reversed"])
def test_who_came_first_goes_first(order: str) -> None:
    bench = Programs()
    bench.turn(0, 6000)
    (held,) = bench.run()
    tasks = [bench.turn(session, 3000) for session in range(1, 5)]
    bench.run()
    if order == "reversed":
        for task in reversed(tasks):
            bench.scheduler.update(task)
        bench.run()
    bench.end(held)
    assert list(bench.run()) == tasks[:2]


def test_a_place_on_a_lost_engine_is_gone() -> None:
    clock = Bench().clock
    admission = Admission(clock, ThinkTimes(), lambda engine_id, session_id: None)
    admission.add_engine(3, MEMORY, None)
    bench = Programs()
    turn = bench.turn(0, 1000)
    admission.arrived(turn)
    assert admission.admit(turn, 3, list) == 3
    admission.ended(turn)
    admission.remove_engine(3)
    admission.check_integrity([])
    assert not admission._programs
