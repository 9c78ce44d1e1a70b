"""One server as a child process: its log, its death, its end, and when it starts again."""

import json
import os
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

_STOP_GRACE_S = 10.0
_TAIL_LINES, _TAIL_BYTES = 25, 2**16


class ClusterError(Exception):
    """A server could not start or died; the message holds the end of its log."""


class ServerProcess:
    """A Python module running in a process group of its own, tied to this process's life.

    What it writes to stdout and stderr goes to `log_path`, appended over restarts.
    `on_death(self)` is called, from a thread of its own, when it has ended though nobody here
    asked it to."""

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
        self._log_start = 0  # where this run's part of the log begins
        self.started_at = 0.0
        """On the clock `time.monotonic`."""
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
        """None while it runs; negative: ended by that signal."""
        return self._popen.returncode if self._popen is not None and not self.is_alive else None

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s`; True if the process has ended."""
        return self._ended.wait(timeout_s)

    def start(self, config: Mapping[str, Any]) -> None:
        """Run it with this config, which only the process gets to see."""
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
        with popen:  # waits, and closes our end of its stdin
            assert popen.stdin is not None
            with suppress(BrokenPipeError):
                while config:
                    config = config[popen.stdin.write(config) :]
            popen.wait()
        _signal_group(popen.pid, signal.SIGKILL)  # whatever it started and left behind
        self._ended.set()
        if not self._is_to_end:
            self._on_death(self)

    def kill(self) -> None:
        """`kill -9`, of it and of what it started; returns when it is gone."""
        self._signal(signal.SIGKILL)
        self._join()

    def terminate(self) -> None:
        """Ask it to end; returns at once."""
        self._signal(signal.SIGTERM)

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Ask it to end, insist after `grace_s`; returns when it is gone."""
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
        """The last lines since it was started last."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])

    def death_message(self) -> str:
        code = self.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{self.name} ended with {how}. The end of {self.log_path}:\n{self.log_tail()}"


def _signal_group(pid: int, signum: signal.Signals) -> None:
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):  # gone; macOS says EPERM of a zombie's group
        return


_STABLE_S = 60.0  # what ran for so long starts again after the first pause


class Restarts:
    """Pauses by name: each twice as long as the one before, until what ended had run for a minute.
    Times are on the clock `time.monotonic`."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def ended(self, name: str, started_at: float, now: float) -> float:
        """Note that it has ended; returns the pause."""
        is_stable = now - started_at > _STABLE_S
        pause_s = self._first_s if is_stable else self._next_s.get(name, self._first_s)
        self._next_s[name] = min(2 * pause_s, self._longest_s)
        self._due[name] = now + pause_s
        return pause_s

    def take_due(self, now: float) -> list[str]:
        """The names whose pause is over, each once."""
        names = [name for name, when in self._due.items() if when <= now]
        for name in names:
            del self._due[name]
        return names

    def wait_s(self, now: float) -> float | None:
        """Seconds until one is due; None: none will be."""
        return min((max(0.0, when - now) for when in self._due.values()), default=None)
