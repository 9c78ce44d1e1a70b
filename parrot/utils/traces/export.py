"""Spans on their way out: queued, written by a thread, and exported by a process of their own.

To make a span, encode and send it takes a tenth of the CPU time of a whole call, which this process
needs for calls. So it tells plain facts."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Protocol

import orjson

from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

RECORDS = "parrot.utils.traces.otlp"  # makes spans of `SpanRecord`s
_MAX_PENDING = 256  # things whose spans are yet to be written
_FLUSH_S = 5.0


class SpanSink(Protocol):
    """The end of the way, written to from one thread; it may be slow, and raise what it wants."""

    def write(self, facts: Sequence[Any]) -> None: ...

    def close(self, timeout_s: float) -> None:
        """Export what was written, for so many seconds at most; with 0, while a write may still be
        stuck, end it."""
        ...


class OtlpProcess:
    """A process that runs the module `maker`: it makes spans of facts, and ends with its input."""

    def __init__(self, endpoint: str, service: str, maker: str = RECORDS) -> None:
        command = [sys.executable, "-m", maker, endpoint, service]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def write(self, facts: Sequence[Any]) -> None:
        """Raises `OSError` if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(facts, default=list) + b"\n")
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
            raise ConfigError(
                f"otlp_endpoint: {package} is not installed: pip install 'parrot[otel]'"
            )
    return SpanExport(OtlpProcess(endpoint, service, maker))


class SpanExport:
    """Export without holding up whoever has something to tell. What comes faster than it can be
    exported is left out, and the log says so."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spans")
        self._room = threading.BoundedSemaphore(_MAX_PENDING)
        self.num_left_out = 0

    def send(self, make: Callable[[], Sequence[Any]]) -> None:
        """Export what `make` gives when it is called, in the exporting thread."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._export, make)
            return
        if self.num_left_out == 0:
            logger.warning("spans come faster than they can be exported: some are left out")
        self.num_left_out += 1

    def close(self) -> None:
        """Export what is pending, for a few seconds at most."""
        done = self._thread.submit(lambda: None)
        left_s = _FLUSH_S
        try:
            done.result(_FLUSH_S)
        except TimeoutError:
            logger.warning("the last spans could not be exported in %g s", _FLUSH_S)
            left_s = 0.0
        self._sink.close(left_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _export(self, make: Callable[[], Sequence[Any]]) -> None:
        try:
            self._sink.write(make())
        except Exception:
            logger.exception("spans could not be exported")
        finally:
            self._room.release()
