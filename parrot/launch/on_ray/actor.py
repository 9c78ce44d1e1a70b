"""The process of one server, on the node where Ray placed its actor."""

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

_FIRST_PORT = 20_000  # First port to try. Ray's workers use ports from 10002.
_FORWARDED_BYTES = 2**16  # Bytes of log that one `follow` forwards at most. It skips older ones.


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The state of a server, as its actor reports it."""

    address: Address | None
    num_deaths: int
    last_death: str
    ready: tuple[int, Any] | None = None  # HTTP status and body of ServeCore's `/ready`.
    is_over: bool = False  # `stop` was called.


class ServerActor:
    """Runs one server as a child process, restarts it when it exits, and forwards its log to Ray.

    All work happens in `follow`, which the supervisor calls at each tick. If Ray restarts the actor
    on another node, the next `follow` starts the server there."""

    def __init__(
        self, server: Server, own_address: str | None = None, *, hides_gpus: bool = False
    ) -> None:
        """`own_address`: this node's address (default: Ray's). `hides_gpus`: hide all GPUs from
        the server, because Ray shows all GPUs to an actor that reserves none."""
        self._server = server
        self._own_address = own_address or _node_address()
        self._folder = Path(tempfile.mkdtemp(prefix="parrot-"))  # Only this user can read it.
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
        """Ray prints this name before each forwarded log line."""
        return self._server.name

    def follow(self, core: Address | None) -> ServerStatus:
        """Start the server unless it runs, and return its status.

        `core` is ServeCore's address. If it changed, a running engine restarts, because its state
        belongs to the previous ServeCore. None: the address is unknown; a running engine keeps
        running, and a stopped engine does not start."""
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
        """Upper bound for the duration of `stop`, in seconds."""
        return self._server.stop_s

    def stop(self) -> None:
        """Drain the server for at most its `drain_timeout`, then stop it. Returns when its process
        has exited."""
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
        """ServeCore uses its configured port, where clients expect it. An engine reports its port
        when it registers, so it takes another port if the configured one is in use."""
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
