"""A cluster on the machines of an inventory: checked, started, watched, stopped."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby

from parrot.cluster.restarts import Restarts
from parrot.launch.by_ssh.inventory import Inventory, Site
from parrot.launch.by_ssh.ssh import Link
from parrot.launch.by_ssh.wire import (
    GO,
    HURRY,
    PING,
    PING_S,
    STOP,
    Action,
    Order,
    Report,
    ServerOrder,
)

_CHECK_S = 120.0  # for a machine to be reached and checked
_MAX_PROBLEMS = 100  # of a connection; the last are kept
_MAX_REPORTS = 1000  # that wait to be told; agents leave out lines of logs if more do
_SLACK_S = 15.0  # beyond the time that servers may take to end


class LaunchError(Exception):
    """Machines that cannot run what they should; the message names each with its problems."""


@dataclass(slots=True)
class _State:
    """`link` None: there is no connection. `problems`, `is_checked`: of the present one."""

    link: Link | None = None
    began: float = 0.0
    is_checked: bool = False
    is_over: bool = False  # it was stopped, from here or elsewhere
    problems: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_PROBLEMS))


class Machines:
    """Runs the servers of an inventory. `tell` gets what is new, with the name of its site;
    all but pings is done in the caller's thread."""

    def __init__(self, inventory: Inventory, tell: Callable[[str, Report], None]) -> None:
        self._inventory, self._tell = inventory, tell
        self._reports: queue.Queue[tuple[Link, Report | None]] = queue.Queue(_MAX_REPORTS)
        self._states = {site.name: _State() for site in inventory.sites}
        self._restarts = Restarts()
        self._is_ending = threading.Event()
        self.unready = {placed.server.name for s in inventory.sites for placed in s.servers}

    def start(self, action: Action) -> None:
        """Check all machines and, if every one is fit, start the servers. Raises `LaunchError`,
        and then nothing was started."""
        threading.Thread(target=self._ping, name="ping", daemon=True).start()
        for site in self._inventory.sites:
            self._connect(site, action)
        waiting = {site.name for site in self._inventory.sites}
        deadline = time.monotonic() + _CHECK_S
        while waiting:
            heard = self._next(deadline - time.monotonic())
            if heard is None:
                for name in waiting:
                    self._states[name].problems.append(f"no answer in {_CHECK_S:g} s")
                break
            name, report = heard
            if report is None or report.kind == "checked":
                waiting.discard(name)
        found = {name: s.problems for name, s in self._states.items() if s.problems}
        if found:
            for state in self._states.values():
                self._drop(state)
            texts = [f"{name}: {text}" for name, all_of in found.items() for text in all_of]
            raise LaunchError("\n".join(texts))
        for state in self._states.values():
            if state.link is not None:
                state.link.send(GO)

    def detached(self, timeout_s: float) -> None:
        """Return when every machine's servers are ready, and run by themselves. Raises
        `LaunchError`; they go on."""
        self._wait_all(self._inventory.sites, timeout_s)

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Pass on what the agents say; `on_ready` once all servers have been ready. Connections
        that break are made again, each after a pause that doubles. Returns when all was stopped
        from elsewhere."""
        is_told = False
        while not all(state.is_over for state in self._states.values()):
            if not (self.unready or is_told):
                is_told = True
                on_ready()
            now = time.monotonic()
            heard = self._next(self._wait_s(now))
            if heard is not None:
                self._heed(*heard)
            sites = {site.name: site for site in self._inventory.sites}
            for name in self._restarts.take_due(time.monotonic()):
                self._connect(sites[name], Action.RUN)
            self._give_up_late(time.monotonic())

    def stop(self) -> None:
        """End all: engines, which finish their calls, on machines without ServeCore first. Raises
        `LaunchError` naming those that did not say that they had."""
        try:
            self._end_all(self._ask_to_end, _SLACK_S)
        finally:
            self._is_ending.set()

    def hurry(self) -> None:
        """Let `stop`, which has begun or is about to, wait for no calls. May be called by a
        signal's handler."""
        for state in self._states.values():
            if state.link is not None and state.is_checked:
                state.link.say(HURRY)

    def stop_elsewhere(self) -> None:
        """Stop what another launcher started. Raises as `stop`."""
        self._end_all(lambda site: self._connect(site, Action.STOP), _CHECK_S)

    # Inside.

    def _end_all(self, ask: Callable[[Site], None], slack_s: float) -> None:
        """Ask each machine to end its servers, ServeCore's when the others have, and wait."""
        problems = []
        for _, sites in groupby(self._inventory.sites, key=lambda site: site.has_core):
            group = list(sites)
            for site in group:
                ask(site)
            try:
                self._wait_all(group, max(site.stop_s for site in group) + slack_s)
            except LaunchError as error:
                problems.append(str(error))
        if problems:
            raise LaunchError("\n".join(problems))

    def _ask_to_end(self, site: Site) -> None:
        state = self._states[site.name]
        if state.link is None:
            return
        if state.is_checked:
            state.link.send(STOP)
        else:  # the agent waits for a word, or the connection takes none
            state.link.close_input()

    def _wait_s(self, now: float) -> float | None:
        """Seconds until something is due: a connection, or an agent's answer."""
        due = [state.began + _CHECK_S - now for state in self._unchecked()]
        if (restart_s := self._restarts.wait_s(now)) is not None:
            due.append(restart_s)
        return min(due, default=None)

    def _unchecked(self) -> list[_State]:
        return [s for s in self._states.values() if s.link is not None and not s.is_checked]

    def _give_up_late(self, now: float) -> None:
        """End connections to machines that ssh reaches and that do nothing."""
        for state in self._unchecked():
            if state.link is not None and now >= state.began + _CHECK_S:
                state.problems.append(f"no answer in {_CHECK_S:g} s")
                state.is_checked = True
                state.link.kill()

    def _connect(self, site: Site, action: Action) -> None:
        state = self._states[site.name]
        state.problems.clear()
        state.is_checked = False
        state.began = time.monotonic()
        order = _order_for(self._inventory.name, site, action)
        try:
            state.link = Link(site, order, self._reports)
        except OSError as error:
            raise LaunchError(f"ssh cannot be run here: {error.strerror}") from None

    def _drop(self, state: _State) -> None:
        if state.link is not None:
            state.link.close_input()
            state.link.kill()
            state.link = None

    def _next(self, timeout_s: float | None) -> tuple[str, Report | None] | None:
        """The next report, and what it is of; None after the timeout. A connection that has ended
        is noted."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None  # also if reports do not cease
            try:
                link, report = self._reports.get(timeout=left_s)
            except queue.Empty:
                return None
            name = link.site.name
            state = self._states[name]
            if state.link is not link:
                continue  # of a connection that was given up
            if report is None:
                state.link = None
                if not (state.is_over or state.problems):
                    state.problems.append(link.how_it_ended())
            elif report.kind == "checked":
                state.is_checked = True
            elif report.kind == "problem":
                state.problems.append(report.text)
            elif report.kind in ("stopped", "detached"):
                state.is_over = True
            return name, report

    def _ping(self) -> None:
        """Tell all agents from time to time that somebody is there, also while whoever reads what
        is told does not: a terminal that was stopped must not end a cluster."""
        while not self._is_ending.wait(PING_S):
            for state in self._states.values():
                if (link := state.link) is not None:
                    link.say(PING)

    def _heed(self, name: str, report: Report | None) -> None:
        state = self._states[name]
        if report is not None:
            if report.kind == "checked" and state.link is not None:
                state.link.send(GO)
            elif report.kind == "ready":
                self.unready.discard(report.name)
            self._tell(name, report)
        elif not state.is_over:
            pause_s = self._restarts.ended(name, state.began, time.monotonic())
            text = "\n".join(state.problems)
            self._tell(name, Report(kind="news", text=f"{text}\nagain in {pause_s:g} s"))

    def _wait_all(self, sites: Sequence[Site], timeout_s: float) -> None:
        """Wait until the connections have ended, and the agents have said that all is well. Raises
        `LaunchError` for those that did not."""
        deadline = time.monotonic() + timeout_s
        while any(self._states[site.name].link is not None for site in sites):
            heard = self._next(deadline - time.monotonic())
            if heard is None:
                break
            if heard[1] is not None:
                self._tell(heard[0], heard[1])
        texts = []
        for site in sites:
            state = self._states[site.name]
            if state.link is not None:
                state.problems.append(f"it is not done after {timeout_s:g} s")
            self._drop(state)
            if not state.is_over:
                texts += [f"{site.name}: {text}" for text in state.problems]
        if texts:
            raise LaunchError("\n".join(texts))


def _order_for(cluster: str, site: Site, action: Action) -> Order:
    """The order for the agent of one machine."""
    servers = tuple(
        ServerOrder(
            name=placed.server.name,
            kind=placed.server.kind,
            module=placed.server.module,
            config=dict(placed.config),
            stop_s=placed.server.stop_s,
            gpus=placed.gpus,
            cores=placed.cores,
            env=placed.env,
        )
        for placed in site.servers
    )
    return Order(
        version=version("parrot"),
        cluster=cluster,
        site=site.name,
        action=action,
        servers=() if action is Action.STOP else servers,
        stop_s=site.stop_s,
    )
