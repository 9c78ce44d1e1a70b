"""How the calls of a session are shown: live, and as a table when all is done."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from parrot.protocol.errors import ParrotError
from parrot.protocol.public import CompletionInfo, SessionInfo

_REFRESH_S = 0.3
_MARKS = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "running": "[yellow]▶[/]"}


def run_seconds(call: CompletionInfo) -> float | None:
    """Seconds on the engine, None while it has not finished."""
    if call.started_s is None or call.finished_s is None:
        return None
    return call.finished_s - call.started_s


def queue_seconds(call: CompletionInfo) -> float | None:
    """Seconds from the moment its inputs were there until an engine took it."""
    if call.ready_s is None or call.started_s is None:
        return None
    return max(call.started_s - call.ready_s, 0.0)


@contextmanager
def watching(read: Callable[[], SessionInfo], console: Console) -> Iterator[None]:
    """Show a line per call while inside: on a terminal a live table, else a line as each finishes.
    Only looks: what it shows has no effect on what runs."""
    leaving = threading.Event()
    live = Live(console=console, auto_refresh=False)
    printed: set[str] = set()

    def show(info: SessionInfo) -> None:
        if console.is_terminal:
            table = Table.grid(padding=(0, 2))
            for call in info.calls:
                table.add_row(*_progress(call))
            live.update(table, refresh=True)
            return
        for call in info.calls:
            if call.finished_s is not None and call.output_var_id not in printed:
                printed.add(call.output_var_id)
                console.print("  ".join(_progress(call)))

    def watch() -> None:
        with suppress(ParrotError):  # the program meets the same error, and reports it
            while not leaving.wait(_REFRESH_S):
                show(read())
            show(read())

    thread = threading.Thread(target=watch, name="session-watch", daemon=True)
    with live if console.is_terminal else nullcontext():
        thread.start()
        try:
            yield
        finally:
            leaving.set()
            thread.join()


def _progress(call: CompletionInfo) -> tuple[str, str, str]:
    seconds = run_seconds(call)
    spent = call.state if seconds is None else f"{call.output_tokens} tokens in {seconds:.1f} s"
    return _MARKS.get(call.state, "·"), f"{call.func_name} {call.request_id}", spent


def calls_table(info: SessionInfo, total_s: float) -> Table:
    """A row per call, in order of finishing, and one for the whole job."""
    calls = sorted(
        info.calls,
        key=lambda call: (call.finished_s is None, call.finished_s or 0.0, call.request_id),
    )
    num_done = sum(call.finished_s is not None for call in calls)
    sums = {
        "prefill\ncached": sum(call.cached_tokens for call in calls),
        "prefill\ncomputed": sum(call.computed_tokens for call in calls),
        "decode\ntokens": sum(call.output_tokens for call in calls),
    }
    table = Table(
        Column("call", footer=f"{num_done} calls, whole job", no_wrap=True),
        "engine",
        Column("queue\ns", justify="right"),
        *(Column(name, footer=str(total), justify="right") for name, total in sums.items()),
        Column("run\ns", footer=f"{total_s:.2f}", justify="right"),
        title="What was executed",
        title_justify="left",
        show_footer=True,
    )
    num_outputs = Counter(call.request_id for call in calls)
    for call in calls:
        name = f"{call.func_name or 'call'} {call.request_id}"
        table.add_row(
            f"{name} → {call.output}" if num_outputs[call.request_id] > 1 else name,
            call.engine or "",
            _rounded(queue_seconds(call), ""),
            str(call.cached_tokens),
            str(call.computed_tokens),
            str(call.output_tokens),
            _rounded(run_seconds(call), call.state),
        )
    return table


def _rounded(seconds: float | None, otherwise: str) -> str:
    return otherwise if seconds is None else f"{seconds:.2f}"
