"""The plan of a workload, which is jobs with start times, and its run on a backend."""

import asyncio
import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any, Self

from parrot.cli.bench.program import Backend, Program, ProgramAccount
from parrot.cli.bench.text import TextSource
from parrot.protocol.errors import ParrotError


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One application, or one request of a user. `start_s`: seconds after the start of the run."""

    kind: str
    run: Callable[[Program], Awaitable[None]]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`concurrency`: the largest number of jobs that run at the same time; None: no limit."""

    jobs: Sequence[BenchJob]
    concurrency: int | None = None


def numbered(
    kind: str, count: int, run: Callable[..., Awaitable[None]], **given: Any
) -> list[BenchJob]:
    """Applications of one kind. `run` receives the `number` of its application."""
    return [BenchJob(kind, partial(run, number=number, **given)) for number in range(count)]


@dataclass(frozen=True)
class Workload(ABC):
    """Subclasses are frozen dataclasses. Their fields are the parameters. `factor` multiplies all
    lengths, to make them smaller for slow machines."""

    factor: float = 1.0

    @abstractmethod
    def plan(self, text: TextSource, seed: int) -> Plan:
        """The same arguments give the same jobs."""

    def sized(self, tokens: int) -> int:
        """A length at this factor, at least 1 token."""
        return max(1, round(tokens * self.factor))

    def changed(self, name: str, changes: Mapping[str, str]) -> Self:
        """With parameters from the command line. Raises `ValueError`, with the workload's `name`,
        for an unknown parameter."""
        types = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for key in changes:
            if key not in types:
                raise ValueError(f"{name} has no parameter {key!r}: {', '.join(types)}")
        values = {key: _parse(key, types[key], value) for key, value in changes.items()}
        return dataclasses.replace(self, **values)

    def parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _parse(name: str, kind: type, value: str) -> Any:
    if kind is bool:
        return value.lower() in ("1", "true", "yes")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {value!r}") from None


def arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    """Seconds of a Poisson stream with `rate` arrivals a second; it does not end."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def poisson(rng: random.Random, rate: float, count: int) -> list[float]:
    """The first `count` arrivals."""
    return list(islice(arrivals(rng, rate), count))


def poisson_for(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """All arrivals before `seconds`."""
    return list(takewhile(lambda at: at < seconds, arrivals(rng, rate))) if rate > 0 else []


UNFINISHED = "not finished"


@dataclass(frozen=True, slots=True)
class JobResult:
    """`seconds`: the completion time. `began`: its start, in the loop's time. `error`: why the job
    has no completion time; `UNFINISHED` if the run ended before the job."""

    kind: str
    began: float
    seconds: float | None
    account: ProgramAccount
    error: str | None = None


class JobRunner:
    """One run. Time is the event loop's, which may be virtual. `results`: of the jobs that started,
    in the order in which they ended."""

    def __init__(
        self,
        backend: Backend,
        *,
        prepared: bool = False,
        timeout_s: float | None = None,
        on_result: Callable[[JobResult], None] = lambda result: None,
    ) -> None:
        """`prepared`: programs open sessions before their completion time starts. `timeout_s`: a
        job that takes longer has failed."""
        self._backend = backend
        self._prepared = prepared
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._now = asyncio.get_running_loop().time
        self.results: list[JobResult] = []

    async def run(self, plan: Plan) -> None:
        """Returns when all jobs have ended. Cancelling it ends the running jobs."""
        began = self._now()
        limit = plan.concurrency
        place = nullcontext() if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for job in plan.jobs:
                group.create_task(self._run_job(job, began + job.start_s, place))

    async def _run_job(
        self, job: BenchJob, due: float, place: AbstractAsyncContextManager[None]
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
            if seconds is not None or error is not None:  # otherwise the job never started
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
