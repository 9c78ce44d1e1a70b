"""An engine of which others have a part: what is placed there keeps to the lease."""

import pytest

from parrot.protocol.engine_api import Lease, LeaseUse
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.scheduling.fairness import FairQueue
from parrot.serve.scheduling.scheduler import take_lease
from tests.serve.scheduling.scheduler_bench import Bench

NEED = 111  # tokens of a task, with the room for its output


def lease(bench: Bench, number: int, tokens: int, calls: int = 100) -> LeaseUse:
    return take_lease(bench.scheduler, 0, Lease(number=number, tokens=tokens, calls=calls))


def test_no_more_is_placed_than_the_latest_lease_allows() -> None:
    bench = Bench()
    bench.engines(1, slots=4, tokens=1000)
    bench.add(*[bench.task() for _ in range(6)])
    assert lease(bench, 0, 0, 0).calls == 0
    assert not bench.run()
    use = lease(bench, 1, 300)
    assert (use.number, use.tokens, use.wanted_tokens) == (1, 300, 6 * NEED)
    assert (use.wanted_calls, use.least_tokens) == (6, NEED)
    placed = bench.run()
    assert len(placed) == 2
    use = lease(bench, 3, 100, 1)
    assert (use.tokens, use.calls) == (2 * NEED, 2), "they go on"
    assert lease(bench, 2, 1000) == use, "it comes late"
    assert not bench.run()
    bench.scheduler.ended(next(iter(placed)), 0)
    assert not bench.run()
    assert lease(bench, 4, 1000, 2).wanted_calls == 5
    assert len(bench.run()) == 1
    assert lease(bench, 5, 1000, 100).tokens == 1000
    assert len(bench.run()) == 2, "it has four places"


def test_an_idle_engine_takes_what_its_lease_holds_or_anything_if_that_is_all() -> None:
    bench = Bench()
    bench.engines(1, tokens=500)
    bench.add(bench.task(prefix_len=300, output=1000))
    assert lease(bench, 1, 499).least_tokens == 500
    assert not bench.run()
    lease(bench, 2, 500)
    assert len(bench.run()) == 1


def test_nobody_is_squeezed_in_at_the_cost_of_other_servecores() -> None:
    for is_leased in (False, True):
        bench = Bench()
        bench.engines(1, slots=4)
        if is_leased:
            lease(bench, 1, 10**6, 4)
        bench.add(*[bench.task(tenant="crowd") for _ in range(8)])
        assert len(bench.run()) == 4
        bench.add(bench.task(tenant="chat"))
        assert len(bench.run()) == (0 if is_leased else 1)


def test_an_engine_that_drains_is_wanted_for_what_runs_there_alone() -> None:
    bench = Bench()
    bench.engines(1, slots=2)
    bench.add(*[bench.task() for _ in range(5)])
    lease(bench, 1, 1000)
    bench.run()
    assert lease(bench, 2, 1000).wanted_calls == 5
    load = bench.scheduler.engines.get(0)
    bench.scheduler.engines.set_draining(load, True)
    use = lease(bench, 3, 1000)
    assert (use.wanted_calls, use.wanted_tokens, use.least_tokens) == (2, 2 * NEED, 0)


def test_queued_calls_that_others_may_run_count_in_part() -> None:
    bench = Bench()
    bench.engines(2, slots=1)
    bench.add(*[bench.task() for _ in range(6)])
    bench.run()
    bench.add(bench.task(models=("m",)), bench.task(models=("other",)))
    assert lease(bench, 1, 10**6, 1).wanted_calls == 1 + 4 / 2 + 1


def test_what_is_wanted_is_told_without_a_look_at_each_queued_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.engines(1, tokens=5000)
    tasks = [bench.task(own_len=n, tenant=f"tenant {n % 3}") for n in (1, 900, 30, 400)]
    bench.add(*tasks, huge := bench.task(output=10**6))
    lease(bench, 1, 0, 0)
    bench.run()
    monkeypatch.setattr(FairQueue, "tasks", None)
    use = lease(bench, 2, 0, 0)
    assert (use.wanted_tokens, use.least_tokens, use.wanted_calls) == (5 * 5000, 5000, 5)
    bench.scheduler.remove(huge)
    use = lease(bench, 3, 0, 0)
    assert (use.wanted_tokens, use.least_tokens) == (4 * 110 + 1331, 1010)
    bench.scheduler.remove(tasks[1])
    assert lease(bench, 4, 0, 0).least_tokens == 510
    monkeypatch.undo()
    bench.scheduler.check_integrity()


def test_an_engine_prefers_nobody_for_when_his_servecore_began() -> None:
    benches = [Bench(began=began) for began in (0.0, 5e6)]
    priorities = set()
    for bench in benches:
        bench.engines(1)
        bench.clock.pass_time(100.0)
        bench.add(bench.task(), bench.task(criteria=PerformanceCriteria.THROUGHPUT))
        priorities.add(tuple(placement.priority for placement in bench.scheduler.schedule()))
    ((latency, throughput),) = priorities
    assert latency < throughput
