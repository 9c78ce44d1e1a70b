"""Builds a running ServeCore from its configuration: the core, journal, observers and app."""

import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI

from parrot.journal.log import Journal, RecordsLost, Storage
from parrot.journal.sqlite import JournalFile
from parrot.observe.call_log import CallLog
from parrot.observe.recorder import Recorder, TraceFile
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.events import Sink
from parrot.server.app import create_app
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.logs import CALLS


class Serving(NamedTuple):
    """A ServeCore and its app. The app's lifespan closes the core."""

    core: ServeCore
    app: FastAPI


@asynccontextmanager
async def serving(config: CoreConfig, storage: Storage | None = None) -> AsyncIterator[Serving]:
    """A ServeCore restored from the records of `storage`, or of the configured journal file.
    Raises `ConfigError` if the journal cannot be used or the trace cannot be written, and at the
    end `RecordsLost`."""
    with ExitStack() as stack:
        trace = None
        if config.trace_path is not None:
            trace = TraceFile(config.trace_path)
            stack.callback(trace.close)
        clock: Clock = MonotonicClock()
        if storage is None and config.journal is not None:
            storage = JournalFile(config.journal, config.journal_size)
        journal = None
        if storage is not None:
            journal = Journal(storage, clock, config.journal_timeout)
            clock = journal.clock
        sinks: list[Sink] = [] if trace is None else [Recorder(trace, clock).sink]
        sampler = None
        if config.otlp_endpoint is not None:
            from parrot.observe.tracer import Tracer  # It needs the extra `otel`.
            from parrot.utils.spans import SpanExport, sampler_of

            sampler = sampler_of(config.otlp_sample_ratio, os.environ)
            tracer = Tracer(SpanExport.to(config.otlp_endpoint, "parrot"), clock)
            stack.callback(tracer.close)
            sinks.append(tracer.sink)
        if CALLS.isEnabledFor(logging.INFO):
            sinks.append(CallLog().sink)
        core = ServeCore(
            config,
            clock=clock,
            sinks=sinks,
            sampler=sampler,
            first_session_id=_first_session_id(),
        )
        try:
            yield Serving(core, create_app(core, journal))
        finally:
            if journal is not None:
                await journal.close()
                if journal.num_lost:
                    raise RecordsLost(f"{journal.num_lost} records of the journal are lost")


def _first_session_id() -> int:
    """Unix time in milliseconds. It exceeds all ids of earlier processes, unless they created more
    than 1,000 sessions per second on average. So a program that survives a restart never addresses
    another program's session."""
    return time.time_ns() // 1_000_000
