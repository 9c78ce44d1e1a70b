"""Show the calls of a session while they run."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from parrot.cli.graph_picture import run_seconds
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import CompletionInfo, SessionInfo

_REFRESH_S = 0.3
_MARKS = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "running": "[yellow]▶[/]"}


class SessionWatch:
    """While entered, shows a line per call: on a terminal a live table, else a line as each call
    finishes. Only looks: what it shows has no effect on what runs."""

    def __init__(self, read: Callable[[], SessionInfo], console: Console) -> None:
        self._read = read
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._shown: set[str] = set()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="session-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._leaving.set()
        self._thread.join()
        self._live.stop()

    def _watch(self) -> None:
        try:
            while True:
                is_last = self._leaving.wait(_REFRESH_S)
                self._show(self._read())
                if is_last:
                    return
        except ParrotError:
            return  # the program meets the same error, and reports it

    def _show(self, info: SessionInfo) -> None:
        if self._console.is_terminal:
            self._live.update(progress_table(info), refresh=True)
            return
        for call in info.calls:
            if call.finished_s is not None and call.output_var_id not in self._shown:
                self._shown.add(call.output_var_id)
                self._console.print("  ".join(_cells(call)))


def progress_table(info: SessionInfo) -> Table:
    table = Table.grid(padding=(0, 2))
    for call in info.calls:
        table.add_row(*_cells(call))
    return table


def _cells(call: CompletionInfo) -> tuple[str, str, str]:
    seconds = run_seconds(call)
    spent = "" if seconds is None else f"{call.output_tokens} tokens in {seconds:.1f} s"
    return (_MARKS.get(call.state, "·"), f"{call.func_name} {call.request_id}", spent or call.state)
