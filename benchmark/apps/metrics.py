"""One run of a plan beside other people's chats, its figures, and how runs compare."""

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from benchmark.apps.backends import EAGER_TOKENS, CountedBackend, Counters, growth
from parrot.cli.bench.plan import JobResult, JobRunner, Plan
from parrot.cli.bench.program import ProgramCall, ProgramOutput
from parrot.cli.bench.text import PromptText, TextSource
from parrot.simulation.report import percentile

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


def unique_prompt_tokens(calls: Iterable[ProgramCall]) -> int:
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


def _identity(piece: PromptText | ProgramOutput) -> object:
    return piece.content if isinstance(piece, PromptText) else id(piece)


Figures = dict[str, Any]


def spread(values: Sequence[float]) -> Figures:
    return {
        "mean": statistics.fmean(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values),
        "count": len(values),
    }


def summarise(run: Run, deadline_s: float | None = None) -> Figures:
    """Times in seconds. `jct_s`: completion times by kind of job. `goodput`: jobs of all kinds that
    ended within the deadline, a second. Tokens are the server's count where it gives one."""
    figures: Figures = {
        "seconds": run.seconds,
        "num_jobs": run.num_planned,
        "timed_out": run.timed_out,
        "num_errors": len(run.errors),
        "first_errors": run.errors[:3],
        "jct_s": {kind: spread(times) for kind, times in _times(run.jobs).items()},
        "jct_all_s": _all_times(run.jobs),
        "ms_per_output_token": _normalised(run.jobs),
        "tokens": _tokens(run),
        "counters": dict(run.counters),
    }
    figures["output_tokens_per_s"] = figures["tokens"]["output"] / run.seconds
    if deadline_s is not None:
        in_time = sum(job.seconds is not None and job.seconds <= deadline_s for job in run.jobs)
        figures["goodput"] = {
            "deadline_s": deadline_s,
            "in_time": in_time / run.num_planned,
            "jobs_per_s": in_time / run.seconds,
        }
    if run.chats:
        alone, during = _harm(run.chats, alone=True), _harm(run.chats, alone=False)
        figures["bystanders"] = {
            "alone": alone,
            "during": during,
            "num_failed": run.num_failed_chats,
        }
    return figures


def _times(jobs: Iterable[JobResult]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for job in jobs:
        if job.seconds is not None:
            times.setdefault(job.kind, []).append(job.seconds)
    return times


def _all_times(jobs: Iterable[JobResult]) -> Figures | None:
    """Completion times of jobs of all kinds."""
    times = [job.seconds for job in jobs if job.seconds is not None]
    return spread(times) if times else None


def _normalised(jobs: Iterable[JobResult]) -> Figures | None:
    """Completion time over output tokens, in ms: what users of single requests feel."""
    rates = []
    for job in jobs:
        tokens = sum(call.output.tokens for call in job.account.calls)
        if job.seconds is not None and tokens:
            rates.append(job.seconds * 1e3 / tokens)
    return spread(rates) if rates else None


def _tokens(run: Run) -> Figures:
    """`unique`: prompt tokens that must be computed at least once. `recomputed`: what was computed
    beyond that, also ahead of its call. None: the server does not say."""
    usages = list(chain.from_iterable(job.account.usages for job in run.jobs))
    calls = list(chain.from_iterable(job.account.calls for job in run.jobs))
    prompt = sum(usage.prompt_tokens for usage in usages)
    unique = unique_prompt_tokens(calls)
    cached = [usage.cached_tokens for usage in usages]
    computed = recomputed = None
    if cached and None not in cached:
        ahead = int(run.counters.get(EAGER_TOKENS, 0))
        computed = prompt - sum(c for c in cached if c is not None) + ahead
        recomputed = computed - unique
    return {
        "calls": len(calls),
        "calls_done": len(usages),
        "prompt": prompt,
        "prompt_planned": sum(call.prompt_tokens for call in calls),
        "output": sum(usage.output_tokens for usage in usages),
        "computed": computed,
        "unique": unique,
        "recomputed": recomputed,
    }


def _harm(chats: Iterable[Chat], *, alone: bool) -> Figures | None:
    chosen = [chat for chat in chats if chat.is_alone == alone]
    if not chosen:
        return None
    return {
        "ttft_s": spread([chat.ttft_s for chat in chosen]),
        "tpot_s": spread([chat.tpot_s for chat in chosen]),
    }


def key_figures(figures: Figures) -> dict[str, float]:
    """What runs are compared by, smaller is better; nothing of a run with errors. In seconds."""
    if figures["num_errors"] or figures["timed_out"]:
        return {}
    found = {"seconds": figures["seconds"]}
    for kind, times in figures["jct_s"].items():
        found |= {f"jct_{kind}_{name}": times[name] for name in ("mean", "p99")}
    during = figures.get("bystanders", {}).get("during")
    if during is not None:
        found |= {f"bystander_{name}": during[name]["p99"] for name in ("ttft_s", "tpot_s")}
    return found


def ratios(runs: list[Figures]) -> list[Figures]:
    """For each case and setting but the first: its key figures over those of the first setting in
    the same repetition (above 1: the first is better). Median and spread over the repetitions."""
    found: list[Figures] = []
    for case in dict.fromkeys(run["case"] for run in runs):
        mine = [run for run in runs if run["case"] == case]
        first, *others = dict.fromkeys(run["setting"] for run in mine)
        base = _by_repeat(mine, first)
        for other in others:
            theirs = _by_repeat(mine, other)
            pairs = [(base[r], theirs[r]) for r in sorted(base.keys() & theirs.keys())]
            row: Figures = {"case": case, "setting": other, "over": first, "repeats": len(pairs)}
            for name in pairs[0][0] if pairs else ():
                values = [b[name] / a[name] for a, b in pairs if a.get(name) and name in b]
                if values:
                    row[name] = [statistics.median(values), min(values), max(values)]
            found.append(row)
    return found


def _by_repeat(runs: list[Figures], setting: str) -> dict[int, dict[str, float]]:
    return {
        run["repeat"]: figures
        for run in runs
        if run["setting"] == setting and (figures := key_figures(run["figures"]))
    }
