"""A ServeCore and its engines on this machine, as child processes."""

import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Self

from parrot.cluster.ports import ask, free_port, is_free
from parrot.cluster.process import ClusterError, Restarts, ServerProcess
from parrot.protocol.public import ReadyResponse
from parrot.protocol.server_config import kept_token, settled_token
from parrot.utils.addresses import is_loopback
from parrot.utils.config import ConfigError
from parrot.utils.ids import new_token
from parrot.utils.private_files import open_private
from parrot.utils.server_socket import in_use

Config = Mapping[str, Any]
CORE = "core"
_HOST = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25  # Seconds between two polls of `/ready`.
_NOTICED_S = 0.1  # Seconds that `dead` waits for each process.


class Cluster:
    """Server processes from config dicts. A config without a port gets a free port.

        with Cluster(engines=[{"engine_type": "sim"}] * 2) as cluster:
            vm = P.VirtualMachine(cluster.core_url)

    Entering starts all processes and waits until all engines have registered. Leaving stops them.
    `with_core` False: no ServeCore; entering waits until the engines are ready. Each process logs
    to `log_dir/NAME.log`. NAME is the `engine_name`, by default engine-0, engine-1, ...
    """

    CORE_MODULE: ClassVar = "parrot.server.http_server"
    ENGINE_MODULE: ClassVar = "parrot.engine.http_server"
    RESTART_PAUSES_S: ClassVar = (1.0, 60.0)

    def __init__(
        self,
        core: Config | None = None,
        engines: Sequence[Config] = ({},),
        *,
        with_core: bool = True,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 120.0,
    ) -> None:
        self._keeps_logs = log_dir is not None
        self.log_dir = (log_dir or Path(tempfile.gettempdir()) / f"parrot-{new_token()}").absolute()
        self.configs: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, ServerProcess] = {}
        self._env = dict(env or {})
        self._ready_timeout_s = ready_timeout_s
        self._ports: set[int] = set()
        self._deaths: queue.SimpleQueue[ServerProcess] = queue.SimpleQueue()
        self._former_ids: dict[str, int] = {}  # Engine ids from before the last restart.
        if with_core:
            self._add(CORE, self.CORE_MODULE, _with_token(core or {}), [])
        for config in engines:
            self._add_engine(config)

    # State.

    @property
    def core_url(self) -> str:
        return self.url(CORE)

    @property
    def cluster_token(self) -> str | None:
        """The token for requests to `/register_engine` and to engines."""
        token: str | None = self.configs.get(CORE, {}).get("cluster_token")
        return token

    @property
    def engine_names(self) -> list[str]:
        return [name for name in self._processes if name != CORE]

    def url(self, name: str) -> str:
        config = self.configs[name]
        return f"http://{_reachable(config['host'])}:{config['port']}"

    def process(self, name: str) -> ServerProcess:
        return self._processes[name]

    def log(self, name: str) -> str:
        return self._processes[name].log()

    # Start and stop.

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes. Engines wait until ServeCore answers."""
        for name, config in self.configs.items():
            host, port = config["host"], config["port"]
            with binding(name, host):
                if not is_free(host, port):
                    raise ClusterError(f"{name} cannot listen: {in_use(host, port)}")
        for name in self._processes:
            self._start(name)

    def wait_ready(
        self, names: Iterable[str] | None = None, timeout_s: float | None = None
    ) -> None:
        """Return when ServeCore lists these engines (default: all) as live. Without a ServeCore,
        return when they are ready. Raises `ClusterError` with the end of a log when a process
        exits, or after the timeout."""
        missing = set(self.engine_names if names is None else names)
        deadline = time.monotonic() + (timeout_s or self._ready_timeout_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            missing -= self._live_engines(missing)
            if not missing and (CORE not in self.configs or self._ask(CORE, "/health") is not None):
                return
            if time.monotonic() > deadline:
                raise ClusterError(self._late_message(missing))
            if (dead := self.wait_death(pause_s)) is not None:
                raise ClusterError(dead.death_message())
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def wait_death(self, timeout_s: float | None = None) -> ServerProcess | None:
        """Wait for the next process that exits unexpectedly. None after the timeout."""
        try:
            while (dead := self._deaths.get(timeout=timeout_s)).is_alive:
                pass  # The process was restarted in the meantime.
        except queue.Empty:
            return None
        return dead

    def supervise(self, tell: Callable[[str], None]) -> ServerProcess:
        """Restart engines that exit unexpectedly. The pause before a restart doubles each time,
        until the engine has run for 60 s. `tell` receives a message for each exit, and for each
        engine that serves again. Returns ServeCore's process when it exits."""
        restarts = Restarts(*self.RESTART_PAUSES_S)
        starting: set[str] = set()
        while True:
            wait_s = restarts.wait_s(time.monotonic())
            if starting:
                wait_s = _LONGEST_PAUSE_S if wait_s is None else min(wait_s, _LONGEST_PAUSE_S)
            dead = self.wait_death(wait_s)
            now = time.monotonic()
            if starting:
                for name in sorted(live := starting & self._live_engines(starting)):
                    tell(f"{name} serves again.")
                starting -= live
            if dead is not None:
                name = dead.name
                if name == CORE:
                    return dead
                starting.discard(name)
                pause_s = restarts.ended(name, dead.started_at, now)
                tell(f"{dead.death_message()}\n{name} starts again in {pause_s:g} s.")
            for name in restarts.take_due(now):
                self.restart(name)
                starting.add(name)

    def dead(self) -> ServerProcess | None:
        """A process that does not run, or None. Waits up to 0.1 s for each process, because an exit
        is detected shortly after the process's connections break."""
        return next((p for p in self._processes.values() if p.wait(_NOTICED_S)), None)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, like the out-of-memory killer."""
        self._processes[name].kill()

    def restart(self, name: str) -> None:
        """Stop a process if it runs, and start it with the same config, port and log."""
        self._processes[name].stop()
        if name == CORE:
            self._former_ids.clear()
        elif (engine_id := self._registered_ids().get(name)) is not None:
            self._former_ids[name] = engine_id
        self._start(name)

    def add_engine(self, config: Config) -> str:
        """Start another engine and return its name. `wait_ready([name])` waits for the engine."""
        name = self._add_engine(config)
        self._start(name)
        return name

    def stop(self) -> None:
        """Stop all processes, engines first. Engines with a `drain_timeout` finish their calls
        while ServeCore still serves. Safe in any state."""
        began = time.monotonic()
        for name in self.engine_names:
            self._processes[name].terminate()
        for name in self.engine_names:
            if drain_s := self.configs[name].get("drain_timeout"):
                self._processes[name].wait(began + drain_s - time.monotonic())
        with ExitStack() as stack:
            if not self._keeps_logs:
                stack.callback(shutil.rmtree, self.log_dir, ignore_errors=True)
            for process in self._processes.values():
                stack.callback(process.stop)

    # Internal methods.

    def _add_engine(self, config: Config) -> str:
        name = str(config.get("engine_name") or f"engine-{len(self.engine_names)}")
        if name in self._processes:
            raise ClusterError(f"two engines are named {name!r}")
        config = {**config, "engine_name": name}
        args = []
        if CORE in self.configs:
            core = self.configs[CORE]
            config["serve_core"] = {"host": _reachable(core["host"]), "port": core["port"]}
            for key in ("cluster_token", "insecure"):
                if config.get(key) is None and core.get(key) is not None:
                    config[key] = core[key]
        else:
            args.append("--without_core")
        self._add(name, self.ENGINE_MODULE, config, args)
        return name

    def _add(self, name: str, module: str, config: Config, args: list[str]) -> None:
        """Add host and port to the config and prepare the process."""
        full = {"host": _HOST, **config}
        if "port" not in full:
            with binding(name, full["host"]):
                full["port"] = free_port(full["host"], self._ports)
        self._ports.add(full["port"])
        self.configs[name] = full
        self._processes[name] = ServerProcess(
            name,
            module,
            args,
            self.log_dir / f"{name}.log",
            self._env,
            self._deaths.put,
        )

    def _start(self, name: str) -> None:
        process = self._processes[name]
        path = process.log_path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            open_private(path, is_new=False).close()
        except OSError as error:
            raise ClusterError(
                f"{path}: {error.strerror}; choose another folder for logs (--log-dir)"
            ) from None
        process.start(self.configs[name])

    def _live_engines(self, names: Iterable[str]) -> set[str]:
        if CORE not in self.configs:
            return {name for name in names if self._ask(name, "/ready") is not None}
        return {
            name
            for name, engine_id in self._registered_ids().items()
            if self._former_ids.get(name) != engine_id
        }

    def _registered_ids(self) -> dict[str, int]:
        """The ids, by name, of the engines that ServeCore considers live."""
        answer = self._ask(CORE, "/ready") if CORE in self.configs else None
        engines = None if answer is None else ReadyResponse.model_validate(answer).engines
        return {engine.engine_name: engine.engine_id for engine in engines or []}

    def _ask(self, name: str, path: str) -> Any:
        """The decoded answer of a server. None without an answer, or for a status other than
        200."""
        config = self.configs[name]
        host, token = _reachable(config["host"]), self.cluster_token
        answer = ask(host, config["port"], path, token=token)
        return answer[1] if answer is not None and answer[0] == HTTPStatus.OK else None

    def _late_message(self, missing: set[str]) -> str:
        slow = sorted(missing) or [CORE]
        tails = "\n".join(f"--- {name}\n{self._processes[name].log_tail()}" for name in slow)
        return f"not ready in time: {', '.join(slow)}\n{tails}"


@contextmanager
def binding(name: str, host: str) -> Iterator[None]:
    """Raises `ClusterError` if `host` is not an address of this machine."""
    try:
        yield
    except OSError as error:
        raise ClusterError(
            f"{name} cannot listen on {host}: {error.strerror or error}; `host` must be a name or "
            "an address of this machine"
        ) from None


def _with_token(core: Config) -> Config:
    """The config with ServeCore's cluster token. On loopback, also with `api_keys`, the default is
    the token in this user's file. Raises `ClusterError` if ServeCore would refuse to start."""
    host, token = core.get("host", _HOST), core.get("cluster_token")
    is_insecure = bool(core.get("insecure"))
    try:
        if token is None and not is_insecure and is_loopback(host):
            token = kept_token(core.get("state_dir"))
        has_api_keys = bool(core.get("api_keys") or core.get("keys_file"))
        token = settled_token(host, token, insecure=is_insecure, has_api_keys=has_api_keys)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return core if token is None else {**core, "cluster_token": token}


def _reachable(host: str) -> str:
    """The host to connect to for a server that binds `host`."""
    return "localhost" if host in ("0.0.0.0", "::", "") else host
