"""The cost of a placement with many queued tasks and many engines.

    python -m benchmark.serve.bench_scheduler --tasks 10000 --engines 512
    python -m benchmark.serve.bench_scheduler --curves

Fills the queue, then ends tasks in random order, one at a time. A scheduler round follows each end,
as in a busy service, until the queue is empty. Each end reduces the remaining work of an
application and so changes its position in the order. Times are CPU times, so other load on the
machine hardly affects them.
"""

import argparse
import random
import time
from collections import Counter
from typing import Any

from benchmark.results import Report, run
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import Boundary, LedgerContext, PrefixIndex
from parrot.serve.graph.nodes import CallOptions, Completion, Objective, PieceKind, SemanticVariable
from parrot.serve.prompts.segments import PrefixHasher, Segment, extend_key
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask, Placement
from parrot.utils.clock import MonotonicClock

NUM_APPS, NUM_TEMPLATES = 200, 50


def make_task(
    number: int, rng: random.Random, hasher: PrefixHasher, num_tenants: int
) -> CompletionTask:
    """One of 200 apps, some with task groups, with one of 50 templates of about 1,000 tokens."""
    session = rng.randrange(NUM_APPS)
    is_map = rng.random() < 0.7
    objective = Objective(
        PerformanceCriteria.THROUGHPUT if is_map else PerformanceCriteria.LATENCY,
        depth=int(is_map),
        remaining_path_s=rng.random() * 20,
        task_group=f"reduce {session}" if is_map else None,
    )
    completion = Completion(
        id=number,
        request_id=number,
        session_id=session,
        options=CallOptions("f", tenant=f"tenant {session % num_tenants}"),
        fill=(),
        output=SemanticVariable(f"v{number}", "out", session),
        sampling=SamplingConfig(max_gen_length=200),
        objective=objective,
    )
    template = f"template {rng.randrange(NUM_TEMPLATES)} " * 250
    segments = [
        Segment(PieceKind.CONSTANT, template),
        Segment(PieceKind.VALUE, f"value {number} " * 20),
        Segment(PieceKind.CONSTANT, "Answer:", None, True),
    ]
    key = hasher.root(completion.options.tenant, False)
    keys = tuple([key := extend_key(key, segment) for segment in segments])
    return CompletionTask(completion, segments, keys, number * 1e-4, expected_output=64)


def warm(index: PrefixIndex, tasks: list[CompletionTask], engines: int, rng: random.Random) -> None:
    """Cache the template of every tenth task on an engine."""
    for i, task in enumerate(tasks[::10]):
        engine_id = rng.randrange(engines)
        context = LedgerContext(i, engine_id, "tenant", None, 0, task.lengths[0], 0, 0.0, 0.0)
        index.publish(context, Boundary(task.keys[0], task.lengths[0], 0))


def time_placements(
    num_tasks: int, num_engines: int, slots: int, num_tenants: int
) -> dict[str, Any]:
    rng, hasher, index = random.Random(0), PrefixHasher(), PrefixIndex()
    clock = MonotonicClock()
    scheduler = Scheduler(GlobalSchedulerConfig(), clock, index)
    for engine_id in range(num_engines):
        scheduler.engines.add(engine_id, "model", slots, 200_000)
    tasks = [make_task(i, rng, hasher, num_tenants) for i in range(num_tasks)]
    warm(index, tasks, num_engines, rng)

    started = time.process_time()
    remaining = Counter(task.completion.session_id for task in tasks)
    for session_id, num_calls in remaining.items():
        scheduler.update_remaining_work(session_id, float(num_calls))
    for task in tasks:
        scheduler.add(task)
    add_s = time.process_time() - started

    started = time.process_time()
    running: list[Placement] = scheduler.schedule()
    first_s, num_first = time.process_time() - started, len(running)

    rounds: list[float] = []
    while scheduler.num_queued:
        position = rng.randrange(len(running))
        running[position], running[-1] = running[-1], running[position]
        ended = running.pop()
        started = time.process_time()
        scheduler.finished(ended.task, ended.engine_id)
        session_id = ended.task.completion.session_id
        remaining[session_id] -= 1
        scheduler.update_remaining_work(session_id, float(remaining[session_id]))
        running += scheduler.schedule()
        rounds.append(time.process_time() - started)
    scheduler.check_integrity()
    rounds.sort()
    num_placed = num_tasks - num_first
    return {
        "tasks": num_tasks,
        "engines": num_engines,
        "slots_per_engine": slots,
        "tenants": num_tenants,
        "add_us": round(add_s / num_tasks * 1e6, 1),
        "first_round": {"placed": num_first, "us_each": round(first_s / num_first * 1e6, 1)},
        "later_rounds": {
            "placed": num_placed,
            "us_each": round(sum(rounds) / max(1, num_placed) * 1e6, 1),
            "p50_us": round(rounds[len(rounds) // 2] * 1e6, 1) if rounds else None,
            "p99_us": round(rounds[int(len(rounds) * 0.99)] * 1e6, 1) if rounds else None,
        },
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--slots", type=int, default=4, help="tasks that an engine runs at once")
    parser.add_argument("--tenants", type=int, default=4, help="at most 200, one for each app")
    parser.add_argument(
        "--curves", action="store_true", help="vary the numbers of tasks and engines"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("global_scheduler", GlobalSchedulerConfig().model_dump(mode="json"))
    if args.curves:
        tasks, engines = (100, 300, 1000, 3000, 10_000), (2, 8, 32, 128, 512)
        for count in tasks:
            report.add("by_tasks", time_placements(count, 512, args.slots, args.tenants))
        for count in engines:
            report.add("by_engines", time_placements(10_000, count, args.slots, args.tenants))
    else:
        report |= time_placements(args.tasks, args.engines, args.slots, args.tenants)


if __name__ == "__main__":
    run(__name__)
