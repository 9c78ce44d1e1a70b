"""Runners without a model that have a host tier with late and failed transfers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parrot.engine.core.steps import (
    Landed,
    LaunchedStep,
    RunnerInfo,
    StepPlan,
    StepResult,
    Transfer,
)
from tests.support.checking_runner import CheckingRunner, Launched, LaunchingRunner

GARBAGE = -1


@dataclass(eq=False)
class Flight:
    transfer: Transfer
    num_polls: int  # Polls until the transfer lands.
    succeeds: bool
    content: list[list[int]] | None = None  # The contents that the transfer has read.


class TieredRunner(CheckingRunner):
    """Transfers to the host read their blocks at the right point between steps, as on a device.
    Transfers from the host write at that point or when they land. A transfer lands after
    `min_polls` to `max_polls` polls. One of `fail_every` transfers fails and leaves garbage."""

    def __init__(self, info: RunnerInfo, *args: Any, **faults: Any) -> None:
        super().__init__(info, *args, **faults)
        self._host = [[GARBAGE] * info.block_size for _ in range(info.num_host_blocks)]
        num_slots = 0 if info.window is None else info.window.num_host_slots
        self._host_windows = [[GARBAGE] * info.block_size for _ in range(num_slots)]
        self.flights: list[Flight] = []
        self.started: list[Transfer] = []
        self.rng = random.Random(0)
        self.min_polls = 0
        self.max_polls = 0
        self.fail_every: int | None = None

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            polls = self.rng.randint(self.min_polls, max(self.min_polls, self.max_polls))
            fails = self.fail_every is not None and self.rng.randrange(self.fail_every) == 0
            flight = Flight(transfer, polls, not fails)
            assert len(set(transfer.blocks)) == len(transfer.blocks) == len(transfer.slots)
            self.started.append(transfer)
            self.flights.append(flight)
            if transfer.to_host or self.rng.random() < 0.5:
                self.begin(flight)

    def begin(self, flight: Flight) -> None:
        if not flight.transfer.to_host:
            self._write(flight)
        elif flight.content is None:
            pool, _ = self._places(flight.transfer)
            flight.content = [list(pool[block]) for block in flight.transfer.blocks]

    def _places(self, transfer: Transfer) -> tuple[list[list[int]], list[list[int]]]:
        """The contents of blocks and of host slots."""
        if transfer.of_windows:
            return self._windows, self._host_windows
        return self._slots, self._host

    def landed(self, *, wait: bool) -> list[Landed]:
        for flight in self.flights:
            flight.num_polls -= 1
        if wait and self.flights and all(flight.num_polls >= 0 for flight in self.flights):
            self.flights[0].num_polls = -1
        over = [flight for flight in self.flights if flight.num_polls < 0]
        self.flights = [flight for flight in self.flights if flight.num_polls >= 0]
        for flight in over:
            self._land(flight)
        return [Landed(f.transfer.transfer_id, f.succeeds, 1e-3) for f in over]

    def _land(self, flight: Flight) -> None:
        transfer = flight.transfer
        if not transfer.to_host:
            self._write(flight)
            return
        assert flight.content is not None, f"{transfer} lands before the previous step has run"
        _, host = self._places(transfer)
        for slot, content in zip(transfer.slots, flight.content, strict=True):
            host[slot] = content if flight.succeeds else self._garbage()

    def _write(self, flight: Flight) -> None:
        pool, host = self._places(flight.transfer)
        for block, slot in zip(flight.transfer.blocks, flight.transfer.slots, strict=True):
            content = host[slot] if flight.succeeds else self._garbage()
            pool[block] = list(content)

    def _garbage(self) -> list[int]:
        return [GARBAGE] * self._info.block_size


class TieredLaunchingRunner(TieredRunner, LaunchingRunner):
    """A transfer that is requested after a launched step reads the results of that step."""

    def __init__(self, *args: Any, **faults: Any) -> None:
        super().__init__(*args, **faults)
        self._launched_texts: object = None  # The texts of the last launched step.
        self._waiting: list[tuple[object, Flight]] = []

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if previous is None:
            self._start_waiting()
        launched = super().launch(plan, previous)
        if isinstance(launched, Launched):
            self._launched_texts = launched.texts
        return launched

    def run(self, plan: StepPlan) -> StepResult:
        self._start_waiting()
        return super().run(plan)

    def _start_waiting(self) -> None:
        """Start the transfers that wait for launched steps. These steps will not run."""
        self._launched_texts = None
        for _, flight in self._waiting:
            super().begin(flight)
        self._waiting.clear()

    def begin(self, flight: Flight) -> None:
        if self._launched_texts is None:
            super().begin(flight)
        else:
            self._waiting.append((self._launched_texts, flight))

    def run_texts(self, plan: StepPlan, texts: Sequence[Sequence[int]]) -> StepResult:
        try:
            return super().run_texts(plan, texts)
        finally:
            if texts is self._launched_texts:
                self._launched_texts = None
            for before, flight in self._waiting:
                if before is texts:
                    super().begin(flight)
            self._waiting = [pair for pair in self._waiting if pair[0] is not texts]

    def _land(self, flight: Flight) -> None:
        if flight.transfer.to_host:  # The previous step may have been dropped.
            super().begin(flight)
        super()._land(flight)
