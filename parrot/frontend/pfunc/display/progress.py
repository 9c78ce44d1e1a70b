"""Progress bars in terminals and notebooks: tqdm if it is installed, else a line of text."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Callback = Callable[[int, int], None]
Progress = Callback | bool | str | None
"""A function of the numbers of finished and of all variables, or a bar (True, or its label)."""

_WIDTH = 30  # Characters of a full bar.
_INTERVAL_S = 0.1  # Seconds between two updates of a bar.


@contextmanager
def reporting(progress: Progress, total: int) -> Iterator[Callback | None]:
    """A function to call with the numbers of finished and of all variables. None if no display is
    wanted or stderr is not visible."""
    if callable(progress):
        yield progress
    elif not progress or not _is_seen():
        yield None
    else:
        bar = _bar(progress if isinstance(progress, str) else "", total)
        try:
            yield lambda done, total: bar.update(done - bar.n)
        finally:
            bar.close()


class Line:
    """A bar in one line of text. It is drawn at most ten times per second."""

    def __init__(self, label: str, total: int) -> None:
        self.n = 0
        self._head = f"{label}: " if label else ""
        self._total = total
        self._start = time.monotonic()
        self._drawn_at = 0.0
        self._draw()

    def update(self, more: int) -> None:
        """Count `more` further items as finished."""
        self.n += more
        if time.monotonic() - self._drawn_at >= _INTERVAL_S:
            self._draw()

    def close(self) -> None:
        """Draw the final state and end the line."""
        self._draw()
        sys.stderr.write("\n")

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        bar = ("#" * (_WIDTH * self.n // max(self._total, 1))).ljust(_WIDTH, ".")
        seconds = self._drawn_at - self._start
        sys.stderr.write(f"\r{self._head}[{bar}] {self.n}/{self._total} in {seconds:.1f} s")
        sys.stderr.flush()


def _bar(label: str, total: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns in notebooks without widgets.
            from tqdm.auto import tqdm
    except ImportError:
        return Line(label, total)
    return tqdm(total=total, desc=label or None, disable=False)


def _is_seen() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
