"""The connection of a program to a real ServeCore with a fake engine."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from parrot import P
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import running_in_thread
from tests.support.fake_engine import FakeEngine, register


@contextmanager
def machine_with(engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    """Yields the connection. ServeCore runs in a thread, and its integrity is checked at the
    end."""
    config, clock = CoreConfig(), MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    with running_in_thread(create_app(core)) as url:
        asyncio.run(register(url, engine))
        yield P.VirtualMachine(url)
        core.check_integrity()
