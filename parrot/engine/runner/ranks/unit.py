"""Rank 0's connection to the other ranks: it sends them steps and watches whether they live."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from parrot.engine.core.steps import DeviceLost, Landed, StepPlan, Transfer
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.host.copies import HostCopies, RankTransfers
from parrot.engine.runner.ranks.group import START_PATIENCE, TIMEOUT, Link, RankGroup
from parrot.engine.runner.ranks.steps import RankStep, StepWriter

logger = logging.getLogger(__name__)

_GRACE_S = 10.0  # `close` waits this long, in seconds, for each watch thread.
_CHECK_INTERVAL_S = 5.0  # Longest time, in seconds, between two checks whether a rank hangs.
_EXIT_DEADLINE_S = (
    60.0  # After a failed start, rank 0 exits at the latest after this time, in seconds.
)

# A collective can fail before the watch thread sees that a rank has exited. After such an error,
# rank 0 waits this long, in seconds, for the reason.
LOSS_DETECTION_S = 2.0


class RankMember(Protocol):
    """A process's membership among the ranks, while its runner is loaded."""

    @property
    def group(self) -> RankGroup:
        """Connected after `join`."""
        ...

    def join(
        self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool
    ) -> "Unit | None":
        """Report that the weights are loaded, and return when all ranks have. On rank 0, returns
        the unit, and raises the error of a rank that failed to load.

        `layout` describes the memory that ranks share."""
        ...

    def report(self, doing: str | None) -> None:
        """After `join`, report the phase that this rank enters, or None when it has started.

        All ranks report the same phases in the same order. On rank 0, raises `DeviceLost` if a rank
        has exited, or stays in a phase for longer than `START_PATIENCE`."""
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    """Work that all ranks do together: a step, or a phase of the start."""

    began: float  # `time.monotonic()` at the start of the work.
    patience_s: float
    doing: str | None = None  # The phase of the start; None for a step.

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.began > self.patience_s


class Unit:
    """All ranks, seen from rank 0. They stop together.

    A failure during a step leaves the ranks out of step, so it raises `DeviceLost`. Every later
    call raises `DeviceLost` too."""

    def __init__(
        self,
        group: RankGroup,
        links: Sequence[Link],
        *,
        with_tables: bool,
        wait_for_others: Callable[[], None] = lambda: None,
        kill_others: Callable[[], None] = lambda: None,
        patience: timedelta = TIMEOUT,
    ) -> None:
        """`links[i]` leads to rank i + 1. `with_tables`: see `StepWriter`.

        `wait_for_others` returns when the other ranks have exited. It is called after the links are
        closed. `kill_others` kills them. If a step takes longer than `patience`, a rank hangs."""
        self._patience_s = patience.total_seconds()
        self._task: _Task | None = None
        self._num_reports = 0
        self._wait_for_others = wait_for_others
        self._kill_others = kill_others
        self._losing = threading.Lock()
        self._is_lost = threading.Event()
        self._ending = threading.Timer(_EXIT_DEADLINE_S, _end_process)
        self._ending.daemon = True
        self._group = group
        self._links = links
        self._writer = StepWriter(with_tables=with_tables)
        self._lost: str | None = None
        self._is_closed = False
        self._when_lost: list[Callable[[], None]] = []
        self._watches: list[threading.Thread] = []
        for rank, link in enumerate(links, start=1):
            watch = threading.Thread(
                target=self._watch, args=(rank, link), name=f"rank-{rank}-watch", daemon=True
            )
            watch.start()
            self._watches.append(watch)

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Call `tell`, on any thread, once a rank is lost."""
        self._when_lost.append(tell)
        if self._lost is not None:
            tell()

    def send(self, step: RankStep) -> None:
        """Send a step to the other ranks. Rank 0 must run the same step inside `together`."""
        message = self._writer.message(step).tobytes()
        for link in self._links:
            link.send(message)

    def report(self, doing: str | None) -> None:
        """See `RankMember.report`."""
        self._require_all()
        self._num_reports += 1
        patience_s = START_PATIENCE.total_seconds()
        self._task = None if doing is None else _Task(time.monotonic(), patience_s, doing)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of the work that all ranks do. Converts every error to `DeviceLost`."""
        self._require_all()
        outer = self._task
        self._task = outer or _Task(time.monotonic(), self._patience_s)
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            self.why_lost(LOSS_DETECTION_S)
            with self._losing:
                self._lost = self._lost or f"a step failed on rank 0: {error}"
            raise DeviceLost(self._lost) from error
        finally:
            self._task = outer
        self._require_all()  # An aborted all-reduce returns without an error.

    def why_lost(self, timeout_s: float) -> str | None:
        """The reason why the unit is lost; None if the unit is not lost within `timeout_s`."""
        self._is_lost.wait(timeout_s)
        return self._lost

    def _require_all(self) -> None:
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def close(self) -> None:
        """Stop the other ranks and wait until they have exited. Idempotent."""
        self._is_closed = True
        self._ending.cancel()
        for link in self._links:
            link.end()
        self._wait_for_others()
        # The watch threads abort the communicator. Otherwise it would hang at interpreter exit.
        for watch in self._watches:
            watch.join(_GRACE_S)

    def _watch(self, rank: int, link: Link) -> None:
        interval_s, late = (
            min(self._patience_s, START_PATIENCE.total_seconds(), _CHECK_INTERVAL_S),
            None,
        )
        while late is None and not link.wait_for_end(interval_s):
            task = self._task  # Read once: the other thread may clear the attribute.
            late = task if task is not None and task.is_late else None
        if not self._is_closed:
            self._lose(rank, late)
            self._kill_others()
        link.end()  # First: the engine's thread may be blocked in a send to a rank that hangs.
        self._group.abort()
        link.close()

    def _lose(self, rank: int, late: _Task | None) -> None:
        """Record that `rank` has exited, or that the ranks are `late` with a task."""
        with self._losing:  # A step that fails as a result must not report its own reason.
            if self._lost is not None:
                return
            task = late or self._task
            for link in self._links:
                link.end()
            if task is not None and task.doing is not None:
                self._lost = self._why_not_started(rank, task, is_late=late is not None)
                self._ending.start()
            elif late is not None:
                self._lost = f"a step has not ended for {late.patience_s:g} s"
            else:
                self._lost = f"rank {rank} has ended"
        logger.critical("%s: the engine cannot run further steps", self._lost)
        self._is_lost.set()
        for tell in self._when_lost:
            tell()

    def _why_not_started(self, rank: int, task: _Task, *, is_late: bool) -> str:
        # All ranks report the same phases in order. So the rank with the fewest reports hangs, and
        # the other ranks wait for it.
        said = [_reports(link) for link in self._links]
        if not is_late:
            return f"rank {rank} has ended while it was {said[rank - 1][-1]}"
        rank = 1 + min(range(len(said)), key=lambda index: len(said[index]))
        doing: str | None = said[rank - 1][-1]
        if len(said[rank - 1]) > self._num_reports:
            rank, doing = 0, task.doing
        return f"rank {rank} hangs: it has been {doing} for {task.patience_s:g} s"


def _reports(link: Link) -> list[str]:
    """All phases that the other rank has reported since `join`, in order.

    The link must have ended, and no other thread may read from it."""
    found = []
    with suppress(EOFError):
        while True:
            found.append(json.loads(link.receive()).get("doing", "failing"))
    return found or ["joining"]


def _end_process() -> None:
    """Exit this process after a failed start.

    With some backends rank 0 would wait indefinitely for the first message of a rank that has
    exited. Steps do not need this: they fail with the rank and raise `DeviceLost`."""
    logger.critical("rank 0 still waits for the other ranks, so this process exits")
    logging.shutdown()
    os._exit(1)


def together(unit: Unit | None) -> AbstractContextManager[None]:
    """`Unit.together`, or a context that does nothing if there is only one rank."""
    return nullcontext() if unit is None else unit.together()


class RankCopies:
    """`HostCopies` on rank 0 that also sends every transfer to the other ranks."""

    def __init__(self, copies: HostCopies, unit: Unit) -> None:
        self._copies = copies
        self._unit = unit

    def warm_up(self, block: int) -> None:
        self._copies.warm_up(block)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        with together(self._unit):
            self._send(RankTransfers(begun=tuple(transfers)))
            self._copies.transfer(transfers)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        with together(self._unit):
            if landed := self._copies.landed(wait=wait):
                self._send(RankTransfers(landed=tuple(one.transfer_id for one in landed)))
            return landed

    def guard(self, plan: StepPlan) -> Sequence[int]:
        if awaited := self._copies.guard(plan):
            self._send(RankTransfers(awaited=tuple(awaited)))
        return awaited

    def follow(self, transfers: RankTransfers) -> None:
        self._copies.follow(transfers)

    def _send(self, transfers: RankTransfers) -> None:
        self._unit.send(RankStep.of(transfers))
