"""Run a server's module as `python -m` does, but never outlive the process that started it.

`python -m parrot.cluster.child MODULE NAME [ARGS...]`: the name is for whoever lists processes.
Stdin is a lifeline, a pipe whose other end only the parent holds. Its first line is the server's
config, a JSON object, which the module finds at `--config_path`: a file without a name, so that no
secret of it is left behind. However the parent ends, `kill -9` included, the kernel closes that
end, the read returns, and this process stops itself, first politely."""

import os
import runpy
import signal
import sys
import tempfile
import threading
from typing import IO

GRACE_S = 5.0


def _received(lifeline: int) -> IO[bytes]:
    """The parent's first line, or as much of it as there is."""
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
    """The module sees an empty stdin and its own arguments."""
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
