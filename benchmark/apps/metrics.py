"""One run of a plan next to chats of other users, its figures, and the ratios between runs."""

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from benchmark.apps.backends import EAGER_TOKENS, CountedBackend, Counters, growth
from parrot.cli.bench.figures import token_times
from parrot.cli.bench.plan import UNFINISHED, JobResult, JobRunner, Plan
from parrot.cli.bench.program import ProgramCall, ProgramOutput
from parrot.cli.bench.requests import chat_job
from parrot.cli.bench.text import PromptText, TextSource
from parrot.simulation.report import percentile

BYSTANDER_PROMPT, BYSTANDER_OUTPUT = 100, 50  # Tokens.


@dataclass(frozen=True, slots=True)
class Bystanders:
    """Small chats of other users, a Poisson stream during a run. For comparison, they are also
    measured for `alone_s` before the jobs start."""

    text: TextSource
    rate: float
    alone_s: float
    factor: float = 1.0

    async def run(self, runner: JobRunner) -> None:
        """Runs until it is cancelled."""
        rng = random.Random(0)
        prompt = round(BYSTANDER_PROMPT * self.factor) or 1
        output = max(8, round(BYSTANDER_OUTPUT * self.factor))
        async with asyncio.TaskGroup() as group:
            for number in count():
                await asyncio.sleep(rng.expovariate(self.rate))
                chat = chat_job("bystander", self.text, number, prompt, output)
                group.create_task(runner.run(Plan([chat])))


@dataclass(slots=True)
class Run:
    """`began`: the start of the first job, in the loop's time. `seconds`: from the start of the
    first job to the end of the last. `counters`: their increase in this time."""

    jobs: list[JobResult] = field(default_factory=list)
    chats: list[JobResult] = field(default_factory=list)
    num_planned: int = 0
    began: float = 0.0
    seconds: float = 0.0
    timed_out: bool = False
    counters: Counters = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        return [job.error for job in self.jobs if job.error is not None]


async def run_plan(
    backend: CountedBackend,
    plan: Plan,
    *,
    bystanders: Bystanders | None = None,
    time_limit_s: float | None = None,
    prepared: bool = False,
) -> Run:
    """Time is the event loop's, which may be virtual. `prepared`: programs open sessions before
    their completion time starts. Jobs that are unfinished at the time limit count as errors."""
    now = asyncio.get_running_loop().time
    jobs, chats = JobRunner(backend, prepared=prepared), JobRunner(backend)
    run = Run(jobs.results, chats.results, len(plan.jobs))
    before = await backend.counters()
    others = None
    if bystanders is not None:
        others = asyncio.create_task(bystanders.run(chats))
        await asyncio.sleep(bystanders.alone_s)
    run.began = now()
    try:
        async with asyncio.timeout(time_limit_s):
            await jobs.run(plan)
    except TimeoutError:
        run.timed_out = True
    finally:
        run.seconds = now() - run.began
        if others is not None:
            others.cancel()
            with suppress(asyncio.CancelledError):
                await others
    run.counters = growth(before, await backend.counters())
    return run


def unique_prompt_tokens(calls: Iterable[ProgramCall]) -> int:
    """The prompt tokens that a server with an unlimited cache would compute: each prefix once, and
    no generated text."""
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


def summarise(run: Run) -> Figures:
    """Times in seconds. `jct_s`: completion times by kind of job. Tokens are the server's count."""
    times: dict[str, list[float]] = {}
    for job in run.jobs:
        if job.seconds is not None:
            times.setdefault(job.kind, []).append(job.seconds)
    tokens = _tokens(run)
    figures: Figures = {
        "seconds": run.seconds,
        "num_jobs": run.num_planned,
        "timed_out": run.timed_out,
        "num_errors": len(run.errors),
        "first_errors": run.errors[:3],
        "jct_s": {kind: spread(found) for kind, found in times.items()},
        "jct_all_s": spread([*chain.from_iterable(times.values())]) if times else None,
        "tokens": tokens,
        "counters": dict(run.counters),
        "output_tokens_per_s": tokens["output"] / run.seconds,
    }
    if run.chats:
        ended = [chat for chat in run.chats if chat.seconds is not None]
        alone = [chat for chat in ended if chat.began + (chat.seconds or 0.0) < run.began]
        figures["bystanders"] = {
            "alone": _latencies(alone),
            "during": _latencies(chat for chat in ended if chat.began >= run.began),
            "num_failed": sum(chat.error not in (None, UNFINISHED) for chat in run.chats),
        }
    return figures


def _tokens(run: Run) -> Figures:
    """`unique`: prompt tokens that must be computed at least once. `recomputed`: all other computed
    tokens, including eager fill. None: the server does not count them."""
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


def _latencies(chats: Iterable[JobResult]) -> Figures | None:
    times = token_times(chats)
    if not times["ttft_ms"]:
        return None
    return {
        f"{name}_s": spread([ms / 1e3 for ms in times[f"{name}_ms"]]) for name in ("ttft", "tpot")
    }


def key_figures(figures: Figures) -> dict[str, float]:
    """The figures by which runs are compared, in seconds. A run with errors has none."""
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
    """For each case and each setting after the first: its key figures over those of the first
    setting in the same repetition. Above 1, the first setting is better. Median, minimum and
    maximum over the repetitions."""
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
