"""Run a plan on a backend: start jobs when they are due, time them, keep their accounts."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from parrot.cli.bench.plan import Job, Plan
from parrot.cli.bench.program import Account, Backend
from parrot.protocol.errors import ParrotError

UNFINISHED = "not finished"


@dataclass(frozen=True, slots=True)
class JobResult:
    """`seconds`: its completion time. `began`: since when it counts, in the loop's time. `error`:
    why it has none; `UNFINISHED` if the run ended before it."""

    kind: str
    began: float
    seconds: float | None
    account: Account
    error: str | None = None


class JobRunner:
    """One run. Time is the event loop's, which may be virtual. `results`: of the jobs that began,
    those that ended first before others."""

    def __init__(
        self,
        backend: Backend,
        *,
        prepared: bool = False,
        timeout_s: float | None = None,
        on_result: Callable[[JobResult], None] = lambda result: None,
    ) -> None:
        """`prepared`: programs get ready before their time begins to count. `timeout_s`: a job that
        takes longer has failed."""
        self._backend = backend
        self._prepared = prepared
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._now = asyncio.get_running_loop().time
        self.results: list[JobResult] = []

    async def run(self, plan: Plan) -> None:
        """Until all jobs have ended; cancelling it ends those that run."""
        began = self._now()
        limit = plan.concurrency
        place = nullcontext() if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for job in plan.jobs:
                group.create_task(self._run_job(job, began + job.start_s, place))

    async def _run_job(
        self, job: Job, due: float, place: AbstractAsyncContextManager[None]
    ) -> None:
        program = self._backend.program(job.kind)
        seconds: float | None = None
        error: str | None = None
        try:
            if self._prepared:
                await program.prepare()
            if (delay := due - self._now()) > 0:
                await asyncio.sleep(delay)
            async with place:
                program.begin_now()
                error = UNFINISHED
                async with asyncio.timeout(self._timeout_s):
                    await job.run(program)
                seconds, error = self._now() - program.began, None
        except Exception as failure:  # noqa: BLE001 - a job's failure is a result
            error = self._reason(failure)
        finally:
            if seconds is not None or error is not None:  # else it never began
                self._add(JobResult(job.kind, program.began, seconds, program.account, error))
            await asyncio.shield(program.end())

    def _add(self, result: JobResult) -> None:
        self.results.append(result)
        self._on_result(result)

    def _reason(self, failure: Exception) -> str:
        if isinstance(failure, TimeoutError) and self._timeout_s is not None:
            return f"no answer within {self._timeout_s:g} s"
        if isinstance(failure, ParrotError):
            return failure.message
        return f"{type(failure).__name__}: {failure}"
