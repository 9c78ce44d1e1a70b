"""A server's process on the node where Ray put its actor."""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parrot.cluster.ports import ask, free_port, is_free
from parrot.cluster.process import Restarts, ServerProcess
from parrot.launch.configs import CORE_PORT, EVERYWHERE, Server

Address = tuple[str, int]

_FIRST_PORT = 20_000  # Ray has those from 10002 on for its workers
_FORWARDED_BYTES = 2**16  # of a log, at once


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server as its actor sees it. `ready` is ServeCore's answer to `/ready`, if it gives one,
    with the HTTP status; `is_over`: somebody has ended it."""

    address: Address | None
    num_deaths: int
    last_death: str
    ready: tuple[int, Any] | None = None
    is_over: bool = False


class ServerActor:
    """Runs one server as a child process, again whenever it has ended, and forwards its log to
    Ray's.

    It does nothing by itself: whoever supervises it calls `follow` every few seconds. So it begins
    anew on another node, where Ray starts it again, as it did on the first."""

    def __init__(
        self, server: Server, own_address: str | None = None, *, hides_gpus: bool = False
    ) -> None:
        """`own_address`: of this node, if not as Ray says. `hides_gpus`: Ray leaves those visible
        that an actor has no claim to."""
        self._server = server
        self._own_address = own_address or _node_address()
        self._folder = Path(tempfile.mkdtemp(prefix="parrot-"))  # for this user alone
        env = {"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {}
        self._process = ServerProcess(
            server.name,
            server.module,
            [],
            self._folder / f"{server.name}.log",
            env,
            lambda process: None,
        )
        self._has_started = self._is_over = False
        self._port: int | None = None
        self._core: Address | None = None
        self._log_end = 0
        self._num_deaths = 0
        self._last_death = ""
        self._restarts = Restarts()

    def __repr__(self) -> str:
        """Ray writes it before each forwarded line."""
        return self._server.name

    def follow(self, core: Address | None) -> ServerStatus:
        """See that the server runs, an engine as one of the ServeCore at this address, and tell
        how it is. An engine whose ServeCore is elsewhere now is started again: what it computed was
        for the one that is gone. None: nobody knows yet; an engine that runs goes on."""
        if self._has_started and not self._process.is_alive:
            self._note_death()
        is_engine = self._server.kind == "engine"
        if self._has_started and is_engine and core not in (None, self._core):
            self._process.kill()
            self._has_started = False
        may_start = not self._is_over and (core is not None or not is_engine)
        if may_start and not self._has_started and not self._restarts.wait_s(time.monotonic()):
            self._start(core)
        self._forward_log()
        return self._status()

    def stop_s(self) -> float:
        """Seconds that ending takes at most."""
        return self._server.stop_s

    def stop(self) -> None:
        """Let the server end its calls, as its config says, and end it; return when it is gone."""
        if self._has_started:
            self._process.stop(self._server.stop_s)
        self._has_started, self._is_over = False, True
        self._forward_log()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, core: Address | None) -> None:
        self._core = core
        self._port = self._free_port()
        self._process.start(self._server.placed(self._port, core))
        self._has_started = True

    def _free_port(self) -> int:
        """The config's, where it must be found: ServeCore's. Engines tell theirs."""
        wanted = self._server.config.get("port")
        if self._server.kind == "core":
            return wanted or CORE_PORT
        host = self._server.config.get("host", EVERYWHERE)
        if wanted is not None and is_free(host, wanted):
            return int(wanted)
        return free_port(host, set(), _FIRST_PORT)

    def _note_death(self) -> None:
        self._has_started = False
        self._num_deaths += 1
        self._last_death = self._process.death_message()
        self._restarts.ended(self._server.name, self._process.started_at, time.monotonic())

    def _forward_log(self) -> None:
        path = self._process.log_path
        if not path.exists():
            return
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            if end - self._log_end > _FORWARDED_BYTES:
                sys.stdout.write(f"… {end - _FORWARDED_BYTES - self._log_end} bytes are left out\n")
                self._log_end = end - _FORWARDED_BYTES
            log.seek(self._log_end)
            lines, newline, rest = log.read(end - self._log_end).rpartition(b"\n")
            self._log_end = end - len(rest)
        sys.stdout.write((lines + newline).decode(errors="replace"))
        sys.stdout.flush()

    def _status(self) -> ServerStatus:
        address = None
        if self._has_started and self._port is not None:
            address = self._own_address, self._port
        ready = None
        if address is not None and self._server.kind == "core":
            host = self._server.config["host"]
            host = "127.0.0.1" if host == EVERYWHERE else host
            ready = ask(host, address[1], "/ready", token=self._server.token)
        return ServerStatus(address, self._num_deaths, self._last_death, ready, self._is_over)


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
