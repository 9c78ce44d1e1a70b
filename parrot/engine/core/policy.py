"""In which order jobs run: one method that returns a sort key."""

from typing import Protocol

from parrot.engine.core.jobs import Job


class Policy(Protocol):
    """Keys must be unique and total: the first of all jobs always runs, so all end some day.
    Background jobs come after all others."""

    def key(self, job: Job) -> tuple[int, ...]: ...


class PriorityFirst:
    """By the request's priority, then by arrival."""

    def key(self, job: Job) -> tuple[int, ...]:
        return (job.priority, job.job_id)


class FirstComeFirstServed:
    """By arrival alone."""

    def key(self, job: Job) -> tuple[int, ...]:
        return (int(job.is_background), job.job_id)


POLICIES: dict[str, type[Policy]] = {"priority": PriorityFirst, "fcfs": FirstComeFirstServed}
