"""A ServeCore in a process of its own, as the target of attacks.

`python -m tests.hostile.attacked` prints its URL. For each line on stdin, it then frees all memory
that can be freed and prints its resident memory in bytes."""

import asyncio
import ctypes
import gc
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from parrot.utils.collector import Collector
from tests.support.app_server import running_in_thread
from tests.support.fake_engine import fake_engine, register


class Attacked:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.url = self._line()

    def ask(self, method: str, path: str, raw: bytes | None, token: str = "") -> tuple[int, Any]:
        with closing(http.client.HTTPConnection(self.url, timeout=60)) as connection:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def memory(self) -> int:
        """Return the resident memory of the process in bytes, after it has freed unused memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def attacked() -> Iterator[Attacked]:
    command = [sys.executable, "-m", "tests.hostile.attacked"]
    # The event loop runs in a thread. glibc returns unused memory only from the first arena.
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Attacked(process)
        finally:
            process.kill()


def serve() -> None:
    clock, config = MonotonicClock(), CoreConfig(engine_heartbeat_timeout=1e6)
    engine = fake_engine("e0", model="m", max_seq_len=131_072, tokens_capacity=10**7)
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    with Collector(lambda _: None, clock), running_in_thread(create_app(core)) as url:
        asyncio.run(register(url, engine))
        _say(url.removeprefix("http://"))
        for _ in sys.stdin:
            for record in (engine.requests, engine.prompts, engine.freed, engine.embedded):
                record.clear()
            _say(str(_resident()))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise glibc keeps freed memory
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve()
