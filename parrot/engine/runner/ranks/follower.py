"""The process of a rank other than rank 0: `python -m parrot.engine.runner.ranks.follower FD`.

FD is the file descriptor of its link. The process loads its shard of the model, runs the steps that
rank 0 sends, and exits when rank 0 exits or crashes."""

import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

import numpy as np
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.load import load_rank
from parrot.engine.runner.ranks.group import Link, RankGroup, device_kind
from parrot.engine.runner.ranks.steps import StepReader
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

# After an error this process waits this long, in seconds, for rank 0 to close the link. If it does,
# another rank has caused the error, and this process logs nothing.
_LOSS_GRACE_S = 1.0


class FollowerMember:
    """`RankMember` of a rank other than rank 0. Its reports go to rank 0."""

    def __init__(self, link: Link, group: RankGroup) -> None:
        self.group = group
        self._link = link

    def join(self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool) -> None:
        loaded = {"error": None, "device": device_kind(device)}
        self._link.send(json.dumps(loaded).encode())
        self.report("connecting to the other ranks")
        self.group.connect_by_file(self._link.receive().decode(), device, layout)

    def report(self, doing: str | None) -> None:
        # Rank 0 reads the reports only if the start fails.
        self._link.send(json.dumps({"doing": doing or "waiting for steps"}).encode())


def follow(link: Link) -> NoReturn:
    """Load the model and run steps. Raises `EOFError` when rank 0 exits, or the first error."""
    task = json.loads(link.receive())
    member = FollowerMember(link, RankGroup(task["rank"], task["size"]))
    try:
        runner = load_rank(BuiltinConfig.model_validate(task["config"]), member).runner
    except ConfigError as error:
        link.send(json.dumps({"error": str(error)}).encode())
        raise
    reader = StepReader()
    while True:
        runner.compute(reader.step(np.frombuffer(link.receive(), dtype=np.int32)))


def main() -> None:
    # Signals that stop the engine stop rank 0, and this process exits with it.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    link = Link(socket.socket(fileno=int(sys.argv[1])))

    def end_with_rank_0() -> None:
        link.wait_for_end()
        os._exit(0)  # The main thread may be blocked in a collective.

    threading.Thread(target=end_with_rank_0, name="rank-0-watch", daemon=True).start()
    try:
        follow(link)
    except (EOFError, ConnectionError):
        os._exit(0)
    except ConfigError:
        sys.exit(1)
    except Exception:
        if link.wait_for_end(_LOSS_GRACE_S):
            os._exit(0)
        logger.exception("this rank exits")
        os._exit(1)


if __name__ == "__main__":
    main()
