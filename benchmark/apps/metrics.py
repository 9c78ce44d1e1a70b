"""The figures of a run, and how runs compare."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from benchmark.apps.counters import EAGER_TOKENS
from benchmark.apps.runner import Chat, Run, unique_prompt_tokens
from parrot.cli.bench.plan import JobResult
from parrot.simulation.report import percentile

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
