"""The supervisor's actions and messages on a fake cluster. These tests need no Ray."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from parrot.cluster import ClusterError
from parrot.launch.configs import Server, read_entries
from parrot.launch.on_ray.actor import Address, ServerStatus
from parrot.launch.on_ray.pools import Needs, ray_plan
from parrot.launch.on_ray.supervisor import Supervisor
from parrot.protocol.public import EngineStatus, ReadyResponse


class PlayedCluster:
    """A fake cluster. Started servers run at once, except those in `pending`."""

    def __init__(self) -> None:
        self.needs: dict[str, Needs] = {}
        self.pending: set[str] = set()
        self.deaths: dict[str, int] = {}
        self.ending: set[str] = set()
        self.over: set[str] = set()
        self.num_queued: dict[str, int] = {}
        self.core: Address = ("10.0.0.1", 9000)
        self.core_answers = True
        self.polled_cores: list[Address | None] = []
        self.ended: list[str] = []

    @property
    def names(self) -> Collection[str]:
        return self.needs.keys()

    def start(self, server: Server, needs: Needs) -> None:
        self.needs[server.name] = needs

    def retire(self, name: str) -> None:
        self.ending.add(name)

    def problem(self, name: str) -> str:
        return f"waits for {self.needs[name]}"

    def poll(self, core: Address | None, timeout_s: float) -> dict[str, ServerStatus]:
        self.polled_cores.append(core)
        for name in self.ending & self.needs.keys():
            del self.needs[name]
            self.ended.append(name)
        running = [name for name in self.needs if name not in self.pending]
        statuses = {
            name: ServerStatus(
                ("10.0.0.2", 1),
                self.deaths.get(name, 0),
                f"{name} is dead",
                is_over=name in self.over,
            )
            for name in running
        }
        if "core" in running and self.core_answers:
            engines = [self._engine(name) for name in running if name != "core"]
            ready: tuple[int, Any] = (503, {"error": {}})
            if engines:
                answer = ReadyResponse(num_queued=0, engines=engines)
                ready = (200, answer.model_dump(mode="json"))
            statuses["core"] = ServerStatus(self.core, self.deaths.get("core", 0), "", ready)
        return statuses

    def _engine(self, name: str) -> EngineStatus:
        return EngineStatus(
            engine_id=0,
            engine_name=name,
            engine_type="sim",
            model="m",
            host="10.0.0.2",
            port=1,
            tasks_capacity=100,
            num_queued=self.num_queued.get(name.partition("-")[0], 0),
        )


class Play:
    """A supervisor on virtual time."""

    def __init__(self, tmp_path: Path, *engines: dict[str, Any], existing: Collection[str] = ()):
        path = tmp_path / "launch.json"
        sims = [{"engine_type": "sim", **engine} for engine in engines]
        path.write_text(json.dumps({"core": {"api_keys": ["key"]}, "engines": sims}))
        self.plan = ray_plan(*read_entries([path], {}, "ray"))
        self.cluster, self.said, self.now = PlayedCluster(), [], 0.0  # type: ignore[var-annotated]
        self._end = 0.0
        self.each_tick: Callable[[], None] = lambda: None
        self.supervisor = Supervisor(
            self.plan, self.cluster, self.said.append, self._wait, lambda: self.now
        )
        self.supervisor.start(existing)

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        self.each_tick()
        return self.now >= self._end

    def ready(self) -> None:
        self._end = float("inf")
        self.supervisor.wait_ready(100)

    def run(self, seconds: float) -> None:
        self._end = self.now + seconds
        self.supervisor.run()

    @property
    def engines(self) -> list[str]:
        there = set(self.cluster.names) - self.cluster.ending - {"core"}
        return sorted(there)


SCALED = {"engine_name": "a", "ray": {"scaling": {"min_engines": 2, "max_engines": 4}}}


def test_ready_when_the_least_number_of_engines_serves(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED, {"engine_name": "b"})
    play.cluster.pending = {"a-1"}

    def place() -> None:
        if play.now >= 50:
            play.cluster.pending.clear()

    play.each_tick = place
    play.ready()
    assert 50 <= play.now < 60
    assert play.engines == ["a-0", "a-1", "b"]
    assert play.supervisor.core_url == "http://10.0.0.1:9000"
    assert play.cluster.polled_cores[0] is None
    assert play.cluster.polled_cores[-1] == ("10.0.0.1", 9000)


def test_servers_that_cannot_be_placed_are_named(tmp_path: Path) -> None:
    play = Play(tmp_path, {"engine_type": "builtin", "device": "cuda"})
    play.cluster.pending = {"engine-0"}
    with pytest.raises(ClusterError, match="engine-0: waits for 1 CPU, 1 GPU"):
        play.ready()
    assert play.now >= 100


@pytest.mark.parametrize("name", ["core", "engine-0"])
def test_a_server_that_cannot_start_ends_the_start(tmp_path: Path, name: str) -> None:
    play = Play(tmp_path, {})
    play.cluster.pending = {"engine-0"} - {name}
    play.cluster.core_answers = False
    play.cluster.deaths[name] = 2
    with pytest.raises(ClusterError, match=f"{name} is dead"):
        play.ready()
    assert play.now == 0


def test_a_pool_follows_its_own_queue(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED, {"engine_name": "b", "ray": SCALED["ray"]})
    play.ready()
    play.cluster.num_queued = {"a": 100}
    play.run(60)
    assert play.engines == ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1"]
    assert play.said == ["a: 4 engines instead of 2"]
    play.cluster.num_queued = {}
    play.run(1200)
    assert play.engines == ["a-0", "a-1", "b-0", "b-1"]
    assert play.cluster.ended == ["a-3", "a-2"]


def test_nothing_is_scaled_while_the_core_does_not_answer(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED)
    play.ready()
    play.cluster.num_queued = {"a": 100}
    play.cluster.core_answers = False
    play.run(1000)
    assert play.engines == ["a-0", "a-1"]
    assert play.supervisor.missing == ["core", "a-0", "a-1"]


def test_engines_get_the_new_address_of_the_core(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED)
    play.ready()
    play.cluster.core = ("10.0.0.9", 9000)
    play.run(5)
    assert play.said == ["ServeCore is at http://10.0.0.9:9000 now; engines follow it"]
    assert play.cluster.polled_cores[-1] == ("10.0.0.9", 9000)


def test_deaths_are_reported_once(tmp_path: Path) -> None:
    play = Play(tmp_path, {})
    play.ready()
    play.cluster.deaths["engine-0"] = 1
    play.run(20)
    play.cluster.deaths["engine-0"] = 0  # The actor restarted on another node.
    play.run(20)
    play.cluster.deaths["engine-0"] = 1
    play.run(20)
    assert play.said == ["engine-0 is dead\nengine-0 starts again"] * 2


def test_a_second_supervisor_takes_over_existing_servers(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED, existing=["core", "a-0", "a-2", "a-3"])
    play.run(10)
    assert play.engines == ["a-0", "a-2", "a-3"]
    play.run(1200)
    assert play.engines == ["a-0", "a-2"]


def test_shutdown(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED, {"engine_name": "b"})
    play.ready()
    play.supervisor.stop()
    assert sorted(play.cluster.ended[:3]) == ["a-0", "a-1", "b"]
    assert play.cluster.ended[3:] == ["core"]


def test_a_server_stopped_by_another_process_is_not_restarted(tmp_path: Path) -> None:
    play = Play(tmp_path, SCALED)
    play.ready()
    play.cluster.over = {"a-1"}
    play.run(1000)
    assert play.now < 10
    assert play.said == ["another process stopped the servers"]

    play = Play(tmp_path, SCALED)
    play.cluster.pending, play.cluster.over = {"a-0"}, {"a-1"}
    with pytest.raises(ClusterError, match="another process stopped"):
        play.ready()


def test_an_immediate_shutdown_does_not_wait_for_calls(tmp_path: Path) -> None:
    play = Play(tmp_path, {"engine_name": "a"})
    play.ready()
    num_rounds = len(play.cluster.polled_cores)
    play.supervisor.stop(lambda: True)
    assert play.cluster.ending == {"a", "core"}
    assert len(play.cluster.polled_cores) == num_rounds
