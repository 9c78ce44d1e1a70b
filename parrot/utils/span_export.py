"""Spans on their way out: queued, written many at once by a thread, and exported by a process of
their own.

To make a span, encode and send it takes a tenth of the CPU time of a whole call, which this process
needs for calls. So it tells plain facts. To wake a thread takes longer than to queue something for
it, so it sleeps for a moment behind the first thing that it is woken for."""

import logging
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import orjson

from parrot.utils.config import ConfigError
from parrot.utils.installation import install_line
from parrot.utils.traceparent import TraceParent

logger = logging.getLogger(__name__)

RECORDS = "parrot.utils.otel"  # makes spans of `SpanRecord`s
_MAX_PENDING = 256  # things whose spans are yet to be written
_ENOUGH = 64  # of them are written at once, or what has come in `_GATHER_S`
_GATHER_S = 0.25
_FLUSH_S = 5.0
_LINE = orjson.OPT_APPEND_NEWLINE


class SpanSink(Protocol):
    """The end of the way, written to from one thread; it may be slow, and raise what it wants."""

    def write(self, told: Sequence[Sequence[Any]]) -> None:
        """`told`: the facts of one thing each."""
        ...

    def close(self, timeout_s: float) -> None:
        """Export what was written, for so many seconds at most; with 0, while a write may still be
        stuck, end it."""
        ...


class OtlpProcess:
    """A process that runs the module `maker`: it makes spans of facts, and ends with its input."""

    def __init__(self, endpoint: str, service: str, maker: str = RECORDS) -> None:
        command = [sys.executable, "-m", maker, endpoint, service]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def write(self, told: Sequence[Sequence[Any]]) -> None:
        """Raises `OSError` if the process has ended."""
        assert self._process.stdin is not None
        lines = [orjson.dumps(facts, default=list, option=_LINE) for facts in told]
        self._process.stdin.write(b"".join(lines))
        self._process.stdin.flush()

    def close(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        if timeout_s:
            try:
                self._process.stdin.close()
                self._process.wait(timeout_s)
            except (OSError, subprocess.TimeoutExpired):
                logger.warning("the last spans could not be exported in %g s", timeout_s)
        self._process.kill()  # does nothing after its end; a write that is stuck fails now
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()


def span_export(endpoint: str, service: str, maker: str = RECORDS) -> "SpanExport":
    """Spans go to `endpoint` by OTLP over HTTP; the module `maker` makes them of what is told.
    Raises `ConfigError` if what that needs is not installed."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"otlp_endpoint: {package} is not installed: {install_line('otel')}")
    return SpanExport(OtlpProcess(endpoint, service, maker))


class SpanExport:
    """Export without holding up whoever has something to tell. What comes faster than it can be
    exported is left out, and the log says so."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._pending: deque[Callable[[], Sequence[Any]]] = deque()
        self._has_some, self._has_enough = threading.Event(), threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()
        self.num_left_out = 0

    def send(self, make: Callable[[], Sequence[Any]]) -> None:
        """Export what `make` gives when it is called, in the exporting thread."""
        num_pending = len(self._pending)
        if num_pending >= _MAX_PENDING:
            if self.num_left_out == 0:
                logger.warning("spans come faster than they can be exported: some are left out")
            self.num_left_out += 1
            return
        self._pending.append(make)
        if not self._has_some.is_set():
            self._has_some.set()
        elif num_pending + 1 == _ENOUGH:
            self._has_enough.set()

    def close(self) -> None:
        """Export what is pending, for a few seconds at most."""
        self._is_closing = True
        self._has_enough.set()
        self._has_some.set()
        self._thread.join(_FLUSH_S)
        is_done = not self._thread.is_alive()
        if not is_done:
            logger.warning("the last spans could not be exported in %g s", _FLUSH_S)
        self._sink.close(_FLUSH_S if is_done else 0.0)

    def _run(self) -> None:
        while not self._is_closing:
            self._has_some.wait()
            self._has_enough.wait(_GATHER_S)
            self._has_enough.clear()
            self._has_some.clear()  # before looking: what comes later sets it again
            self._write()
        self._write()

    def _write(self) -> None:
        """Write what is pending now."""
        told: list[Sequence[Any]] = []
        for _ in range(len(self._pending)):
            with _logged():
                told.append(self._pending.popleft()())
        if told:
            with _logged():
                self._sink.write(told)


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("spans could not be exported")


Value = str | int | float | bool | Sequence[str]


@dataclass(slots=True)
class SpanRecord:
    """`start` and `end` in seconds of Unix time, as those of `events`. An attribute that is None is
    left out. `links`: spans whose results this one took."""

    name: str
    own: TraceParent
    parent: TraceParent | None
    start: float
    end: float
    attributes: Mapping[str, Value | None]
    events: Sequence[tuple[str, float | None]] = ()
    links: Sequence[TraceParent] = ()
    is_server: bool = False
    error: str | None = None
