"""One server as a child process: its log, its exit and its restarts."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parrot.utils.private_files import open_private
from parrot.utils.settings import without_settings

_STOP_GRACE_S = 10.0  # Default seconds from SIGTERM to SIGKILL.
_TAIL_LINES, _TAIL_BYTES = 25, 2**16  # The end of a log that error messages show.


_ERROR = re.compile(r"^(?:error: |[\w.]+(?:Error|Exception): ).+$", re.MULTILINE)


class ClusterError(Exception):
    """A server could not start, or exited. The message contains the end of its log."""


class ServerProcess:
    """A Python module that runs in its own process group and exits with this process.

    Its stdout and stderr are appended to `log_path`. If it exits and was not stopped by a method of
    this class, a separate thread calls `on_death(self)`."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        log_path: Path,
        env: Mapping[str, str],
        on_death: "Callable[[ServerProcess], None]",
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = [sys.executable, "-m", "parrot.cluster.child", module, name, *args]
        self._env = {**without_settings(os.environ), "PYTHONUNBUFFERED": "1", **env}
        self._on_death = on_death
        self._is_to_end = False
        self._log_start = 0  # Byte offset in the log at which the current run begins.
        self.started_at = 0.0
        """Start time of the current run, from `time.monotonic`."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._ended.set()
        self._watcher: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} was never started"
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code. None while the process runs. Negative: the number of the signal that
        ended the process."""
        return self._popen.returncode if self._popen is not None and not self.is_alive else None

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds. Returns whether the process has exited."""
        return self._ended.wait(timeout_s)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the process. Only the process receives the config, through a pipe."""
        assert not self.is_alive, f"{self.name} already runs"
        self._is_to_end = False
        self.started_at = time.monotonic()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open_private(self.log_path, is_new=False) as log:
            self._log_start = self.log_path.stat().st_size
            popen = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=self._env,
                start_new_session=True,
            )
        self._popen, self._ended = popen, threading.Event()
        line = json.dumps(config).encode() + b"\n"
        self._watcher = threading.Thread(
            target=self._watch, args=(popen, line), name=f"watch-{self.name}", daemon=True
        )
        self._watcher.start()

    def _watch(self, popen: subprocess.Popen[bytes], config: bytes) -> None:
        with popen:  # Waits for the exit, and closes our end of its stdin.
            assert popen.stdin is not None
            with suppress(BrokenPipeError):
                while config:
                    config = config[popen.stdin.write(config) :]
            popen.wait()
        _signal_group(popen.pid, signal.SIGKILL)  # Kill remaining children of the process.
        self._ended.set()
        if not self._is_to_end:
            self._on_death(self)

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, and wait for the exit."""
        self._signal(signal.SIGKILL)
        self._join()

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        self._signal(signal.SIGTERM)

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Send SIGTERM, after `grace_s` seconds SIGKILL, and wait for the exit."""
        self.terminate()
        if not self.wait(grace_s):
            self._signal(signal.SIGKILL)
        self._join()

    def _signal(self, signum: signal.Signals) -> None:
        self._is_to_end = True
        if self._popen is not None and self.is_alive:
            _signal_group(self._popen.pid, signum)

    def _join(self) -> None:
        if self._watcher is not None:
            self._watcher.join()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines of the log since the last start."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])

    def death_message(self) -> str:
        code = self.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        tail = self.log_tail()
        error = _own_error(tail)
        why = f"{self.name}: {error}\n" if error else ""
        return f"{why}{self.name} ended with {how}. The end of {self.log_path}:\n{tail}"


def _own_error(log: str) -> str | None:
    """The last error message in a log: of a command, or of a traceback."""
    found = _ERROR.findall(log)
    return found[-1].removeprefix("error: ") if found else None


def _signal_group(pid: int, signum: signal.Signals) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):  # Exited. macOS raises EPERM for zombies.
        return


_STABLE_S = 60.0  # Seconds of uptime after which the next restart uses the first pause again.


class Restarts:
    """Exponential backoff for restarts, by name. The pause doubles with each exit, and is reset
    after an uptime of 60 s. Times are from `time.monotonic`."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def ended(self, name: str, started_at: float, now: float) -> float:
        """Schedule a restart after an exit. Returns the pause in seconds."""
        is_stable = now - started_at > _STABLE_S
        pause_s = self._first_s if is_stable else self._next_s.get(name, self._first_s)
        self._next_s[name] = min(2 * pause_s, self._longest_s)
        self._due[name] = now + pause_s
        return pause_s

    def take_due(self, now: float) -> list[str]:
        """Remove and return the names whose pause is over."""
        names = [name for name, when in self._due.items() if when <= now]
        for name in names:
            del self._due[name]
        return names

    def wait_s(self, now: float) -> float | None:
        """Seconds until the next restart. None: no restart is scheduled."""
        return min((max(0.0, when - now) for when in self._due.values()), default=None)
