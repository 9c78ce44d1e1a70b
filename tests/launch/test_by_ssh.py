"""Clusters on machines that ssh reaches: launched, hurt, stopped."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.by_ssh import Machines, Output, fake_machines, real_machines, script
from tests.support.warm_servers import WarmServers


@pytest.fixture(params=["fake", "sshd"])
def machines(
    request: pytest.FixtureRequest, tmp_path: Path, warm_servers: WarmServers
) -> Iterator[Machines]:
    if request.param == "fake":
        yield fake_machines(tmp_path, warm_servers)
    else:
        with real_machines(tmp_path, warm_servers) as found:
            yield found


def test_a_cluster_lives_as_long_as_its_launcher_whatever_dies_in_it(machines: Machines) -> None:
    machines.inventory()
    process = machines.launch()
    output = Output(process)
    try:
        started = re.search(r"\[(\d+)\]", output.until("engine-1 |", "Started server process"))
        assert started is not None
        output.until("ServeCore is at", f"http://127.0.0.1:{machines.core_port}")
        output.until("Look at it")
        assert machines.answers(machines.core_port)

        os.kill(int(started[1]), signal.SIGKILL)
        output.until("localhost: engine-1 ended with signal 9; it starts again in 1 s")
        output.until("localhost engine-1 is ready")

        if machines.is_fake:
            agent = machines.holder("localhost")
            os.kill(agent, signal.SIGKILL)  # and with it its engines
            output.until("the connection ended")
            output.until("registered as engine", "engine-")
            output.until("registered as engine", "engine-")
            assert machines.holder("localhost") != agent

        if machines.is_fake:
            os.killpg(process.pid, signal.SIGINT)
            output.until("engine-0 |", "leaving ServeCore")
            output.until("core |", "Shutting down")
            assert process.wait(60) == 128 + signal.SIGINT
        else:
            os.killpg(process.pid, signal.SIGKILL)
            for address in ("localhost", "127.0.0.1"):
                while machines.holder(address):
                    time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    machines.check_nothing_is_left()
    machines.check_no_secret_was_shown(output.text)


LOGINCTL = """#!/bin/sh
mkdir {folder}/asked 2>/dev/null && echo yes || echo no
"""
SYSTEMD_RUN = """#!/bin/sh
echo "$@" >> {folder}/units
while [ "$1" != -- ]; do shift; done
shift
setsid "$@" </dev/null >/dev/null 2>&1 &
"""


def test_a_detached_cluster_lives_until_it_is_stopped(
    tmp_path: Path, warm_servers: WarmServers
) -> None:
    """On one machine in the hands of systemd, on the other by itself."""
    machines = fake_machines(tmp_path, warm_servers)
    machines.inventory(num_engines=1)
    script(machines.bin / "loginctl", LOGINCTL, folder=tmp_path)
    script(machines.bin / "systemd-run", SYSTEMD_RUN, folder=tmp_path)
    try:
        code, output = machines.launched("--detach")
        assert code == 0, output
        assert "goes on by itself" in output
        assert "localhost engine-0 is ready" in output
        assert machines.answers(machines.core_port)
        assert machines.answers(machines.engine_port, "/ready")
        (unit,) = (tmp_path / "units").read_text().splitlines()
        assert unit.startswith("--user --collect --unit=parrot-lab-")
        assert "--property=KillMode=mixed" in unit
        code, again = machines.launched("--detach")
        assert code == 1
        assert again.count("it runs already") == 2, again
        assert machines.answers(machines.core_port)
    finally:
        code, end = machines.launched("--stop")
    assert code == 0, end
    machines.check_nothing_is_left()
    machines.check_no_secret_was_shown(output + again + end)


def test_nothing_starts_unless_every_machine_is_fit(
    tmp_path: Path, warm_servers: WarmServers
) -> None:
    machines = fake_machines(tmp_path, warm_servers)
    path = machines.inventory(1, engine_type="builtin", model="embedded")
    path.write_text(path.read_text().replace('"count": 1', '"gpus": 64, "cores": 4096'))
    with socket.create_server(("0.0.0.0", machines.core_port)):
        code, output = machines.launched()
    assert code == 1
    assert f"127.0.0.1: port {machines.core_port} is taken: give core another `port`" in output
    assert "the engines need 64: fewer engines" in output
    assert "the engines are to use 4096" in output
    assert not list(machines.state.rglob("*.json"))
    assert "Started server process" not in output


def test_a_machine_that_cannot_be_reached_is_named_with_the_words_of_ssh(
    tmp_path: Path, warm_servers: WarmServers
) -> None:
    machines = fake_machines(tmp_path, warm_servers)
    machines.inventory()
    refusal = "#!/bin/sh\nprintf 'Permission \\033[2Jdenied (publickey).' >&2\nexit 255\n"
    script(machines.bin / "ssh", refusal)
    code, output = machines.launched()
    assert code == 1
    assert "localhost: the connection ended with exit code 255" in output
    assert output.count("Permission \N{REPLACEMENT CHARACTER}[2Jdenied (publickey).") == 2
    assert "\033" not in output


def test_the_commands_are_shown_and_not_run(tmp_path: Path, warm_servers: WarmServers) -> None:
    machines = fake_machines(tmp_path, warm_servers)
    machines.inventory()
    code, output = machines.launched("--dry-run")
    assert code == 0
    assert "an environment/python'\"'\"' -m parrot.launch.by_ssh.agent'" in output
    assert "parrot.cluster.child parrot.engine.http_server engine-0" in output
    assert f"http_server engine-1  # port {machines.engine_port + 1}" in output
    assert not machines.log.exists()
