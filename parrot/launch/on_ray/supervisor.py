"""Decides which servers run, and starts and stops them."""

import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Protocol

from parrot.cluster import ClusterError
from parrot.launch.configs import Server
from parrot.launch.on_ray.actor import Address, ServerStatus
from parrot.launch.on_ray.pools import (
    Autoscaler,
    Needs,
    Pool,
    RayPlan,
    engines_to_remove,
    pool_load,
)
from parrot.protocol.public import EngineStatus, ReadyResponse

TICK_S = 2.0  # Seconds between two ticks, and timeout of a poll of all servers.
_STARTING_S = 0.25  # Seconds between two ticks while the service starts.
_MARGIN_S = 60.0  # Seconds beyond a server's own stop time until `stop` gives up.


class Runtime(Protocol):
    """Starts and stops servers. No method blocks for longer than its timeout."""

    @property
    def names(self) -> Collection[str]:
        """The servers that were started and have not been removed, including stopping ones."""
        ...

    def start(self, server: Server, needs: Needs) -> None:
        """Run a server as soon as a node has the resources, or take over the running server of
        this name. Returns at once."""
        ...

    def retire(self, name: str) -> None:
        """Begin to stop a server. Its name stays in `names` until it has stopped."""
        ...

    def poll(self, core: Address | None, timeout_s: float) -> dict[str, ServerStatus]:
        """Send ServeCore's address to all servers. Returns the status of each server that answers
        within `timeout_s`."""
        ...

    def problem(self, name: str) -> str:
        """Why a server does not run yet."""
        ...


class Supervisor:
    """Starts ServeCore and the minimum number of engines of each pool, scales the pools by load,
    and reports a new address of ServeCore to the engines.

    Each tick decides from the servers' current status, so a restarted supervisor needs no state."""

    def __init__(
        self,
        plan: RayPlan,
        runtime: Runtime,
        tell: Callable[[str], None],
        wait: Callable[[float], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait(seconds)` sleeps and returns False, or returns True early to make `run` return."""
        self._plan = plan
        self._runtime = runtime
        self._tell = tell
        self._wait = wait
        self._now = now
        self._core: Address | None = None
        self._serving: dict[str, EngineStatus] = {}
        self._statuses: dict[str, ServerStatus] = {}
        self._deaths: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._scalers = {pool.name: Autoscaler(pool.scaling) for pool in plan.pools}

    @property
    def stop_s(self) -> float:
        """Upper bound for the duration of `stop`, in seconds."""
        engines = max(pool.engine.stop_s for pool in self._plan.pools)
        return engines + self._plan.core.stop_s + 2 * _MARGIN_S

    @property
    def core_url(self) -> str | None:
        """ServeCore's URL. None before ServeCore has reported its address."""
        return None if self._core is None else f"http://{self._core[0]}:{self._core[1]}"

    @property
    def serving(self) -> Mapping[str, EngineStatus]:
        """The engines that were registered with ServeCore at the last tick, by name."""
        return self._serving

    @property
    def missing(self) -> list[str]:
        """The names of servers that were started but do not serve yet."""
        core = self._plan.core.name
        wanted = [name for pool in self._plan.pools for name in self._present(pool)]
        missing = [name for name in wanted if name not in self._serving]
        answer = self._ready()
        return missing if answer is not None else [core, *missing]

    # Life

    def start(self, existing: Collection[str] = ()) -> None:
        """Start all missing servers. `existing` are the names of servers that an earlier
        supervisor started; they are taken over."""
        self._runtime.start(self._plan.core, self._plan.core_needs)
        for pool in self._plan.pools:
            there = [name for name in pool.names() if name in existing]
            for name in there:
                self._runtime.start(pool.server(name), pool.needs)
            self._scalers[pool.name].adopt(len(there))
            self._fit(pool)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when all started servers serve, or when `wait` returns True.

        Raises `ClusterError` when a server has crashed twice, when another process stops the
        service, or after the timeout."""
        deadline = self._now() + timeout_s
        while self._tick() or self.missing:
            if self._was_ended:
                raise ClusterError("another process stopped the service")
            for status in self._statuses.values():
                if status.num_deaths > 1:
                    raise ClusterError(status.last_death)
            if self._now() >= deadline:
                problems = [f"{name}: {self._problem(name)}" for name in self.missing]
                raise ClusterError("\n".join(["not ready in time:", *problems]))
            if self._wait(_STARTING_S):
                return

    def run(self) -> None:
        """Tick every 2 s until `wait` returns True, or another process stops the servers."""
        while not self._wait(TICK_S):
            self._tick()
            if self._was_ended:
                self._tell("another process stopped the servers")
                return

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Drain and stop all servers, engines first. Returns when all have stopped. Once
        `is_hurried` returns True, it returns when all were told to stop; the remaining servers end
        with the actors of this process."""
        core = self._plan.core
        engines = [name for name in self._runtime.names if name != core.name]
        waits_s = [pool.engine.stop_s for pool in self._plan.pools]
        self._end(engines, max(waits_s), is_hurried)
        self._end([core.name], core.stop_s, is_hurried)

    def _end(self, names: Collection[str], wait_s: float, is_hurried: Callable[[], bool]) -> None:
        for name in names:
            if name not in self._leaving:
                self._retire(name)
        deadline = self._now() + wait_s + _MARGIN_S
        while any(name in self._runtime.names for name in names) and self._now() < deadline:
            if is_hurried():
                return
            self._runtime.poll(self._core, TICK_S)

    # One round

    @property
    def _was_ended(self) -> bool:
        """Whether another process stops the service."""
        return any(status.is_over for status in self._statuses.values())

    def _tick(self) -> bool:
        """Poll all servers and start or stop engines as needed. Returns whether it did."""
        self._statuses = self._runtime.poll(self._core, TICK_S)
        self._leaving &= set(self._runtime.names)
        self._note_deaths()
        self._note_core()
        answer = self._ready()
        engines = [] if answer is None else answer.engines or []
        self._serving = {engine.engine_name: engine for engine in engines}
        changes = [self._scale(pool) for pool in self._plan.pools]
        return any(changes)

    def _note_deaths(self) -> None:
        for name, status in self._statuses.items():
            if status.num_deaths > self._deaths.get(name, 0):
                self._tell(f"{status.last_death}\n{name} starts again")
            self._deaths[name] = status.num_deaths

    def _note_core(self) -> None:
        status = self._statuses.get(self._plan.core.name)
        if status is None or status.address is None or status.address == self._core:
            return
        if self._core is not None:
            host, port = status.address
            self._tell(f"ServeCore is at http://{host}:{port} now; engines follow it")
        self._core = status.address

    def _ready(self) -> ReadyResponse | None:
        """ServeCore's last answer to `/ready`. None if ServeCore did not answer. Without engines
        if ServeCore is not ready."""
        status = self._statuses.get(self._plan.core.name)
        if status is None or status.ready is None:
            return None
        code, answer = status.ready
        if code != HTTPStatus.OK:
            return ReadyResponse(num_queued=0, engines=[])
        return ReadyResponse.model_validate(answer)

    def _scale(self, pool: Pool) -> bool:
        """Scale the pool to its load. Returns whether engines were started or stopped."""
        serving = [self._serving[name] for name in self._present(pool) if name in self._serving]
        scaler = self._scalers[pool.name]
        before = scaler.wanted
        wanted = scaler.observe(self._now(), pool_load(serving) if serving else None)
        if wanted != before:
            self._tell(f"{pool.name}: {wanted} engines instead of {before}")
        return self._fit(pool)

    def _fit(self, pool: Pool) -> bool:
        """Start or stop engines until the pool has the wanted number. Returns whether it did."""
        wanted = self._scalers[pool.name].wanted
        present = self._present(pool)
        free = [name for name in pool.names() if name not in self._runtime.names]
        new = free[: max(0, wanted - len(present))]
        for name in new:
            self._runtime.start(pool.server(name), pool.needs)
        gone = engines_to_remove(present, self._serving, wanted)
        for name in gone:
            self._retire(name)
        return bool(new or gone)

    def _retire(self, name: str) -> None:
        self._leaving.add(name)
        self._deaths.pop(name, None)
        self._runtime.retire(name)

    def _present(self, pool: Pool) -> list[str]:
        """The names of the pool's engines, without those that are stopping."""
        there = set(self._runtime.names) - self._leaving
        return [name for name in pool.names() if name in there]

    def _problem(self, name: str) -> str:
        status = self._statuses.get(name)
        if status is None:
            return self._runtime.problem(name)
        return status.last_death or "it runs, but does not serve yet"
