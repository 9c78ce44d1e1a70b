"""Drivers of an engine core: for real models a thread. (Simulated ones have `parrot.engine.sim`.)

All drivers keep the rule that makes the core simple: verbs (submit, abort, free) wait in an inbox
and are applied before a step is planned, so they take effect within one step and never meet a step
half planned. A step that was launched before goes on as it is. A verb that fails costs nobody else
anything. Outcomes are delivered on the event loop, all those of a step at once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import Delivery
from parrot.engine.core.plan import DeviceLost
from parrot.protocol.errors import EngineFailed, Unavailable

logger = logging.getLogger(__name__)

_THREAD_NAME = "engine-core"

R = TypeVar("R")
Verb = Callable[[EngineCore], None]


class Driver(Protocol):
    """Used from one event loop."""

    @property
    def is_lost(self) -> bool:
        """Whether no step will ever run again."""
        ...

    async def start(self) -> EngineCore:
        """Make the core and begin to run it. The core may be read, but only verbs change it."""
        ...

    def post(self, verb: Verb) -> None:
        """Apply `verb` between two steps."""
        ...

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop. May be called twice."""
        ...


async def ask(driver: Driver, question: Callable[[EngineCore], R]) -> R:
    """Post a verb and wait for what it returns."""
    answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def verb(core: EngineCore) -> None:
        try:
            outcome: R | Exception = question(core)
        except Exception as error:  # noqa: BLE001 - it is raised where the question was asked
            outcome = error
        core.requests.outbox.add(partial(settle, answer), outcome)

    driver.post(verb)
    return await answer


def apply_verbs(inbox: deque[Verb], core: EngineCore) -> None:
    """Apply the verbs that have come until now."""
    for _ in range(len(inbox)):
        verb = inbox.popleft()
        try:
            verb(core)
        except Exception:
            logger.exception("a verb failed")


def deliver(outcomes: list[Delivery]) -> None:
    """Make the calls; one sink's defect must not cost the others their answers."""
    for call, argument in outcomes:
        try:
            call(argument)
        except Exception:
            logger.exception("an outcome could not be delivered")


class ThreadDriver:
    """Runs the core in a thread of its own, in which the model is also loaded. Idle, the thread
    sleeps on a condition. `close` gives a step that is under way `patience_s` to end."""

    def __init__(self, load: Callable[[], EngineCore], *, patience_s: float = 10.0) -> None:
        self._load = load
        self._patience_s = patience_s
        self._inbox: deque[Verb] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._is_loaded = False
        self._at_end: list[Callable[[], None]] = []
        self.is_lost = False

    async def start(self) -> EngineCore:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[EngineCore] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, loaded), name=_THREAD_NAME, daemon=True
        )
        self._thread.start()
        core = await loaded
        self._is_loaded = True
        return core

    def post(self, verb: Verb) -> None:
        with self._wake:
            self._inbox.append(verb)
            self._wake.notify()

    def lose(self) -> None:
        """Say, from any thread, that no step can be run any more."""
        self.is_lost = True

    def at_end(self, call: Callable[[], None]) -> None:
        """Call in the core's thread when it ends. For `load` to use."""
        self._at_end.append(call)

    async def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None and self._is_loaded:  # loading cannot be interrupted
            await asyncio.to_thread(self._thread.join, self._patience_s)
            if self._thread.is_alive():
                logger.error("a step has not ended for %g s; it is given up", self._patience_s)

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: "asyncio.Future[EngineCore]") -> None:
        try:
            core = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, `start` raises it
            _tell(loop, settle, loaded, error)
            return
        _tell(loop, settle, loaded, core)
        try:
            self._serve(core, loop)
        finally:
            self.is_lost = self.is_lost or not self._is_closing
            apply_verbs(self._inbox, core)
            core.fail_everything(Unavailable("the engine is shutting down"))
            self._deliver(core, loop)
            for call in self._at_end:
                call()

    def _serve(self, core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        may_step = False
        while not self._is_closing:
            with self._wake:
                while not (self._inbox or may_step or self._is_closing):
                    self._wake.wait()
            may_step = self._step_or_fail(core)
            self._deliver(core, loop)

    def _step_or_fail(self, core: EngineCore) -> bool:
        """Apply the inbox and run a step. A defect fails the requests at hand, not the engine."""
        try:
            core.wait_until_due()
            apply_verbs(self._inbox, core)
            return core.has_work and core.step()
        except DeviceLost as error:
            if not self.is_lost:
                logger.critical("the device is lost: %s", error)
            self.is_lost = True
            core.fail_everything(Unavailable("the engine has lost its device"))
        except Exception:
            logger.exception("the engine core failed; its requests are given up")
            core.fail_everything(EngineFailed("internal error of the engine"))
        return False

    @staticmethod
    def _deliver(core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        if outcomes := core.requests.outbox.take():
            _tell(loop, deliver, outcomes)


def core_thread_is_alive() -> bool:
    """Whether after `close` the thread still loads a model or waits for a stuck device, neither of
    which can be interrupted."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Call from another thread; nobody is left to be told once the loop has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Give the future its result, or the error that it is to raise, unless it was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
