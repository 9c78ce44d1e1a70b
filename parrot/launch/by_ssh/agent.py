"""The launcher's agent on a machine of an inventory: `python -m parrot.launch.by_ssh.agent`.

Its stdin is its launcher: the order, a line that says go, then a line now and then. When that says
stop, ends, or falls silent, the servers end, unless they were to be detached: then a process of
their own, which `systemd-run --user` starts if there is one, has them (`--supervise FOLDER`)."""

import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from parrot.launch.by_ssh.checks import problems
from parrot.launch.by_ssh.supervisor import (
    AlreadyRuns,
    Supervisor,
    answers,
    end_holder,
    folder_of,
    holder,
    holding,
)
from parrot.launch.by_ssh.wire import (
    GO,
    HURRY,
    MAX_ORDER,
    PING,
    SILENCE_S,
    STOP,
    Action,
    Order,
    Report,
)
from parrot.utils.private_files import open_private

_MAX_REPORTS = 10_000  # that wait for the launcher to read
_STARTED_S = 20.0  # for a detached supervisor to begin
_READY_PAUSE_S = 0.5
_MODULE = [sys.executable, "-m", "parrot.launch.by_ssh.agent"]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if argv[:1] == ["--supervise"]:
        return supervise(Path(argv[1]))
    try:
        while (line := sys.stdin.buffer.readline(MAX_ORDER)) == PING:
            pass
        order = Order.model_validate_json(line)
    except ValidationError as error:
        sys.stderr.write(f"no order of this version of Parrot: {error.error_count()} errors\n")
        return 2
    reports = _Reports()
    try:
        code = _obey(order, reports.tell)
    except (OSError, AlreadyRuns, subprocess.CalledProcessError) as error:
        reports.tell(Report(kind="problem", text=str(error)))
        code = 1
    reports.close()
    return code


def _obey(order: Order, tell: Callable[[Report], None]) -> int:
    folder = folder_of(order.cluster, order.site)
    if order.action is Action.STOP:
        return _stop(folder, order.stop_s, tell)
    if (pid := holder(folder)) is not None:
        text = f"it runs already, as process {pid}: `parrot launch --stop` ends it"
        tell(Report(kind="problem", text=text))
        return 1
    found = list(problems(order))
    for text in found:
        tell(Report(kind="problem", text=text))
    if found:
        return 1
    tell(Report(kind="checked", text=str(folder)))
    lines = _lines()
    if next(line for line in lines if line != PING) != GO:
        return 0
    if order.action is Action.DETACH:
        return _detach(order, folder, tell)
    with holding(folder):
        supervisor = Supervisor(order, folder, tell)
        launcher = threading.Thread(target=_follow, args=(lines, supervisor), daemon=True)
        with _ending_by_signals(supervisor.end) as signals:
            launcher.start()
            supervisor.run()
    if signals and signals[0] != signal.SIGINT:
        tell(Report(kind="problem", text=f"the servers were ended by signal {signals[0]}"))
        return 1
    tell(Report(kind="stopped"))
    return 0


def _lines() -> Iterator[bytes]:
    """The launcher's lines; an empty one, the last, when there is no launcher any more."""
    stdin = sys.stdin.fileno()
    rest = b""
    while select.select([stdin], [], [], SILENCE_S)[0] and (data := os.read(stdin, 4096)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line + b"\n"
    yield b""


def _follow(lines: Iterator[bytes], supervisor: Supervisor) -> None:
    for line in lines:
        if line == HURRY:
            supervisor.hurry()
        elif line in (STOP, b""):
            supervisor.end()


@contextmanager
def _ending_by_signals(end: Callable[[], None]) -> Iterator[list[int]]:
    """Enter with the signals that will have come."""
    signals: list[int] = []

    def heard(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        end()

    before = {signum: signal.signal(signum, heard) for signum in _SIGNALS}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _stop(folder: Path, stop_s: float, tell: Callable[[Report], None]) -> int:
    if not end_holder(folder, stop_s):
        text = f"process {holder(folder)} has not ended in {stop_s:g} s"
        tell(Report(kind="problem", text=text))
        return 1
    tell(Report(kind="stopped"))
    return 0


def _detach(order: Order, folder: Path, tell: Callable[[Report], None]) -> int:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_private(folder / "order.json", is_new=True) as file:
        file.write(order.model_dump_json().encode())
    with open_private(folder / "agent.log", is_new=False) as log:
        if _has_user_manager():
            tell(Report(kind="news", text="systemd's user manager has the servers"))
            command = _systemd_command(order, folder)
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        else:
            subprocess.Popen(
                [*_MODULE, "--supervise", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
    deadline = time.monotonic() + _STARTED_S
    while holder(folder) is None:
        if time.monotonic() > deadline:
            text = f"the servers' supervisor has not begun: see {log.name}"
            tell(Report(kind="problem", text=text))
            return 1
        time.sleep(0.05)
    return _wait_ready(order, folder, tell)


def _wait_ready(order: Order, folder: Path, tell: Callable[[Report], None]) -> int:
    """Wait for the detached servers, as long as they run and the launcher is there."""
    unready, stdin = list(order.servers), sys.stdin.fileno()
    while True:
        for server in [server for server in unready if answers(server)]:
            unready.remove(server)
            tell(Report(kind="ready", name=server.name))
        if not unready:
            tell(Report(kind="detached"))
            return 0
        if holder(folder) is None:
            tell(Report(kind="problem", text=f"the servers have ended: see {folder}/agent.log"))
            return 1
        if select.select([stdin], [], [], _READY_PAUSE_S)[0] and not os.read(stdin, 4096):
            return 0


def _has_user_manager() -> bool:
    """Whether systemd runs this user's units also when nobody is logged in."""
    if not (shutil.which("systemd-run") and shutil.which("loginctl")):
        return False
    command = ["loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value"]
    return subprocess.run(command, capture_output=True, check=False).stdout.strip() == b"yes"


def _systemd_command(order: Order, folder: Path) -> list[str]:
    properties = [
        "Restart=on-failure",
        "KillMode=mixed",
        f"TimeoutStopSec={order.stop_s + 10:g}",
        f"WorkingDirectory={folder}",
        f"StandardOutput=append:{folder}/agent.log",
        f"StandardError=append:{folder}/agent.log",
    ]
    options = [f"--property={text}" for text in properties]
    names = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HF_HOME", "HF_TOKEN")
    passed = [f"--setenv={name}" for name in names if name in os.environ]
    site = "".join(c if c.isalnum() else "-" for c in order.site)
    command = ["systemd-run", "--user", "--collect", f"--unit=parrot-{order.cluster}-{site}"]
    return [*command, *options, *passed, "--", *_MODULE, "--supervise", str(folder)]


def supervise(folder: Path) -> int:
    """Run the order that is in the folder, until a signal comes."""
    path = folder / "order.json"
    order = Order.model_validate_json(path.read_bytes())
    if "INVOCATION_ID" not in os.environ:
        path.unlink()  # only systemd would start this process again

    def tell(report: Report) -> None:
        if report.kind != "log":  # which has a file of its own
            sys.stdout.write(f"{report.kind} {report.name} {report.text}\n")
            sys.stdout.flush()

    try:
        with holding(folder):
            supervisor = Supervisor(order, folder, tell)
            with _ending_by_signals(supervisor.end):
                supervisor.run()
            path.unlink(missing_ok=True)
    except AlreadyRuns as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


class _Reports:
    """Writes reports to stdout, in a thread, so that nobody waits for a launcher that does not
    read; lines of logs that find no room are left out, and counted."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Report | None] = queue.Queue()
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._write, name="reports", daemon=True)
        self._thread.start()

    def tell(self, report: Report) -> None:
        if report.kind == "log" and self._queue.qsize() > _MAX_REPORTS:
            self._num_left_out += 1
            return
        if self._num_left_out:
            text = f"{self._num_left_out} lines are in the logs only"
            self._num_left_out = 0
            self._queue.put(Report(kind="news", text=text))
        self._queue.put(report)

    def close(self, timeout_s: float = 5.0) -> None:
        """Return when all is written, or nobody reads any more."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                sys.stdout.buffer.write(report.model_dump_json().encode() + b"\n")
                sys.stdout.buffer.flush()
            except OSError:  # the launcher is gone; the servers are ended by their stdin's end
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
