"""Starts and stops the processes of the ranks other than rank 0."""

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import DeviceLost
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.group import Link, RankGroup, device_kind
from parrot.engine.runner.ranks.unit import LOSS_DETECTION_S, Unit
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

_MODULE = "parrot.engine.runner.ranks.follower"
_GRACE_S = 5.0  # A process that has not exited after this time, in seconds, is killed.

# The start fails if another rank is still loading its shard this long after rank 0 has finished.
LOAD_PATIENCE = timedelta(minutes=15)


class RankProcesses:
    """`RankMember` of rank 0. Starts the processes of the other ranks, which load in parallel."""

    def __init__(self, config: BuiltinConfig) -> None:
        size = config.instance.tensor_parallel
        self.group = RankGroup(0, size)
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unit: Unit | None = None
        # Only rank 0 serves requests, so the other ranks do not get the token.
        shared = config.model_dump(mode="json", exclude={"cluster_token"})
        for rank in range(1, size):
            self._start({"rank": rank, "size": size, "config": shared})

    def _start(self, task: dict[str, object]) -> None:
        link, other = Link.pair()
        with other:
            command = [sys.executable, "-m", _MODULE, str(other.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()])
        self._links.append(link)
        self._processes.append(process)
        link.send(json.dumps(task).encode())

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def join(self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool) -> Unit:
        deadline = time.monotonic() + LOAD_PATIENCE.total_seconds()
        for rank, link in enumerate(self._links, start=1):
            self._require_loaded(rank, link, deadline, device)
        self._unit = Unit(
            self.group,
            self._links,
            with_tables=with_tables,
            wait_for_others=self._wait,
            kill_others=self._kill,
        )
        self.report("connecting to the other ranks")
        # Other users cannot enter the folder: its mode is 700.
        with tempfile.TemporaryDirectory(prefix="parrot-ranks-") as folder:
            store = f"{folder}/store"
            for link in self._links:
                link.send(store.encode())
            self.group.connect_by_file(store, device, layout)
        return self._unit

    def _require_loaded(self, rank: int, link: Link, deadline: float, device: torch.device) -> None:
        if not link.wait_for_message(max(0.0, deadline - time.monotonic())):
            waited = f"{LOAD_PATIENCE.total_seconds():g} s after rank 0 had"
            raise DeviceLost(f"rank {rank} hangs: it has not loaded its part of the model {waited}")
        try:
            answer = json.loads(link.receive())
        except EOFError:
            raise DeviceLost(f"rank {rank} has ended while it loaded the model") from None
        if (error := answer["error"]) is not None:
            raise ConfigError(f"rank {rank}: {error}")
        if (kind := answer["device"]) != (own := device_kind(device)):
            raise ConfigError(
                "`instance.tensor_parallel`: all ranks need the same kind of device, but "
                f"rank 0 has {own} and rank {rank} {kind}; choose other devices with `device`"
            )

    def report(self, doing: str | None) -> None:
        if self._unit is not None:
            self._unit.report(doing)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context of the start. An error stops the other ranks.

        If the cause is a rank that has exited or hangs, raises `DeviceLost` that names the rank."""
        try:
            yield
        except BaseException as error:
            lost = None
            if self._unit is not None and not isinstance(error, ConfigError | DeviceLost):
                lost = self._unit.why_lost(LOSS_DETECTION_S)
            self.close()
            if lost is not None:
                raise DeviceLost(lost) from error
            raise

    def close(self) -> None:
        """Stop the other ranks and wait until they have exited. Idempotent."""
        if self._unit is not None:
            self._unit.close()
            return
        for link in self._links:
            link.close()
        self._kill()  # A rank that is loading would take seconds to exit.
        self._wait()
        self.group.abort()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _wait(self) -> None:
        for process in self._processes:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
