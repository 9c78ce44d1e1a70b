"""`parrot bench`: measures the sides in turns, then shows a table and writes a file."""

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parrot.cli.bench.figures import CAPTION, Figures, MeasuredSide, figures, table
from parrot.cli.bench.plan import JobRunner
from parrot.cli.bench.sides import Address, CannotMeasure, Connections
from parrot.cli.bench.text import COMMON_WORDS, TextSource
from parrot.cli.bench.workloads import TimedWorkload, parse_load
from parrot.cli.console import ERR, OUT, fail, warn

_CONCURRENCY = 8
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command line. `seed`: None draws one. `timeout_s`: of a request or an
    application. A model of None is the first that is served. Other options of None leave the
    workload's value."""

    workload: str
    against: Sequence[str]
    num_requests: int | None
    prompt_tokens: int | None
    prefix_tokens: int | None
    output_tokens: int | None
    is_chat: bool
    model: str | None
    against_model: str | None
    api_key: str | None
    against_api_key: str | None
    concurrency: int | None
    request_rate: float | None
    repeat: int
    seed: int | None
    timeout_s: float
    output: Path | None


def bench(url: str, options: BenchOptions) -> None:
    """Raises `SystemExit` if a side completed no job, or at a signal."""
    if options.output is not None and not options.output.parent.is_dir():
        fail(f"{options.output.parent}: no such folder; give --output a file in an existing folder")
    # A server may have cached the texts of an earlier run, so each run draws new ones by default.
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    try:
        load = _load(options)
        bench = Bench(load, options, seed)
        asyncio.run(bench.run(*_addresses(url, options)))
    except (CannotMeasure, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:  # The second Ctrl-C, or a Ctrl-C before the first request.
        sys.exit(_INTERRUPTED)
    rows = [figures(measured) for measured in bench.measured]
    _show(rows, load, seed)
    if options.output is not None:
        _write(options.output, _report(rows, load, options, seed, is_whole=not bench.is_stopped))
    if bench.is_stopped:
        sys.exit(_INTERRUPTED)
    if not all(row["completed"] for row in rows):
        sys.exit(1)


def _load(options: BenchOptions) -> TimedWorkload:
    """Raises `ValueError`."""
    lengths = {
        "num_requests": options.num_requests,
        "prompt_tokens": options.prompt_tokens,
        "prefix_tokens": options.prefix_tokens,
        "output_tokens": options.output_tokens,
    }
    rate, concurrency = options.request_rate, options.concurrency
    if rate is None and concurrency is None:
        concurrency = _CONCURRENCY
    load = parse_load(options.workload, lengths, concurrency, rate)
    load.plan(TextSource(COMMON_WORDS), seed=0)  # reports wrong parameters before any request
    return load


def _addresses(url: str, options: BenchOptions) -> list[Address]:
    """Raises `ValueError`."""
    for given in (url, *options.against):
        if urlsplit(given).scheme not in ("http", "https") or not urlsplit(given).netloc:
            raise ValueError(f"not an http address: {given}; write it like http://localhost:9000")
    own = ("--api-key, or PARROT_KEY in the environment", "--model")
    theirs = ("--against-api-key, or PARROT_AGAINST_KEY in the environment", "--against-model")
    first = Address(url, options.api_key, options.model, *own)
    key, model = options.against_api_key, options.against_model
    return [first, *(Address(given, key, model, *theirs) for given in options.against)]


class Bench:
    """One run of the command. `is_stopped`: a signal ended it, and `measured` is incomplete."""

    def __init__(self, load: TimedWorkload, options: BenchOptions, seed: int) -> None:
        self._load = load
        self._options = options
        self._seed = seed
        self._running: asyncio.Task[None] | None = None
        self.measured: list[MeasuredSide] = []
        self.is_stopped = False

    async def run(self, first: Address, *others: Address) -> None:
        """Raises `CannotMeasure`, and `ValueError` for wrong parameters."""
        options = self._options
        async with AsyncExitStack() as stack:
            connections = Connections(stack, is_chat=options.is_chat, timeout_s=options.timeout_s)
            sides = await connections.sides(first, others, is_application=self._load.is_application)
            self.measured = [MeasuredSide(side) for side in sides]
            stack.enter_context(self._stopping_at_signals())
            with _progress() as progress:
                for repeat in range(options.repeat):
                    for measured in self.measured:
                        if not self.is_stopped:
                            await self._run_side(measured, repeat, progress)

    @contextmanager
    def _stopping_at_signals(self) -> Iterator[None]:
        """The first signal ends the measurement. A second signal has its usual effect."""
        loop = asyncio.get_running_loop()

        def release() -> None:
            for signum in _SIGNALS:
                loop.remove_signal_handler(signum)

        def stop() -> None:
            self.is_stopped = True
            ERR.print("\n[yellow]stopping; the results so far follow[/]")
            release()
            if self._running is not None:
                self._running.cancel()

        for signum in _SIGNALS:
            loop.add_signal_handler(signum, stop)
        try:
            yield
        finally:
            release()

    async def _run_side(self, measured: MeasuredSide, repeat: int, progress: Progress) -> None:
        """All sides get the same lengths and arrivals. Each repetition has new words, because a
        server may have cached those of the repetition before."""
        side, seed = measured.side, self._seed + repeat
        plan = self._load.plan(side.text.salted((self._seed, repeat)), seed)
        title = f"{side.style}, {side.url}"
        bar = progress.add_task(escape(title), total=len(plan.jobs))
        if not progress.console.is_terminal:
            ERR.print(f"{escape(title)}: {len(plan.jobs)} …", soft_wrap=True)
        runner = JobRunner(
            side.backend,
            timeout_s=self._options.timeout_s,
            on_result=lambda result: progress.advance(bar),
        )
        measured.num_planned += len(plan.jobs)
        began = time.monotonic()
        self._running = asyncio.create_task(runner.run(plan))
        await asyncio.wait([self._running])
        measured.seconds += time.monotonic() - began
        measured.results += runner.results


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=ERR, disable=not ERR.is_terminal)


def _show(rows: Sequence[Figures], load: TimedWorkload, seed: int) -> None:
    jobs = "applications" if load.is_application else "requests"
    parameters = ", ".join(f"{k}={v}" for k, v in load.workload.parameters().items())
    OUT.print(f"[bold]{load.name}[/]: {parameters}; --seed {seed}", soft_wrap=True)
    OUT.print(table(rows, jobs))
    OUT.print(f"[dim]{CAPTION}[/]")
    for row in rows:
        for note in row["notes"]:
            OUT.print(f"{escape(row['url'])}: {escape(note)}", soft_wrap=True)
        for error in row["errors"]:
            warn(f"{row['style']}, {row['url']}: {error}")


def _report(
    rows: Sequence[Figures],
    load: TimedWorkload,
    options: BenchOptions,
    seed: int,
    *,
    is_whole: bool,
) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "workload": load.name,
        "parameters": load.workload.parameters(),
        "max_concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "repeat": options.repeat,
        "seed": seed,
        "is_whole": is_whole,
        "results": list(rows),
    }


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        fail(f"{path}: {error.strerror}; choose another file with --output")
    OUT.print(f"The figures: {escape(str(path))}", soft_wrap=True)
