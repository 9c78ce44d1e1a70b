"""Agents on other machines, over the system's ssh: one connection for each, which carries all."""

import queue
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from parrot.launch.by_ssh.inventory import HostEntry, Site
from parrot.launch.by_ssh.wire import MAX_REPORT, Order, Report

AGENT = ("-m", "parrot.launch.by_ssh.agent")
_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": "10",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    # A connection that others use, or that has to serve them, would not end when this one does.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
}
_ENDS_S = 5.0  # from the end of a connection's input to that of ssh
_MAX_ERRORS = 20  # lines of ssh's that are kept


def ssh_command(host: HostEntry, remote: Sequence[str]) -> list[str]:
    """The local command that runs `remote` there. No part of the inventory can be an option, or
    anything but one word to the shell there."""
    command = ["ssh", "-T"]
    for name, value in _OPTIONS.items():
        command += ["-o", f"{name}={value}"]
    if host.user is not None:
        command += ["-l", host.user]
    if host.port is not None:
        command += ["-p", str(host.port)]
    if host.identity_file is not None:
        command += ["-i", str(Path(host.identity_file).expanduser()), "-o", "IdentitiesOnly=yes"]
    return [*command, "--", host.address, shlex.join(remote)]


class Link:
    """A connection to a machine's agent, which carries out one order. Its reports go into `reports`
    with the link itself; the last is None, when there will be no more."""

    def __init__(
        self, site: Site, order: Order, reports: "queue.Queue[tuple[Link, Report | None]]"
    ) -> None:
        """Raises `OSError` if there is no ssh here."""
        self.site = site
        self._reports = reports
        self._errors: deque[str] = deque(maxlen=_MAX_ERRORS)
        self._process = subprocess.Popen(
            ssh_command(site.host, [site.host.python, *AGENT]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the launcher, which needs the connection then
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self._sending = threading.Lock()
        args = self._process.stdout, self._process.stderr, order.model_dump_json().encode()
        threading.Thread(target=self._run, args=args, name=site.name, daemon=True).start()

    def send(self, line: bytes) -> None:
        """Send a line, if there is still a connection. Waits until its beginning is on the way."""
        with self._sending, suppress(OSError, ValueError):
            while line:
                line = line[self._input.write(line) :]

    def say(self, word: bytes) -> None:
        """Send a word to an agent, unless something else is being sent now."""
        if self._sending.acquire(blocking=False):
            with suppress(OSError, ValueError):
                self._input.write(word)
            self._sending.release()

    def close_input(self) -> None:
        """Let the agent end what it runs, and itself."""
        with suppress(OSError):
            self._input.close()

    def kill(self) -> None:
        """End the connection at once."""
        self._process.kill()
        self._process.wait()

    def how_it_ended(self) -> str:
        """The end of the connection in words; only once it is there."""
        code = self._process.wait(_ENDS_S)
        return "\n".join([f"the connection ended with exit code {code}", *self._errors])

    def _run(self, output: BinaryIO, errors: BinaryIO, order: bytes) -> None:
        """Send the order, which may have to wait for the connection, and read to the end."""
        reader = threading.Thread(target=self._read_errors, args=(errors,), daemon=True)
        reader.start()
        self.send(order + b"\n")
        with open(output.fileno(), "rb", closefd=False) as lines, output:
            while line := lines.readline(MAX_REPORT):
                try:
                    report = Report.model_validate_json(line)
                except ValidationError:  # what its shell says when somebody comes
                    report = Report(kind="log", text=line.decode(errors="replace").rstrip())
                self._reports.put((self, report))
        reader.join()
        self._process.wait()
        self.close_input()
        self._reports.put((self, None))

    def _read_errors(self, errors: BinaryIO) -> None:
        with open(errors.fileno(), "rb", closefd=False) as lines, errors:
            while line := lines.readline(MAX_REPORT):
                self._errors.append(line.decode(errors="replace").rstrip())
