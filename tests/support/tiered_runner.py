"""Runners without a model that also have a host tier, as slow and unreliable as is allowed."""

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
    num_looks: int  # until it lands
    succeeds: bool
    content: list[list[int]] | None = None  # what it has read


class TieredRunner(CheckingRunner):
    """What goes to the host is read in its place among the steps, as on a device. What comes back
    is written in its place, or as late as it lands, after `min_looks` to `max_looks` looks. One of
    `fail_every` fails, and leaves garbage."""

    def __init__(self, info: RunnerInfo, *args: Any, **faults: Any) -> None:
        super().__init__(info, *args, **faults)
        self._host = [[GARBAGE] * info.block_size for _ in range(info.num_host_blocks)]
        num_slots = 0 if info.window is None else info.window.num_host_slots
        self._host_windows = [[GARBAGE] * info.block_size for _ in range(num_slots)]
        self.flights: list[Flight] = []
        self.begun: list[Transfer] = []
        self.rng = random.Random(0)
        self.min_looks = 0
        self.max_looks = 0
        self.fail_every: int | None = None

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            looks = self.rng.randint(self.min_looks, max(self.min_looks, self.max_looks))
            fails = self.fail_every is not None and self.rng.randrange(self.fail_every) == 0
            flight = Flight(transfer, looks, not fails)
            assert len(set(transfer.blocks)) == len(transfer.blocks) == len(transfer.slots)
            self.begun.append(transfer)
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
        """The memory of the device and of the host."""
        if transfer.of_windows:
            return self._windows, self._host_windows
        return self._slots, self._host

    def landed(self, *, wait: bool) -> list[Landed]:
        for flight in self.flights:
            flight.num_looks -= 1
        if wait and self.flights and all(flight.num_looks >= 0 for flight in self.flights):
            self.flights[0].num_looks = -1
        over = [flight for flight in self.flights if flight.num_looks < 0]
        self.flights = [flight for flight in self.flights if flight.num_looks >= 0]
        for flight in over:
            self._land(flight)
        return [Landed(f.transfer.transfer_id, f.succeeds, 1e-3) for f in over]

    def _land(self, flight: Flight) -> None:
        transfer = flight.transfer
        if not transfer.to_host:
            self._write(flight)
            return
        assert flight.content is not None, f"{transfer} lands before the step before it has run"
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
    """A transfer that begins behind a launched step reads what that step has left."""

    def __init__(self, *args: Any, **faults: Any) -> None:
        super().__init__(*args, **faults)
        self._on_its_way: object = None  # the texts of the step launched last
        self._behind: list[tuple[object, Flight]] = []

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if previous is None:
            self._give_up()
        launched = super().launch(plan, previous)
        if isinstance(launched, Launched):
            self._on_its_way = launched.texts
        return launched

    def run(self, plan: StepPlan) -> StepResult:
        self._give_up()
        return super().run(plan)

    def _give_up(self) -> None:
        """Begin what waits for a launched step that was dropped."""
        self._on_its_way = None
        for _, flight in self._behind:
            super().begin(flight)
        self._behind.clear()

    def begin(self, flight: Flight) -> None:
        if self._on_its_way is None:
            super().begin(flight)
        else:
            self._behind.append((self._on_its_way, flight))

    def run_texts(self, plan: StepPlan, texts: Sequence[Sequence[int]]) -> StepResult:
        try:
            return super().run_texts(plan, texts)
        finally:
            if texts is self._on_its_way:
                self._on_its_way = None
            for before, flight in self._behind:
                if before is texts:
                    super().begin(flight)
            self._behind = [pair for pair in self._behind if pair[0] is not texts]

    def _land(self, flight: Flight) -> None:
        if flight.transfer.to_host:  # if the step before it was given up
            super().begin(flight)
        super()._land(flight)
