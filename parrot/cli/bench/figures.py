"""The figures of a side, under the names that `vllm bench serve` gives them."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from parrot.cli.bench.plan import UNFINISHED, JobResult
from parrot.cli.bench.sides import Side
from parrot.simulation.report import percentile

Figures = dict[str, Any]

_PERCENTILES = (50, 90, 99)
_TIMES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2E",
}
CAPTION = (
    "In ms, for outputs that the program reads: time to the first token (TTFT), per further token "
    "(TPOT), between chunks of the stream (ITL), and until the end (E2E)."
)
_ERRORS_SHOWN = 3


@dataclass(slots=True)
class MeasuredSide:
    """The results of a side so far. `seconds`: the duration of its runs."""

    side: Side
    num_planned: int = 0
    seconds: float = 0.0
    results: list[JobResult] = field(default_factory=list)


def figures(measured: MeasuredSide) -> Figures:
    """Times are those of completed jobs, at the client. TTFT, TPOT and ITL are those of the streams
    that a program reads; TTFT counts from the program's start. Tokens are the server's count.
    Without one, output tokens are the requested ones and prompt tokens are None."""
    side, seconds = measured.side, measured.seconds
    done = [result for result in measured.results if result.seconds is not None]
    errors = [r.error for r in measured.results if r.error not in (None, UNFINISHED)]
    found: Figures = {
        "style": side.style,
        "url": side.url,
        "model_id": side.model,
        "num_prompts": measured.num_planned,
        "completed": len(done),
        "failed": len(errors),
        "unfinished": measured.num_planned - len(done) - len(errors),
        "duration": seconds,
        **_tokens(measured.results, done),
        "errors": list(dict.fromkeys(errors))[:_ERRORS_SHOWN],
        "notes": side.notes,
    }
    output, prompt = found["total_output_tokens"], found["total_input_tokens"]
    found |= {
        "request_throughput": _rate(len(done), seconds),
        "call_throughput": _rate(sum(len(result.account.calls) for result in done), seconds),
        "output_throughput": _rate(output, seconds),
        "total_token_throughput": _rate(None if prompt is None else prompt + output, seconds),
    }
    for name, values in token_times(done).items():
        found |= _spread(name, values)
    return found


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count is not None and seconds else None


def _tokens(results: Iterable[JobResult], done: Iterable[JobResult]) -> Figures:
    usages = list(chain.from_iterable(result.account.usages for result in results))
    if not usages:
        planned = (call.output.tokens for result in done for call in result.account.calls)
        return {
            "total_input_tokens": None,
            "total_cached_tokens": None,
            "total_output_tokens": sum(planned),
        }
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    return {
        "total_input_tokens": sum(usage.prompt_tokens for usage in usages),
        "total_cached_tokens": sum(cached) if cached else None,
        "total_output_tokens": sum(usage.output_tokens for usage in usages),
    }


def token_times(done: Iterable[JobResult]) -> dict[str, list[float]]:
    """The times of completed jobs by the figure's name, in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in _TIMES}
    for result in done:
        assert result.seconds is not None
        found["e2el_ms"].append(1e3 * result.seconds)
        for output, times in result.account.streams.items():
            tokens = output.tokens if times.tokens is None else times.tokens
            found["ttft_ms"].append(1e3 * (times.first - result.began))
            found["itl_ms"] += [1e3 * gap for gap in times.gaps]
            if tokens > 1:
                found["tpot_ms"].append(1e3 * (times.last - times.first) / (tokens - 1))
    return found


def _spread(name: str, values: Sequence[float]) -> Figures:
    if not values:
        return {}
    found = {
        f"mean_{name}": statistics.fmean(values),
        f"median_{name}": statistics.median(values),
        f"std_{name}": statistics.pstdev(values),
    }
    return found | {f"p{rank}_{name}": percentile(values, rank) for rank in _PERCENTILES}


def table(rows: Sequence[Figures], jobs: str) -> Table:
    """A column for each side, and with two sides their ratio. `jobs`: applications or requests."""
    right = [Column(_heading(row), justify="right") for row in rows]
    ratio = [Column("second\nover first", justify="right")] if len(rows) == 2 else []
    shown = Table("", *right, *ratio)

    def add(title: str, name: str, form: str, *, compares: bool = True) -> None:
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            cells = ["" if value is None else format(value, form) for value in values]
            shown.add_row(title, *cells, *([_ratio(values)] if ratio and compares else []))

    add(f"{jobs} done", "completed", "d", compares=False)
    add("failed", "failed", "d", compares=False)
    if any(row["unfinished"] for row in rows):
        add("not finished", "unfinished", "d", compares=False)
    add("seconds", "duration", ".2f")
    add(f"{jobs}/s", "request_throughput", ".2f")
    if any(row["call_throughput"] != row["request_throughput"] for row in rows):
        add("calls/s", "call_throughput", ".2f")
    add("output tokens/s", "output_throughput", ".1f")
    add("all tokens/s", "total_token_throughput", ".1f")
    add("prompt tokens", "total_input_tokens", "d")
    shares = [_cached_share(row) for row in rows]
    if any(shares):
        shown.add_row("of them cached", *shares)
    for name, title in _TIMES.items():
        shown.add_section()
        for rank in _PERCENTILES:
            add(f"{title} p{rank}", f"p{rank}_{name}", ".1f")
    return shown


def _heading(row: Figures) -> str:
    url = row["url"].removeprefix("http://")
    return escape(f"{row['style']}\n{url}\n{row['model_id']}")


def _cached_share(row: Figures) -> str:
    cached, prompt = row["total_cached_tokens"], row["total_input_tokens"]
    return f"{cached / prompt:.0%}" if cached is not None and prompt else ""


def _ratio(values: Sequence[float | None]) -> str:
    first, second = values
    return f"{second / first:.2f}" if first and second is not None else ""
