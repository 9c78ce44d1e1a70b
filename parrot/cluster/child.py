"""Runs a server's module like `python -m`, and exits when the parent process exits.

Usage: `python -m parrot.cluster.child MODULE NAME [ARGS...]`. NAME only appears in process lists.
Stdin is a pipe from the parent. Its first line is the server's config, a JSON object. The module
reads it at `--config_path` from an unnamed temporary file, so no secret stays on disk. When the
parent exits, even after `kill -9`, the kernel closes the pipe. The child then sends itself SIGTERM,
and after 5 s SIGKILL."""

import os
import runpy
import signal
import sys
import tempfile
import threading
from typing import IO

GRACE_S = 5.0  # Seconds from SIGTERM to SIGKILL after the parent has exited.


def _received(lifeline: int) -> IO[bytes]:
    """The parent's first line. It is incomplete if the parent exits."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - given away
    while data := os.read(lifeline, 2**16):
        file.write(data)
        if data.endswith(b"\n"):
            break
    file.flush()
    file.seek(0)
    return file


def _follow_parent(lifeline: int) -> None:
    while os.read(lifeline, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    stuck = threading.Timer(GRACE_S, os.killpg, (os.getpgrp(), signal.SIGKILL))
    stuck.daemon = True
    stuck.start()


def main() -> None:
    """Run the module with an empty stdin and its own arguments."""
    lifeline = os.dup(sys.stdin.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    config = _received(lifeline)
    threading.Thread(
        target=_follow_parent, args=(lifeline,), name="parent-watch", daemon=True
    ).start()
    module = sys.argv[1]
    sys.argv = [module, "--config_path", f"/dev/fd/{config.fileno()}", *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
