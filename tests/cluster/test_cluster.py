"""The process manager with small fake servers: real processes and signals, but no model."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parrot.cli.servers import hurry
from parrot.cluster import Cluster, ClusterError
from parrot.cluster.ports import ask, free_port, is_free

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": str(HERE)}


class FakeCluster(Cluster):
    CORE_MODULE = ENGINE_MODULE = "fake_server"
    RESTART_PAUSES_S = (0.05, 0.2)


def make(engines: list[dict[str, Any]] | None = None, **options: Any) -> FakeCluster:
    return FakeCluster(engines=[{}] if engines is None else engines, env=ENV, **options)


def process_is_gone(pid: int) -> bool:
    """Whether the process has exited. True also for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # The process has exited, or /proc does not exist.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_starts_everything_waits_for_it_and_leaves_nothing() -> None:
    with make([{}, {"engine_name": "second"}]) as cluster:
        assert cluster.engine_names == ["engine-0", "second"]
        pids = [cluster.process(name).pid for name in ("core", "engine-0", "second")]
        ports = {config["port"] for config in cluster.configs.values()}
        assert len(ports) == 3
        assert cluster.core_url == f"http://127.0.0.1:{cluster.configs['core']['port']}"
        assert all(cluster.process(name).is_alive for name in cluster.configs)
        log_dir = cluster.log_dir
    assert all(process_is_gone(pid) for pid in pids)
    assert not log_dir.exists()
    assert all(is_free("127.0.0.1", port) for port in ports)


def test_engines_get_the_address_and_the_token_of_the_core(tmp_path: Path) -> None:
    core = {"cluster_token": "hush"}
    with make([{"model": "x"}], core=core, log_dir=tmp_path) as cluster:
        config = cluster.configs["engine-0"]
        assert config["serve_core"]["port"] == cluster.configs["core"]["port"]
        assert (config["model"], config["engine_name"]) == ("x", "engine-0")
        assert "argv [] stdin '' token hush" in cluster.log("engine-0")
    assert (tmp_path / "engine-0.log").exists(), "a configured log directory is kept"
    assert {path.suffix for path in tmp_path.iterdir()} == {".log"}, "a config may hold secrets"


def test_a_second_stop_ends_a_long_drain() -> None:
    cluster = make([{"drains": True, "drain_timeout": 1e6}])
    cluster.start()
    assert eventually(lambda: "up" in cluster.log("engine-0"))
    stopping = threading.Thread(target=cluster.stop)
    log, process = cluster.log, cluster.process("engine-0")
    stopping.start()
    assert eventually(lambda: "draining" in log("engine-0"))
    assert process.is_alive
    hurry(cluster)
    stopping.join(60)
    assert not stopping.is_alive()
    assert process.exit_code == 0


def test_engines_without_a_core() -> None:
    with make([{}], with_core=False) as cluster:
        assert "argv ['--without_core']" in cluster.log("engine-0")
        with pytest.raises(KeyError):
            _ = cluster.core_url


def test_an_engine_without_a_core_is_awaited_until_it_is_ready() -> None:
    cluster = make([{}, {"loading": True}], with_core=False)
    try:
        cluster.start()
        cluster.wait_ready(["engine-0"])
        with pytest.raises(ClusterError, match="not ready in time: engine-1"):
            cluster.wait_ready(timeout_s=0.2)
    finally:
        cluster.stop()
    assert not any(cluster.process(name).is_alive for name in cluster.configs)


def test_a_server_that_cannot_start_ends_the_wait_with_its_log() -> None:
    cluster = make([{}, {"exit_code": 3}])
    with pytest.raises(ClusterError, match="engine-1 ended with exit code 3") as caught, cluster:
        pass
    assert "I give up: the model is broken" in str(caught.value)
    assert not any(cluster.process(name).is_alive for name in cluster.configs)


def test_an_engine_that_never_registers_is_named() -> None:
    cluster = make([{}, {"silent": True}])
    try:
        cluster.start()
        cluster.wait_ready(["engine-0"])
        with pytest.raises(ClusterError, match="not ready in time: engine-1"):
            cluster.wait_ready(timeout_s=0.2)
    finally:
        cluster.stop()
    assert not cluster.process("core").is_alive


def test_a_busy_port_is_reported_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        cluster = make([{"port": port}])
        with pytest.raises(ClusterError, match=rf"engine-0 cannot listen: port {port} .*in use"):
            cluster.start()
        assert not cluster.process("core").is_alive
        cluster.stop()


def test_two_engines_of_one_name_are_rejected() -> None:
    with pytest.raises(ClusterError, match="two engines are named 'a'"):
        make([{"engine_name": "a"}, {"engine_name": "a"}])


def test_kill_restart_and_add() -> None:
    with make() as cluster:
        engine = cluster.process("engine-0")
        first = engine.pid
        cluster.kill("engine-0")
        assert not engine.is_alive
        assert engine.exit_code == -signal.SIGKILL
        assert cluster.wait_death(0) is None, "a requested death is not reported"
        cluster.restart("engine-0")
        cluster.wait_ready()
        assert engine.pid != first
        assert cluster.log("engine-0").count("argv") == 2, "the log is continued"
        name = cluster.add_engine({})
        assert name == "engine-1"
        cluster.wait_ready([name])


def test_an_unexpected_death_is_reported() -> None:
    with make([{"die_after_s": 1.0}]) as cluster:
        dead = cluster.wait_death(timeout_s=20)
        assert dead is cluster.process("engine-0")
        assert "engine-0 ended with exit code 7" in dead.death_message()


def test_an_engine_that_dies_is_restarted_and_others_continue() -> None:
    messages: list[str] = []
    cluster = make([{"exit_code": 7}, {}])
    try:
        cluster.start()
        healthy, core = cluster.process("engine-1").pid, cluster.process("core")

        def tell(message: str) -> None:
            messages.append(message)
            if len(messages) == 4:
                os.kill(core.pid, signal.SIGKILL)

        assert cluster.supervise(tell) is core
        assert cluster.process("engine-1").pid == healthy
        assert cluster.process("engine-1").is_alive
        assert cluster.log("engine-0").count("argv") == 4
    finally:
        cluster.stop()
    pauses = [message.rpartition(" in ")[2] for message in messages]
    assert pauses == ["0.05 s.", "0.1 s.", "0.2 s.", "0.2 s."]
    assert all("engine-0 ended with exit code 7" in message for message in messages)


def test_it_is_reported_when_an_engine_serves_again() -> None:
    messages: list[str] = []
    cluster = make([{"die_after_s": 1.0}, {}])

    def tell(message: str) -> None:
        messages.append(message)
        if message == "engine-0 serves again.":
            os.kill(cluster.process("core").pid, signal.SIGKILL)

    try:
        cluster.start()
        cluster.wait_ready()
        assert cluster.supervise(tell) is cluster.process("core")
    finally:
        cluster.stop()
    assert "starts again in 0.05 s." in messages[0]
    assert messages[-1] == "engine-0 serves again."


def test_a_stubborn_server_is_killed_with_its_children() -> None:
    with make([{"stubborn": True, "with_child": True}]) as cluster:
        log = cluster.log("engine-0")
        grandchild = int(log.partition("grandchild ")[2].split()[0])
        assert not process_is_gone(grandchild)
        engine = cluster.process("engine-0")
        engine.stop(grace_s=0.3)
        assert engine.exit_code == -signal.SIGKILL
        assert eventually(lambda: process_is_gone(grandchild))


PARENT = """
import os, sys
sys.path.insert(0, {here!r})
from test_cluster import make
cluster = make([{{"stubborn": {stubborn}}}]).__enter__()
print(*(cluster.process(name).pid for name in cluster.configs), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_servers_end_when_their_parent_is_killed(stubborn: bool, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(here=str(HERE), stubborn=stubborn)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ENV | {"TMPDIR": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert eventually(lambda: all(process_is_gone(pid) for pid in pids))


def test_free_ports_differ_and_are_bindable() -> None:
    taken: set[int] = set()
    ports = {free_port("127.0.0.1", taken) for _ in range(50)}
    assert len(ports) == 50
    assert taken == ports


def test_ask_without_a_server_or_with_another_server() -> None:
    assert ask("127.0.0.1", free_port("127.0.0.1", set()), "/health") is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert ask("127.0.0.1", port, "/health", timeout_s=0.1) is None
