"""The servers of a cluster on this machine: started, watched, started again, and ended."""

import fcntl
import os
import queue
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from parrot.cluster import ServerProcess
from parrot.cluster.ports import ask
from parrot.cluster.restarts import Restarts
from parrot.launch.by_ssh.wire import Order, Report, ServerOrder
from parrot.launch.plan import EVERYWHERE
from parrot.protocol.server_config import state_folder
from parrot.utils.private_files import open_private

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LOCK_TRIES = 20
_MAX_TEXT = 2**13  # characters of a line that is passed on


class AlreadyRuns(Exception):
    """The cluster's servers run on this machine already."""


def folder_of(cluster: str, site: str) -> Path:
    """Where the lock and the logs of a cluster's agent are on its machine."""
    return state_folder() / "launch" / f"{cluster}@{site}"


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """This process supervises the folder's servers. Raises `AlreadyRuns`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock_file(folder) as lock:
        for _ in range(_LOCK_TRIES):  # `holder` has it for a moment
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_FIRST_PAUSE_S)
        else:
            raise AlreadyRuns(f"process {holder(folder)} has the cluster's servers")
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        yield
        lock.truncate(0)


def holder(folder: Path) -> int | None:
    """The process that holds the folder, if one does."""
    if not (folder / "lock").exists():
        return None
    with _lock_file(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int((folder / "lock").read_bytes() or 0) or None
    return None


def end_holder(folder: Path, timeout_s: float) -> bool:
    """Ask the process that holds the folder to end, and wait for it; False if that took longer.
    SIGINT says that a person wishes it: SIGTERM may come of a machine that is started again."""
    pid = holder(folder)
    if pid is None:
        return True
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if holder(folder) != pid:
            return True
        signal.pidfd_send_signal(process, signal.SIGINT)
        return bool(select.select([process], [], [], timeout_s)[0])
    finally:
        os.close(process)


def _lock_file(folder: Path) -> BinaryIO:
    return open_private(folder / "lock", is_new=False)


def answers(server: ServerOrder) -> bool:
    """Whether the server, on this machine, is ready."""
    host, port, token = (server.config.get(key) for key in ("host", "port", "cluster_token"))
    assert isinstance(host, str), host
    assert isinstance(port, int), port
    path = "/health" if server.kind == "core" else "/ready"
    host = "127.0.0.1" if host == EVERYWHERE else host
    answer = ask(host, port, path, token=None if token is None else str(token))
    return answer is not None and answer[0] == HTTPStatus.OK


class Supervisor:
    """Runs the servers of an order, whose logs go to `folder`. `tell` gets its
    reports, from several threads, and must not wait."""

    def __init__(self, order: Order, folder: Path, tell: Callable[[Report], None]) -> None:
        self._folder, self._tell = folder, tell
        self._orders = {server.name: server for server in order.servers}
        self._events: queue.SimpleQueue[ServerProcess | None] = queue.SimpleQueue()
        self._processes = {server.name: self._process(server) for server in order.servers}
        self._unready: set[str] = set()

    def end(self) -> None:
        """Let `run` return; from any thread, or a signal's handler."""
        self._events.put(None)

    def hurry(self) -> None:
        """Wait for no calls when all are ended: a second signal ends those of an engine. From any
        thread."""
        for name, order in self._orders.items():
            if order.kind == "engine":
                self._processes[name].terminate()

    def run(self) -> None:
        """Start all; when `end` is called end all, engines first, and return."""
        restarts = Restarts()
        try:
            for name in self._processes:
                self._start(name)
            pause_s = _FIRST_PAUSE_S
            while True:
                wait_s = restarts.wait_s(time.monotonic())
                if self._unready:
                    pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
                    wait_s = pause_s if wait_s is None else min(wait_s, pause_s)
                try:
                    dead = self._events.get(timeout=wait_s)
                except queue.Empty:
                    self._notice_ready()
                else:
                    if dead is None:
                        return
                    self._note_death(dead, restarts)
                for name in restarts.take_due(time.monotonic()):
                    self._start(name)
                    pause_s = _FIRST_PAUSE_S
        finally:
            self._stop()

    def _process(self, order: ServerOrder) -> ServerProcess:
        return ServerProcess(
            order.name,
            order.module,
            [],
            self._folder / f"{order.name}.log",
            order.env,
            self._events.put,
            partial(self._pass_on, order.name),
        )

    def _start(self, name: str) -> None:
        self._processes[name].start(self._orders[name].config)
        self._unready.add(name)

    def _pass_on(self, name: str, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\n")[:_MAX_TEXT]
        self._tell(Report(kind="log", name=name, text=text))

    def _note_death(self, dead: ServerProcess, restarts: Restarts) -> None:
        self._unready.discard(dead.name)
        pause_s = restarts.ended(dead.name, dead.started_at, time.monotonic())
        code = dead.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        text = f"{dead.name} ended with {how}; it starts again in {pause_s:g} s"
        self._tell(Report(kind="news", name=dead.name, text=text))

    def _notice_ready(self) -> None:
        for name in sorted(self._unready):
            if answers(self._orders[name]):
                self._unready.discard(name)
                self._tell(Report(kind="ready", name=name))

    def _stop(self) -> None:
        """Ask engines to end, insist once their time is over, then do so with ServeCore. Each is
        asked once: a second signal would end its calls."""
        for is_core in (False, True):
            own = [name for name, o in self._orders.items() if (o.kind == "core") == is_core]
            for name in own:
                self._processes[name].terminate()
            began = time.monotonic()
            for name in own:
                left_s = began + self._orders[name].stop_s - time.monotonic()
                if not self._processes[name].wait(max(0.0, left_s)):
                    self._processes[name].kill()
