"""Output, failure and interruption of commands."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def warn(message: str) -> None:
    ERR.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    ERR.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    sys.exit(code)


@contextmanager
def orderly_exit(hurry: Callable[[], None] | None = None) -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and Ctrl-C into an exception, so that all `with` blocks clean up. Then
    exit with the shell's code for the signal. A second Ctrl-C calls `hurry`, which must not block
    and makes the cleanup skip running calls. Further signals are ignored."""

    def insist(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hurry is not None:
            hurry()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for other in previous:
            signal.signal(other, insist if other == signal.SIGINT else signal.SIG_IGN)
        again = "" if hurry is None else " Press Ctrl-C again to force."
        ERR.print(f"\n[yellow]Stopping.{again}[/]")
        raise SystemExit(128 + signum)

    previous = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    for signum in previous:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
