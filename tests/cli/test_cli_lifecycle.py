"""The demo and `parrot launch` with simulated engines, in separate processes. The tests count the
processes and files that remain after each kind of exit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parrot.cluster.ports import ask, free_port
from parrot.protocol.server_config import kept_token

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

DEMO = """
import sys
from pathlib import Path
import parrot.cli.demo.command as demo
demo._ENGINE = {engine!r}
demo.run_demo(Path(sys.argv[1]), 3, Path(sys.argv[2]))
"""
FAST, SLOW = {"step_s": 0.001}, {"step_s": 0.5}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that marks all processes of a test. None may remain at its end."""
    name = f"PARROT_TEST_{uuid.uuid4().hex}"
    env = {**os.environ, name: "1", "TMPDIR": str(tmp_path)}  # a killed process leaves its logs
    yield env
    all_ended = eventually(lambda: not pids_of("", env))
    left = pids_of("", env)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert all_ended, left


def pids_of(module: str, env: dict[str, str]) -> list[int]:
    """Return the processes of this test by module."""
    name = next(key for key in env if key.startswith("PARROT_TEST_"))
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = name.encode() in (proc / "environ").read_bytes()
            if is_ours and module in (proc / "cmdline").read_text():
                found.append(int(proc.name))
        except OSError:
            continue  # The process has exited, or belongs to another user.
    return found


def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Command:
    """A running command whose output is read continuously."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )
        self.output = ""

    def read_until(self, text: str) -> None:
        assert self.popen.stdout is not None
        while text not in self.output:
            line = self.popen.stdout.readline()
            assert line, f"{text!r} never came:\n{self.output}"
            self.output += line

    def end(self) -> int:
        rest, _ = self.popen.communicate(timeout=60)
        self.output += rest
        return self.popen.returncode


def start_demo(
    env: dict[str, str], folder: Path, instance: dict[str, float], **engine: object
) -> Command:
    document = folder / "document.txt"
    document.write_text("All parrots talk. " * 120)
    config = {"engine_type": "sim", "model": "sim", "instance": instance, **engine}
    return Command(["-c", DEMO.format(engine=config), str(document), str(folder / "out")], env)


def test_demo_shows_everything_and_leaves_nothing(mark: dict[str, str], tmp_path: Path) -> None:
    demo = start_demo(mark, tmp_path, FAST)
    assert demo.end() == 0, demo.output
    assert "Reading document.txt: 3 parts, then a summary" in demo.output
    assert re.search(r"first word [\d.]+ s after the start\n\n1\. \S", demo.output)
    assert len(re.findall(r"│ main_fact \d+ +│ engine-0 │", demo.output)) == 3
    assert "4 calls, whole job" in demo.output
    path = tmp_path / "out" / "graph.svg"
    assert f"The executed graph: {path}" in demo.output
    assert path.read_text().startswith("<?xml")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_demo_is_interrupted(mark: dict[str, str], tmp_path: Path, signum: signal.Signals) -> None:
    demo = start_demo(mark, tmp_path, SLOW)
    demo.read_until("Reading")
    demo.popen.send_signal(signum)
    assert demo.end() == 128 + signum
    assert "Traceback" not in demo.output


def test_demo_is_killed(mark: dict[str, str], tmp_path: Path) -> None:
    demo = start_demo(mark, tmp_path, SLOW)
    demo.read_until("Reading")
    demo.popen.kill()
    assert demo.end() == -signal.SIGKILL


def test_demo_loses_its_engine(mark: dict[str, str], tmp_path: Path) -> None:
    demo = start_demo(mark, tmp_path, SLOW)
    demo.read_until("Reading")
    (pid,) = pids_of("parrot.engine.http_server", mark)
    os.kill(pid, signal.SIGKILL)
    assert demo.end() == 1
    assert "engine-0 ended with signal 9" in demo.output
    assert "Traceback" not in demo.output


def test_demo_with_an_engine_that_cannot_start(mark: dict[str, str], tmp_path: Path) -> None:
    demo = start_demo(mark, tmp_path, FAST, dtype="float8")
    assert demo.end() == 1
    assert "error: engine-0: " in demo.output
    first = demo.output[demo.output.index("error: engine-0: ") :].splitlines()
    assert "`dtype`" in first[0]
    assert first[1].startswith("engine-0 ended with exit code")


@pytest.fixture
def configs(tmp_path: Path) -> tuple[list[str], int]:
    """Write configs of a core and two engines on free ports. Returns them and the core's port."""
    taken: set[int] = set()
    core = tmp_path / "core.json"
    core.write_text(json.dumps({"port": free_port("localhost", taken)}))
    paths = [str(core)]
    for _ in range(2):
        path = tmp_path / f"engine{len(paths)}.json"
        path.write_text(json.dumps({"engine_type": "sim", "port": free_port("localhost", taken)}))
        paths.append(str(path))
    return paths, json.loads(core.read_text())["port"]


def start_launch(env: dict[str, str], folder: Path, configs: list[str]) -> Command:
    args = ["-m", "parrot.cli", "launch", *configs, "--log_dir", str(folder / "logs")]
    command = Command(args, env)
    command.read_until("ServeCore is ready at")
    return command


def lets_in(page: str) -> bool:
    """Whether the server accepts the key in the page's address."""
    address, _, key = page.partition("#key=")
    body = json.dumps({"key": key}).encode()
    request = urllib.request.Request(
        f"{address}api/enter", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.status == 200


def test_launch_until_a_signal_and_a_second_one_of_the_same_ports(
    mark: dict[str, str], tmp_path: Path, configs: tuple[list[str], int]
) -> None:
    paths, port = configs
    launch = start_launch(mark, tmp_path, paths)
    answer = ask("localhost", port, "/ready", token=kept_token(None))
    assert answer is not None
    assert {e["engine_name"] for e in answer[1]["engines"]} == {"engine-0", "engine-1"}
    launch.read_until("#key=")
    assert lets_in(launch.output.split("Web page: ")[1].split()[0])
    args = ["-m", "parrot.cli", "launch", *paths, "--log_dir", str(tmp_path / "other")]
    second = Command(args, mark)
    assert second.end() == 1
    assert f"core cannot listen: port {port} of 127.0.0.1 is in use" in second.output
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.end() == 128 + signal.SIGTERM
    assert {p.name for p in (tmp_path / "logs").glob("*.log")} == {
        "core.log",
        "engine-0.log",
        "engine-1.log",
    }


def test_launch_restarts_engines_and_ends_with_servecore(
    mark: dict[str, str], tmp_path: Path, configs: tuple[list[str], int]
) -> None:
    launch = start_launch(mark, tmp_path, configs[0])
    engines = pids_of("parrot.engine.http_server", mark)
    os.kill(engines[0], signal.SIGKILL)
    launch.read_until("starts again in 1 s")
    assert eventually(lambda: len(pids_of("parrot.engine.http_server", mark)) == 2)
    assert engines[1] in pids_of("parrot.engine.http_server", mark)
    os.kill(pids_of("parrot.server.http_server", mark)[0], signal.SIGKILL)
    assert launch.end() == 1
    assert "core ended with signal 9" in launch.output
