"""Summarise the calls of a window as a row of figures."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from parrot.simulation.report import percentile
from tests.scale.simulated.shard import Outcome
from tests.scale.simulated.traffic import Kind


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of several shards into one."""
    total = Outcome(outcomes[0].window)
    for one in outcomes:
        total.calls += one.calls
        total.jobs += one.jobs
        total.counts += one.counts
        total.busy_s += one.busy_s
        total.late += one.late
        total.core_s += one.core_s
        total.written += one.written
        total.ends += one.ends
        total.most_queued = max(total.most_queued, one.most_queued)
    return total


def summary(outcome: Outcome) -> dict[str, Any]:
    """Summarise the calls that ended in the window and the jobs that began in it.

    `hit` is the share of prompt tokens that no engine computed. Prefetches count as computed.
    `bound` is the same share with a cache of unlimited size. `reused` is, by kind, the number of
    tokens that calls found in the cache over those that they could have found."""
    window = outcome.window
    begin, end = window.warm_up_s, window.end_s
    ended = [c for c in outcome.calls if c.ended is not None and begin <= c.ended < end]
    prompts = sum(call.prompt for call in ended)
    computed = sum(counts.computed for counts in outcome.counts)
    waits = [call.waited_s for call in ended]
    busy = outcome.busy_s
    row: dict[str, Any] = {
        "engines": len(busy),
        "calls": len(ended),
        "calls_per_s": len(ended) / (end - begin),
        "failed": sum(not call.is_done for call in ended),
        "rerun": sum(call.attempts > 1 for call in ended),
        "late": outcome.late,
        "hit": 1.0 - computed / prompts if prompts else 0.0,
        "bound": sum(call.ideal for call in ended) / prompts if prompts else 0.0,
        "wait_p99_s": percentile(waits, 99),
        "most_queued": outcome.most_queued,
        "busy": fmean(busy) / (end - begin),
        "busy_p50_over_mean": percentile(busy, 50) / fmean(busy) if any(busy) else 1.0,
        "busy_p99_over_mean": percentile(busy, 99) / fmean(busy) if any(busy) else 1.0,
        "busiest_over_mean": max(busy) / fmean(busy) if any(busy) else 1.0,
        "reused": {},
        "job_s": {},
    }
    for kind in Kind:
        mine = [call for call in ended if call.kind is kind]
        if ideal := sum(call.ideal for call in mine):
            row["reused"][str(kind)] = sum(min(call.cached, call.ideal) for call in mine) / ideal
        took = [j.took_s for j in outcome.jobs if j.kind is kind and begin <= j.began < end]
        if took:
            row["job_s"][str(kind)] = {
                "count": len(took),
                "mean": fmean(took),
                "p50": percentile(took, 50),
                "p99": percentile(took, 99),
            }
    return row
