"""The process of a rank besides rank 0: `python -m parrot.engine.runner.ranks.follower FD`.

FD is its end of a link. It loads its part of the model, then runs the steps that it is told, and
ends when rank 0 does, however that ends."""

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

_MOMENT_S = 1.0  # in which rank 0 has seen that a rank ended, and ended the others


class FollowerSeat:
    """A `Seat` behind a link."""

    def __init__(self, link: Link, group: RankGroup) -> None:
        self.group = group
        self._link = link

    def join(self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool) -> None:
        loaded = {"error": None, "device": device_kind(device)}
        self._link.send(json.dumps(loaded).encode())
        self.report("connecting to the other ranks")
        self.group.connect_by_file(self._link.receive().decode(), device, layout)

    def report(self, doing: str | None) -> None:
        """Rank 0 reads it if it must know why a rank does not come on."""
        self._link.send(json.dumps({"doing": doing or "waiting for steps"}).encode())


def follow(link: Link) -> NoReturn:
    """Raises `EOFError` when rank 0 has ended, and whatever fails: then there is no going on."""
    task = json.loads(link.receive())
    seat = FollowerSeat(link, RankGroup(task["rank"], task["size"]))
    try:
        runner = load_rank(BuiltinConfig.model_validate(task["config"]), seat).runner
    except ConfigError as error:
        link.send(json.dumps({"error": str(error)}).encode())
        raise
    reader = StepReader()
    while True:
        runner.compute(reader.step(np.frombuffer(link.receive(), dtype=np.int32)))


def main() -> None:
    # Who stops the engine stops rank 0, which this rank follows.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    link = Link(socket.socket(fileno=int(sys.argv[1])))

    def end_with_rank_0() -> None:
        link.wait_for_end()
        os._exit(0)  # whatever it waits for will not come

    threading.Thread(target=end_with_rank_0, name="rank-0-watch", daemon=True).start()
    try:
        follow(link)
    except (EOFError, ConnectionError):
        os._exit(0)
    except ConfigError:
        sys.exit(1)
    except Exception:
        if link.wait_for_end(_MOMENT_S):  # the end of another rank is why
            os._exit(0)
        logger.exception("a rank ends")
        os._exit(1)


if __name__ == "__main__":
    main()
