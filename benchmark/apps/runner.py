"""Run a plan on a backend: start jobs when they are due, time them, keep their accounts."""

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from benchmark.apps.counters import CountedBackend, Counters, growth
from parrot.cli.bench.plan import JobResult, JobRunner, Plan
from parrot.cli.bench.program import Call, Output, Text, TextSource

BYSTANDER_PROMPT, BYSTANDER_OUTPUT = 100, 50


@dataclass(frozen=True, slots=True)
class Bystanders:
    """Other people's small chat requests, a Poisson stream during a run. `alone_s`: how long it is
    measured before the jobs begin, for comparison."""

    rate: float
    alone_s: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One bystander's request. Times in seconds."""

    is_alone: bool
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Run:
    """`seconds`: from the first job's start to the last one's end, without what was before.
    `counters`: what the server counted meanwhile."""

    jobs: list[JobResult] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)
    num_planned: int = 0
    num_failed_chats: int = 0
    seconds: float = 0.0
    timed_out: bool = False
    counters: Counters = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        return [job.error for job in self.jobs if job.error is not None]


class PlanRunner:
    """One run. Time is the event loop's, which may be virtual. `prepared`: programs get ready
    before their time begins to count."""

    def __init__(
        self,
        backend: CountedBackend,
        text: TextSource,
        *,
        bystanders: Bystanders | None = None,
        time_limit_s: float | None = None,
        prepared: bool = False,
    ) -> None:
        self._backend = backend
        self._text = text
        self._bystanders = bystanders
        self._time_limit_s = time_limit_s
        self._prepared = prepared
        self._now = asyncio.get_running_loop().time
        self._run = Run()

    async def run(self, plan: Plan) -> Run:
        """Jobs that are unfinished at the time limit count as errors."""
        self._run.num_planned = len(plan.jobs)
        before = await self._backend.counters()
        others = None
        if self._bystanders is not None:
            others = asyncio.create_task(self._stream_of_chats(self._bystanders, self._now()))
            await asyncio.sleep(self._bystanders.alone_s)
        began = self._now()
        jobs = JobRunner(self._backend, prepared=self._prepared)
        try:
            async with asyncio.timeout(self._time_limit_s):
                await jobs.run(plan)
        except TimeoutError:
            self._run.timed_out = True
        finally:
            self._run.jobs = jobs.results
            self._run.seconds = self._now() - began
            if others is not None:
                others.cancel()
                with suppress(asyncio.CancelledError):
                    await others
        self._run.counters = growth(before, await self._backend.counters())
        return self._run

    async def _stream_of_chats(self, others: Bystanders, began: float) -> None:
        """Until cancelled. A chat is alone if it began and ended before the jobs."""
        rng = random.Random(0)
        async with asyncio.TaskGroup() as group:
            for number in count():
                await asyncio.sleep(rng.expovariate(others.rate))
                group.create_task(self._chat(others, number, began + others.alone_s))

    async def _chat(self, others: Bystanders, number: int, jobs_begin: float) -> None:
        prompt = self._text.data(round(BYSTANDER_PROMPT * others.factor) or 1, "bystander", number)
        length = max(8, round(BYSTANDER_OUTPUT * others.factor))
        program = self._backend.program("bystander")
        began = self._now()
        try:
            times = await program.stream(program.call("chat", [prompt], length, streamed=True))
            tpot_s = (times.last - times.first) / (length - 1)
            is_alone = self._now() < jobs_begin
            if is_alone or began >= jobs_begin:
                self._run.chats.append(Chat(is_alone, times.first - began, tpot_s))
        except Exception:  # noqa: BLE001 - a chat's failure is a result
            self._run.num_failed_chats += 1
        finally:
            await asyncio.shield(program.end())


def unique_prompt_tokens(calls: Iterable[Call]) -> int:
    """The prompt tokens that a cache which forgets nothing would compute: each prefix of pieces
    once, and never what generation itself put there."""
    prefixes: dict[int, int] = {}
    generated: set[int] = set()
    for call in calls:
        key = 0
        for piece in call.prompt:
            key = hash((key, _identity(piece)))
            prefixes[key] = piece.tokens
        generated.add(hash((key, _identity(call.output))))
    return sum(tokens for key, tokens in prefixes.items() if key not in generated)


def _identity(piece: Text | Output) -> object:
    return piece.content if isinstance(piece, Text) else id(piece)
