"""Summary of a recorded or replayed trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from parrot.simulation.trace import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a trace. The job completion time (JCT) of a session is the time from its start to
    the answer of its last read."""

    num_sessions: int
    num_answered: int  # Sessions with an answered read. Only these have a JCT.
    num_failed_reads: int
    jct_mean_s: float
    jct_p50_s: float
    jct_p99_s: float
    makespan_s: float  # From the start of the first session to the last answer.
    tokens_per_s: float  # Output tokens per second of the makespan.
    output_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int | None  # None: unknown, for example because ServeCore was killed.
    evicted_tokens: int | None  # None: as above.
    num_reruns: int  # Attempts of calls after the first.


@dataclass(frozen=True, slots=True)
class Change:
    """The JCT of one session under two settings, in seconds. `index` is its position in the
    trace."""

    index: int
    before_s: float
    after_s: float

    @property
    def ratio(self) -> float:
        """Above 1: the session became faster."""
        return self.before_s / self.after_s if self.after_s else 1.0


def summarize(trace: Trace) -> Summary:
    times = [session.jct_s for session in trace.sessions if session.jct_s is not None]
    rows = [row for session in trace.sessions for row in session.calls if row.kind == "semantic"]
    answers = [answer for session in trace.sessions for answer in session.answers]
    ends = [answer.at for answer in answers if answer.error is None]
    makespan = max(ends) - min(session.began.at for session in trace.sessions) if ends else 0.0
    num_output = sum(row.output_tokens for row in rows)
    return Summary(
        num_sessions=len(trace.sessions),
        num_answered=len(times),
        num_failed_reads=sum(answer.error not in (None, "withdrawn") for answer in answers),
        jct_mean_s=fmean(times) if times else 0.0,
        jct_p50_s=percentile(times, 50),
        jct_p99_s=percentile(times, 99),
        makespan_s=makespan,
        tokens_per_s=num_output / makespan if makespan else 0.0,
        output_tokens=num_output,
        cached_tokens=sum(row.cached_tokens for row in rows),
        computed_tokens=sum(row.computed_tokens for row in rows),
        recomputed_tokens=trace.ended.recomputed if trace.ended else None,
        evicted_tokens=trace.ended.evicted if trace.ended else None,
        num_reruns=sum(max(0, row.attempts - 1) for row in rows),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The percentile with linear interpolation. 0 for no values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def changes(before: Trace, after: Trace) -> list[Change]:
    """The changes of all sessions with a JCT in both traces, largest gain first."""
    pairs = zip(before.sessions, after.sessions, strict=True)
    found = [
        Change(index, old.jct_s, new.jct_s)
        for index, (old, new) in enumerate(pairs)
        if old.jct_s is not None and new.jct_s is not None
    ]
    return sorted(found, key=lambda change: -change.ratio)
