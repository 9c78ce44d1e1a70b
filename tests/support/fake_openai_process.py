"""A `FakeOpenAI` in its own process, which tests can kill and stop.

Usage: python -m tests.support.fake_openai_process PORT '{"reply": "a b c"}'"""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from parrot.cluster.ports import free_port
from tests.support.fake_openai import FakeOpenAI


@dataclass
class FakeProcess:
    """A server process. `options` are fields of `FakeOpenAI`."""

    options: dict[str, Any]
    port: int = field(default_factory=lambda: free_port("127.0.0.1", set()))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def num_requests(self) -> int:
        """The number of requests since the start of the process."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/requests", timeout=20) as answer:
            return int(json.load(answer)["requests"])

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [sys.executable, "-m", __name__, str(self.port), json.dumps(self.options)]
        self.process = subprocess.Popen(command)
        until = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None, "the process ended"
            assert time.monotonic() < until, "the process did not answer within 60 s"
            time.sleep(0.02)

    def send(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def main() -> None:
    fake = FakeOpenAI(**json.loads(sys.argv[2]))
    app = fake.app()
    routes = list(app.router.routes)
    app.get("/requests")(lambda: {"requests": len(fake.bodies)})
    # This route must come before the route of all paths.
    app.router.routes[:] = [app.router.routes[-1], *routes]
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")


if __name__ == "__main__":
    main()
