"""Run the commands of deployments on this machine, with paths in a temporary folder and free
ports."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from parrot.cluster.ports import ask

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "sample_configs" / "deploy"
PARROT = [sys.executable, "-m", "parrot.cli"]
SIM = {
    "PARROT_ENGINE__ENGINE_TYPE": "sim",
    "PARROT_ENGINE__SERVE_CORE__HOST": "127.0.0.1",
    "PARROT_ENGINE__HEARTBEAT_INTERVAL": "0.2",
}
"""Settings that replace the GPU model and the host names of a real cluster."""


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process without `PARROT_` variables, plus `own`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PARROT_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **own}


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process. At the end, sends SIGTERM and checks that the exit status is 0."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(env), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(port: int, path: str, log: Path) -> None:
    """Wait until the server answers with 200."""
    deadline = time.monotonic() + 60
    while (answer := ask("127.0.0.1", port, path)) is None or answer[0] != 200:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
