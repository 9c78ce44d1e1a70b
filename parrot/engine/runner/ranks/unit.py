"""Rank 0's view of the ranks besides it: what it tells them, and that it ends with any of them."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch

from parrot.engine.core.plan import DeviceLost
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.group import TIMEOUT, RankGroup
from parrot.engine.runner.ranks.link import Link
from parrot.engine.runner.ranks.steps import RankStep, StepWriter

logger = logging.getLogger(__name__)

_GRACE_S = 10.0


class Seat(Protocol):
    """A process's place among the ranks, while its runner is loaded."""

    @property
    def group(self) -> RankGroup:
        """Connected once it has joined."""
        ...

    def join(
        self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool
    ) -> "Unit | None":
        """Say that the weights are loaded, and return when all ranks say so: on rank 0 the unit.
        Raises what kept another rank from it. `layout`: of the memory that ranks share."""
        ...


class Unit:
    """Whatever fails while the ranks run a step leaves them at different places, so it is the end
    of all: `DeviceLost` then, and from then on."""

    def __init__(
        self,
        group: RankGroup,
        links: Sequence[Link],
        *,
        with_tables: bool,
        wait_for_others: Callable[[], None] = lambda: None,
        patience: timedelta = TIMEOUT,
    ) -> None:
        """`links` to rank 1, 2, and so on. `with_tables`: see `StepWriter`. `wait_for_others`
        returns when they have ended, once the links have. A step that takes longer than `patience`
        has a rank that hangs, which is found after twice that at most."""
        self._patience_s = patience.total_seconds()
        self._began: float | None = None  # what runs together
        self._wait_for_others = wait_for_others
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

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, once a rank has ended."""
        self._when_lost.append(tell)
        if self._lost is not None:
            tell()

    def tell(self, step: RankStep) -> None:
        """Let the others run a step. This rank must, too, `together` with them."""
        message = self._writer.message(step).tobytes()
        for link in self._links:
            link.send(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run inside what all ranks do. Raises `DeviceLost` for anything that fails."""
        self._require_all()
        outer, self._began = self._began, self._began or time.monotonic()
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            self._lost = self._lost or f"a step failed on rank 0: {error}"
            raise DeviceLost(self._lost) from error
        finally:
            self._began = outer
        self._require_all()  # sums that were given up come without an error

    def _require_all(self) -> None:
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def close(self) -> None:
        """End the other ranks, and wait for that. May be called twice."""
        self._is_closed = True
        for link in self._links:
            link.end()
        self._wait_for_others()
        for watch in self._watches:  # a communicator that is left to the interpreter's end hangs
            watch.join(_GRACE_S)

    def _watch(self, rank: int, link: Link) -> None:
        reason = f"rank {rank} has ended"
        while not link.wait_for_end(self._patience_s):
            began = self._began  # once: the step may end meanwhile
            if began is not None and time.monotonic() - began > self._patience_s:
                reason = f"a step has not ended for {self._patience_s:g} s"
                break
        if not self._is_closed:
            self._lost = self._lost or reason
            logger.critical("%s: no step can be run any more", reason)
            for tell in self._when_lost:
                tell()
        link.end()  # before what may wait: a step may be told to a rank that hangs
        self._group.abort()
        link.close()


def together(unit: Unit | None) -> AbstractContextManager[None]:
    """See `Unit`; nothing if there is only one rank."""
    return nullcontext() if unit is None else unit.together()
