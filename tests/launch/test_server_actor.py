"""A server's process in its actor, with real servers and without Ray."""

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parrot.cluster.ports import free_port
from parrot.launch.configs import plan
from parrot.launch.on_ray.actor import ServerActor, ServerStatus

PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def actors(folder: Path) -> Iterator[list[ServerActor]]:
    """Actors of ServeCore and of an engine that drains for at most 1 s."""
    core = {"port": free_port("127.0.0.1", set()), "api_keys": ["a key of sixteen letters"]}
    planned = plan(core, [{"engine_type": "sim", "drain_timeout": 1.0}])
    servers = (planned.core, *planned.engines)
    made = [ServerActor(server, "127.0.0.1", hides_gpus=True) for server in servers]
    yield made
    for actor in reversed(made):
        actor.stop()
    assert not list(folder.glob("parrot-*"))


def until(actor: ServerActor, is_met: Callable[[ServerStatus], bool], core=None) -> ServerStatus:  # type: ignore[no-untyped-def]
    """Call `follow` repeatedly, like a supervisor."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_met(status := actor.follow(core)):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def serves(status: ServerStatus) -> bool:
    return status.ready is not None and status.ready[0] == 200


def test_an_engine_follows_its_core(
    actors: list[ServerActor], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    core, engine = actors
    assert engine.follow(None).address is None  # The engine waits for ServeCore's address.
    address = until(core, lambda status: status.ready is not None).address
    assert address is not None
    first = engine.follow(address)
    status = until(core, serves)
    assert [e["engine_name"] for e in status.ready[1]["engines"]] == ["engine-0"]  # type: ignore[index]

    files = list(folder.glob("parrot-*/*"))
    assert {path.name for path in files} == {"core.log", "engine-0.log"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o700}
    pid = engine._process.pid
    process, token = engine._process, core._server.token
    assert token
    assert token not in f"{process._command} {process._env}"
    assert not any(token in path.read_text() for path in files)
    assert process._env["CUDA_VISIBLE_DEVICES"] == ""

    assert engine.follow(None) == first  # A new supervisor does not know the address yet.
    assert engine.follow(address) == first
    assert engine._process.pid == pid
    again = until(engine, lambda s: s.address != first.address, ("127.0.0.2", address[1]))
    assert again.num_deaths == 0  # A restart for a new ServeCore is not a crash.
    assert engine._process.pid != pid
    engine.follow(address)
    until(core, serves)
    assert "joined with id" in capfd.readouterr().out


def test_a_stopped_server_reports_it_and_stays_stopped(actors: list[ServerActor]) -> None:
    core, engine = actors
    assert (core.stop_s(), engine.stop_s()) == (15.0, 16.0)
    until(core, lambda status: status.ready is not None)
    core.stop()
    status = core.follow(None)
    assert (status.address, status.is_over, status.num_deaths) == (None, True, 0)
    assert not core._process.is_alive


def test_a_server_that_dies_is_restarted(actors: list[ServerActor]) -> None:
    core, _ = actors
    address = until(core, lambda status: status.ready is not None).address
    os.kill(core._process.pid, 9)
    died = until(core, lambda status: status.num_deaths == 1)
    assert died.address is None
    assert "core ended with signal 9" in died.last_death
    assert until(core, lambda status: status.ready is not None, address).address == address
