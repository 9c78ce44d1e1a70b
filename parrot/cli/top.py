"""`parrot top`: a live view of engines and applications."""

import os
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from parrot.cli.console import OUT, fail
from parrot.cli.page_feed import PageFeed, RequestFailed, Row, Rows, name_of, state_of
from parrot.utils.config import ConfigError

_FRAME_LINES = 12  # Lines of the screen that are not sessions.


def top(core: str, config_path: Path | None, api_key: str | None, once: bool) -> None:
    """Show the view until q or Ctrl-C, or once without a terminal. Raises `SystemExit` if ServeCore
    does not answer or rejects the request."""
    try:
        feed = PageFeed(core, config_path, api_key)
        if once or not OUT.is_terminal:
            OUT.print(screen(feed.now("overview"), None))
            return
        with _q_interrupts(), Live(console=OUT, auto_refresh=False, screen=True) as live:
            for rows in feed.rows("overview"):
                live.update(screen(rows, OUT.size.height), refresh=True)
    except (RequestFailed, ConfigError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(0)


@contextmanager
def _q_interrupts() -> Iterator[None]:
    """Make the key q act as Ctrl-C."""
    if not sys.stdin.isatty():
        yield
        return
    # A shell starts background commands with SIGINT ignored, and q would have no effect.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)

    def read_keys() -> None:
        while key := os.read(keyboard, 1):
            if key in b"qQ":
                os.kill(os.getpid(), signal.SIGINT)
                return

    threading.Thread(target=read_keys, daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def screen(rows: Rows, height: int | None) -> Group:
    """The screen with the sessions that fit. Running sessions come first, finished ones last."""
    engines = [row for key, row in rows.items() if key.startswith("engine:")]
    sessions = [row for key, row in rows.items() if key.startswith("session:")]
    order = ("running", "waiting")
    sessions.sort(
        key=lambda row: (
            order.index(state) if (state := state_of(row)) in order else len(order),
            -row.get("created_at", 0.0),
        )
    )
    num_live = sum(state_of(row) in order for row in sessions)
    room = None if height is None else max(1, height - _FRAME_LINES - len(engines))
    shown = sessions[:room]
    more = len(sessions) - len(shown)
    service = rows.get("service", {})
    head = (
        f"[bold]{escape(', '.join(service.get('models', [])) or 'no model')}[/]   "
        f"engines: {len(engines)}   queued: {service.get('queued', 0)}   sessions: {num_live}   "
        f"finished: {len(sessions) - num_live}"
    )
    end = [f"[dim]and {more} more[/]"] if more > 0 else []
    return Group(head, _engine_table(engines), _session_table(shown), *end)


def _engine_table(engines: Iterable[Row]) -> Table:
    numbers = _right("running", "KV tokens", "KV used", "step ms")
    table = _table("engine", "state", "model", *numbers)
    for row in engines:
        used, room = row.get("used_tokens", 0), row.get("tokens_capacity")
        table.add_row(
            _text(row.get("engine_name")),
            _state(row),
            _text(row.get("model")),
            _text(row.get("num_running")),
            "" if room is None else f"{used} / {room}",  # Tenants see no loads of engines.
            f"{used / room:.0%}" if room else "",
            _text(row.get("step_ms")),
        )
    return table


def _session_table(sessions: Iterable[Row]) -> Table:
    names = ("done", "failed", "prompt", "cached", "output")
    name, began = Column("session", no_wrap=True), Column("since", no_wrap=True)
    state = Column("state", no_wrap=True)
    table = _table(name, "application", state, began, *_right(*names))
    for row in sessions:
        prompt = row.get("prompt_tokens", 0)
        failed = row.get("failed", 0)
        table.add_row(
            _text(row.get("id")),
            _text(name_of(row)),
            state_of(row),
            time.strftime("%H:%M:%S", time.localtime(row.get("created_at", 0.0))),
            str(row.get("done", 0)),
            f"[red]{failed}[/]" if failed else "0",
            str(prompt),
            f"{row.get('cached_tokens', 0) / prompt:.0%}" if prompt else "",
            str(row.get("output_tokens", 0)),
        )
    return table


def _table(*columns: Column | str) -> Table:
    """A table without borders, so that all columns fit in 80 characters."""
    return Table(*columns, box=None, padding=(0, 1, 0, 0))


def _state(engine: Row) -> str:
    """The state in the words of the web page."""
    if not engine.get("is_draining"):
        return "serving"
    return "[yellow]draining[/]" if engine.get("num_running", 0) else "[yellow]drained[/]"


def _right(*names: str) -> Iterable[Column]:
    return (Column(name, justify="right") for name in names)


def _text(value: Any) -> str:
    return "" if value is None else escape(str(value))
