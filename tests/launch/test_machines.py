"""A launcher whose machines answer badly, and an agent whose launcher says what it may."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from parrot.cluster.ports import free_port
from parrot.launch.by_ssh import machines as launcher
from parrot.launch.by_ssh.inventory import read_inventory
from parrot.launch.by_ssh.machines import LaunchError, Machines
from parrot.launch.by_ssh.wire import GO, HURRY, PING, STOP, Action, Order, Report, ServerOrder
from tests.deploy.commands import ROOT
from tests.launch.by_ssh import script


class Heard(Exception):
    """What a test waits for was told."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [
        {"address": "core.lab", "core": {"api_keys": ["key"]}},
        {"address": "gpu.lab", "engines": [{"config": {"engine_type": "sim"}}]},
    ]
    (tmp_path / "lab.json").write_text(json.dumps({"hosts": hosts}))
    return tmp_path


def launched(folder: Path, ssh: str, awaited: str = "") -> Machines:
    """`ssh`: a script in its place; being told what is `awaited` raises `Heard`."""
    script(folder / "ssh", "#!/bin/sh\n{body}\n", body=ssh)

    def tell(address: str, report: Report) -> None:
        if awaited and awaited in report.text:
            raise Heard(address)

    return Machines(read_inventory(folder / "lab.json", {}), tell)


def test_a_machine_that_talks_without_end_does_not_keep_the_check_from_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_CHECK_S", 0.5)
    with pytest.raises(LaunchError, match=r"gpu\.lab: no answer in 0\.5 s"):
        launched(folder, "exec yes").start(Action.RUN)


def test_a_machine_that_falls_silent_when_it_is_reached_again_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = f"""read order
    if mkdir {folder}/$$ 2>/dev/null && [ $(ls -d {folder}/[0-9]* | wc -l) -gt 2 ]; then
        exec sleep 600
    fi
    echo '{{"kind": "checked"}}'
    read go"""
    machines = launched(folder, ssh, "no answer in 1 s")
    machines.start(Action.RUN)
    monkeypatch.setattr(launcher, "_CHECK_S", 1.0)
    with pytest.raises(Heard):
        machines.serve(lambda: None)


def test_a_machine_that_cannot_be_reached_does_not_keep_the_others_running(folder: Path) -> None:
    ssh = f"""case "$*" in *gpu.lab*) echo 'No route to host' >&2; exit 255;; esac
    read order; touch {folder}/asked; echo '{{"kind": "stopped"}}'"""
    with pytest.raises(LaunchError, match=r"gpu\.lab: .*\nNo route") as caught:
        launched(folder, ssh).stop_elsewhere()
    assert "core.lab" not in str(caught.value)
    assert (folder / "asked").exists()


class Agent:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        assert process.stdin is not None
        self.input = process.stdin

    def until(self, kind: str, text: str = "") -> None:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            report = Report.model_validate_json(line)
            if report.kind == kind and text in report.text:
                return
        raise AssertionError(lines)


@contextmanager
def agent(folder: Path) -> Iterator[Agent]:
    """One that was told to run a server whose drain ends only when it is asked again."""
    config = {"host": "127.0.0.1", "port": free_port("127.0.0.1", set()), "drains": True}
    env = {"PYTHONPATH": str(ROOT / "tests" / "cluster"), "XDG_STATE_HOME": str(folder)}
    server = ServerOrder(
        name="engine-0",
        kind="engine",
        module="fake_server",
        config=config,
        stop_s=1e6,
        gpus=None,
        cores=None,
        env={"PYTHONPATH": f"{ROOT}:{env['PYTHONPATH']}"},
    )
    order = Order(
        version=version("parrot"),
        cluster="lab",
        site="localhost",
        action=Action.RUN,
        servers=(server,),
        stop_s=1e6,
    )
    command = [sys.executable, "-m", "parrot.launch.by_ssh.agent"]
    environ = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        running = Agent(process)
        try:
            running.input.write(PING + order.model_dump_json().encode() + b"\n" + PING)
            running.until("checked")
            yield running
        finally:
            process.kill()


def test_a_hurry_ends_the_drain_of_an_agent(tmp_path: Path) -> None:
    with agent(tmp_path) as running:
        running.input.write(GO + STOP)  # a Ctrl-C at once
        running.until("stopped")
        assert running.process.wait(60) == 0
    with agent(tmp_path) as running:
        running.input.write(GO)
        running.until("log", "up")
        running.input.write(STOP)
        running.until("log", "draining")
        running.input.write(HURRY)
        running.until("stopped")
        assert running.process.wait(60) == 0


@pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGTERM, "problem"), (signal.SIGINT, "stopped")]
)
def test_servers_are_stopped_as_wished_only_if_a_person_wished_it(
    tmp_path: Path, signum: int, kind: str
) -> None:
    with agent(tmp_path) as running:
        running.input.write(GO)
        running.until("log", "up")
        running.process.send_signal(signum)
        running.until("log", "draining")
        running.input.write(HURRY)
        running.until(kind)
