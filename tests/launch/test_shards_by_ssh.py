"""Two ServeCores of one inventory: one command starts them as shards, with their engines."""

import itertools
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from parrot.cluster.ports import ask
from tests.deploy.commands import ROOT, environment
from tests.launch.by_ssh import KEY, TOKEN, Output, fake_machines
from tests.support.two_shards import check_shards
from tests.support.warm_servers import WarmServers


class InTurn(socketserver.ThreadingTCPServer):
    """Stands in front of some ports, which get its connections in turn: `num_connections` each."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *ports: int) -> None:
        self.num_connections = dict.fromkeys(ports, 0)
        self._turns = itertools.cycle(ports)
        super().__init__(("127.0.0.1", 0), self._relay)  # type: ignore[arg-type]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def _relay(self, client: socket.socket, address: object, server: object) -> None:
        port = next(self._turns)
        self.num_connections[port] += 1
        with socket.create_connection(("127.0.0.1", port)) as other:
            threading.Thread(target=pass_on, args=(other, client), daemon=True).start()
            pass_on(client, other)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(2**16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def run_example(name: str, port: int, *args: str) -> str:
    example = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(
        [*example, "--core", f"http://127.0.0.1:{port}", *args],
        env=environment({"PARROT_KEY": KEY}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_engines(port: int, *names: str) -> None:
    """They register a moment after they are ready."""
    found: list[str] = []
    while found != [*names]:
        answer = ask("127.0.0.1", port, "/ready", token=TOKEN)
        assert answer is not None
        found = sorted(engine["engine_name"] for engine in answer[1].get("engines", ()))
        time.sleep(0.05)


def test_examples_run_on_two_shards(tmp_path: Path, warm_servers: WarmServers) -> None:
    machines = fake_machines(tmp_path, warm_servers)
    machines.two_shards(model="embedded", device="cpu", instance={"num_threads": 1})
    process = machines.launch()
    output = Output(process)
    try:
        output.until("ServeCore is at", f"http://127.0.0.1:{machines.core_port}")
        output.until("ServeCore is at", f"http://localhost:{machines.second_port}")
        wait_for_engines(machines.core_port, "engine-0")
        wait_for_engines(machines.second_port, "engine-0", "engine-1")
        check_shards((machines.core_port, machines.second_port), KEY)
        ports = (machines.core_port, machines.second_port)
        for port in ports:
            assert "--- Greeting ---" in run_example("hello_world.py", port)
        document = tmp_path / "document.txt"
        document.write_text("\n\n".join("A parrot learned a word. " * 60 for _ in range(3)))
        with InTurn(*ports) as front:  # so that half of all connections come to the wrong shard
            address = front.server_address[1]
            summary = run_example("map_reduce_summary.py", address, str(document))
            assert "---" in summary
            assert min(front.num_connections.values()) > 0, front.num_connections
            front.shutdown()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    finally:
        process.kill()
        output.lines.append(process.communicate()[0])
    machines.check_nothing_is_left()
    machines.check_no_secret_was_shown(output.text)
    ends = [
        " core-" in line
        for line in output.text.splitlines()
        if "leaving ServeCore" in line or (" core-" in line and "Shutting down" in line)
    ]
    assert sorted(ends) == ends  # engines, then ServeCores
    assert ends.count(True) == 2
    assert ends.count(False) >= 2


def test_detached_shards_are_stopped_engines_first(
    tmp_path: Path, warm_servers: WarmServers
) -> None:
    machines = fake_machines(tmp_path, warm_servers)
    machines.two_shards(engine_type="sim", heartbeat_interval=0.2)
    try:
        code, output = machines.launched("--detach")
        assert code == 0, output
        assert "Checking 2 machines" in output
        check_shards((machines.core_port, machines.second_port), KEY)
        assert machines.holder("localhost") != machines.holder("localhost+engines")
    finally:
        code, end = machines.launched("--stop")
    assert code == 0, end
    machines.check_nothing_is_left()
    machines.check_no_secret_was_shown(output + end)
