"""Run a module as `python -m` does, but never outlive the process that started it.

`python -m parrot.cluster.child MODULE [ARGS...]`: stdin is a lifeline, a pipe whose other end only
the parent holds. However the parent ends, `kill -9` included, the kernel closes that end, the read
returns, and this process stops itself, first politely."""

import os
import runpy
import signal
import sys
import threading

GRACE_S = 5.0


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
    threading.Thread(
        target=_follow_parent, args=(lifeline,), name="parent-watch", daemon=True
    ).start()
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
