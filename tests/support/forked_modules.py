"""Programs of ranks in processes that are forked from one process with torch.

The import of torch takes 1.5 s of CPU time."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ["pytest", "parrot.engine.runner.load"]
_IMPORTED_WITH_TRITON = ["parrot.engine.runner.cuda", "tests.support.mapped_memory"]


class ForkedModule:
    """A replacement of `subprocess.Popen` for `python -m MODULE ARGUMENTS`.

    `pass_fds` must be sockets. Arguments with their numbers get the numbers in the new process."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int] = (), stdin: object = None
    ) -> None:
        assert command[:2] == [sys.executable, "-m"], command
        preload = [*_IMPORTED, *(_IMPORTED_WITH_TRITON if "triton" in sys.modules else ())]
        _CONTEXT.set_forkserver_preload(preload)
        self._command = command
        passed = {str(fd): socket.socket(fileno=os.dup(fd)) for fd in pass_fds}
        self._process = _CONTEXT.Process(
            target=_run, args=(command[2:], passed, dict(os.environ)), daemon=True
        )
        self._process.start()
        for one in passed.values():
            one.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired` like `Popen`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(list(self._command), timeout)
        return self._process.exitcode


def instead_of_subprocess() -> SimpleNamespace:
    """A replacement of the module `subprocess` in `parrot.engine.runner.ranks.processes`."""
    return SimpleNamespace(
        Popen=ForkedModule,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def running() -> set[int]:
    """The process ids of all `ForkedModule`s that have not ended."""
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def _run(
    command: Sequence[str], passed: Mapping[str, socket.socket], environment: Mapping[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    module, *arguments = command
    numbers = {argument: str(own.detach()) for argument, own in passed.items()}
    sys.argv = [module, *(numbers.get(argument, argument) for argument in arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
