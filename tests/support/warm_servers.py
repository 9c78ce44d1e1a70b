"""Servers of a `Cluster` that are forked from one process with all imports. The imports of a server
take a second of CPU time, and the tests start hundreds of servers.

As a program, this module is that process. It reads requests from its stdin, which is a socket, and
from clients of a listening socket. It forks twice for each request: the first child waits for the
second, which is the server, and reports its end."""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

SERVERS = ("parrot.server.http_server", "parrot.engine.http_server")
_IMPORTED = (*SERVERS, "parrot.engine.sim")
_MAX_REQUEST = 2**17


class WarmServers:
    """Forks servers. The process that forks them starts with the first server. `address`: use the
    process of another `WarmServers`."""

    def __init__(self, address: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="warm-") if address is None else None
        if address is not None:
            self._requests = _socket()
            self._requests.connect(address)

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def address(self) -> str:
        """The address at which other processes can request servers until `close`."""
        assert self._folder is not None
        self._ask_at()
        return self._listens_at(self._folder.name)

    @staticmethod
    def _listens_at(folder: str) -> str:
        return str(Path(folder) / "requests")

    def instead_of_subprocess(self) -> SimpleNamespace:
        """A replacement of the module `subprocess` in `parrot.cluster.process`."""
        return SimpleNamespace(Popen=self.popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        """Fork a server of Parrot. Other programs are started normally."""
        env = options["env"]
        is_server = command[3] in SERVERS and env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
        if not is_server:
            return subprocess.Popen(command, **options)
        return ForkedServer(self._ask_at(), command[3:], env, options["stdout"])

    def _ask_at(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            assert self._folder is not None
            with theirs, _socket() as listener:
                listener.bind(self._listens_at(self._folder.name))
                listener.listen()
                number = listener.fileno()
                command = [sys.executable, "-u", "-m", "tests.support.warm_servers", str(number)]
                self._process = subprocess.Popen(
                    command, stdin=theirs, start_new_session=True, pass_fds=[number]
                )
        return self._requests


class ForkedServer:
    """A replacement of `subprocess.Popen` for a forked server."""

    def __init__(
        self, requests: socket.socket, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self.returncode: int | None = None
        lifeline, write = os.pipe()
        self.stdin = open(write, "wb", buffering=0)  # noqa: SIM115 - the caller closes it
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
            socket.send_fds(requests, [message], [theirs.fileno(), lifeline, log.fileno()])
        os.close(lifeline)
        self._told = ours.makefile("r")
        ours.close()
        self.pid = int(self._told.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wait()
        self._told.close()
        self.stdin.close()

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._told.readline())
        return self.returncode


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def be_next_server(listener: socket.socket) -> None:
    """Fork a server for each request, and return in the server. Exits when its owner has ended."""
    owner = socket.socket(fileno=os.dup(0))
    open_sockets = [owner, listener]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Ended first children need no wait.
    while True:
        asking = select.select(open_sockets, [], [])[0][0]
        if asking is listener:
            open_sockets.append(listener.accept()[0])
            continue
        message, fds, _, _ = socket.recv_fds(asking, _MAX_REQUEST, 3)
        if not message:
            if asking is owner:
                os._exit(0)
            open_sockets.remove(asking)
            asking.close()
            continue
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    for one in open_sockets:
        one.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    teller, lifeline, log = fds
    if (server := os.fork()) != 0:
        for fd in (0, lifeline, log):
            os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
        os.write(teller, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.write(teller, f"{os.getpid()}\n".encode())
    for fd, place in ((lifeline, 0), (log, 1), (log, 2)):
        os.dup2(fd, place)
    for fd in fds:
        os.close(fd)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [sys.argv[0], *request["argv"]]


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in SERVERS:
        del sys.modules[name]  # It runs again as the main module.
    gc.collect()
    gc.freeze()
    be_next_server(socket.socket(fileno=int(sys.argv[1])))
    from parrot.cluster import child

    child.main()
