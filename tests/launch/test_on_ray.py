"""`parrot launch --ray` as a user runs it, on a Ray cluster of several nodes on this machine.

These tests need Ray: `pip install '.[ray]'` (docs/deployment.md)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parrot import P
from parrot.cluster.ports import ask, free_port
from tests.support.processes import is_running

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'parrot-serve[ray]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings.
]
ROOT = Path(__file__).parents[2]
TOKEN = "token-of-the-test-cluster"
PATIENCE_S = 120.0
WORKERS: dict[str, Any] = {
    "engine-0": {"num_cpus": 1, "num_gpus": 2, "resources": {"left": 1}},
    "engine-1": {"num_cpus": 1, "resources": {"right": 1}},
}


def until(is_met: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_met()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return found


def config_of(process: Path) -> str:
    """Return the config of a server, from its unnamed temporary file."""
    files = (process / "fd").iterdir()
    return next(file.read_text() for file in files if "(deleted)" in os.readlink(file))


class Service:
    """A launch file and the commands that use it."""

    def __init__(self, cluster: Any, folder: Path, *engines: dict[str, Any]) -> None:
        self.port = free_port("127.0.0.1", set())
        core = {
            "port": self.port,
            "insecure": True,
            "cluster_token": TOKEN,
            "ray": {"num_cpus": 0, "resources": {"head": 0.1}},
        }
        self.file = folder / "launch.json"
        self.file.write_text(json.dumps({"core": core, "engines": engines}))
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = cluster.address
        self.output = folder / "output.txt"

    def launch(self, *args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "parrot.cli", "launch", "--ray", "--address", self.address]
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*command, "--ready_timeout", "100", *args], stdout=output, stderr=output
            )

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        answer = ask("127.0.0.1", self.port, "/ready", token=TOKEN)
        if answer is None or answer[0] != 200:
            return {}
        return {engine["engine_name"]: engine for engine in answer[1]["engines"]}

    def pids(self, name: str) -> list[int]:
        """Return the running processes of this server, including earlier ones that still run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_text().split("\0")
                if command[-2] != name or "parrot.cluster.child" not in command:
                    continue
                config = json.loads(config_of(path.parent))
                if self.port in (config["port"], config.get("serve_core", {}).get("port")):
                    found.append(int(path.parent.name))
            except (OSError, IndexError, StopIteration, ValueError):
                continue  # The process has exited, or has not received its config yet.
        return found

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        def is_ready() -> bool:
            assert process.poll() is None, self.output.read_text()
            return b"ServeCore is ready at" in self.output.read_bytes()

        until(is_ready, "the service is ready")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster with a head without CPUs for engines, and two workers. One worker has fake
    GPUs."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    head = {"num_cpus": 1, "resources": {"head": 1}, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.workers = {name: made.add_node(**WORKERS[name]) for name in WORKERS}
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def servers() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in named)


def test_examples_run_and_a_node_is_lost(cluster: Any, tmp_path: Path) -> None:
    engine = {
        "engine_type": "builtin",
        "model": "embedded",
        "device": "cpu",
        "instance": {"num_threads": 1},
        "drain_timeout": 10.0,
    }
    places = [{"ray": {"resources": worker["resources"]}} for worker in WORKERS.values()]
    service = Service(cluster, tmp_path, *({**engine, **place} for place in places))
    process = service.launch(str(service.file))
    try:
        service.wait_ready(process)
        assert set(service.engines) == set(WORKERS)
        assert servers() == ["core", *WORKERS]
        document = tmp_path / "document.txt"
        document.write_text(
            "\n\n".join(f"On day {n} a parrot learned a word. " * 8 for n in range(3))
        )
        programs = ["hello_world.py", "chatbot.py", "best_of_n.py", "map_reduce_summary.py"]
        for program in programs:
            example = [sys.executable, str(ROOT / "examples" / program), "--core", service.url]
            example += [str(document)] * (program == programs[-1])
            done = subprocess.run(example, capture_output=True, text=True, timeout=PATIENCE_S)
            assert done.returncode == 0, done.stderr
            assert "---" in done.stdout

        answers: list[str] = []
        calls = threading.Thread(target=lambda: answers.extend(many_answers(service.url, 24)))
        calls.start()
        before = service.engines

        def busiest() -> str | None:
            """Return the engine with the most calls."""
            running = {name: e["num_running"] for name, e in service.engines.items()}
            name = max(running, key=running.__getitem__)
            return name if running[name] > 8 else None

        lost = until(busiest, "an engine is at work")
        cluster.remove_node(cluster.workers[lost], allow_graceful=False)
        calls.join(PATIENCE_S)
        assert len(answers) == 24
        assert all(answers)

        cluster.workers[lost] = cluster.add_node(**WORKERS[lost])
        until(lambda: lost in service.engines, "the lost engine runs on the new node")
        (kept,) = WORKERS.keys() - {lost}
        assert service.engines[kept]["engine_id"] == before[kept]["engine_id"]
        assert service.engines[lost]["engine_id"] != before[lost]["engine_id"]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
    assert code == 130, service.output.read_text()
    assert "joined with id" in service.output.read_text()  # The log of ServeCore.
    until(lambda: not servers(), "no actor is left")
    assert ask("127.0.0.1", service.port, "/health") is None
    assert service.pids("engine-0") == service.pids("engine-1") == service.pids("core") == []


def many_answers(url: str, number: int) -> list[str]:
    vm = P.VirtualMachine(url)

    @P.semantic_function()
    def count(
        start: P.Input,
        numbers: P.Output(P.SamplingConfig(ignore_tokenizer_eos=True, max_gen_length=96)),
    ):  # type: ignore
        """Count on from {{start}}: {{numbers}}"""

    found: list[str] = []

    def program() -> None:
        outputs = [count(str(n)) for n in range(number)]
        found.extend(output.get() for output in outputs)

    vm.run(program)
    return found


def test_detached_scaled_and_with_several_gpus(cluster: Any, tmp_path: Path) -> None:
    """A pool grows with its queue. A restarted supervisor takes over the servers. All are
    stopped."""
    scaled = {
        "engine_type": "sim",
        "engine_name": "small",
        "tasks_capacity": 1,
        "instance": {"step_s": 0.2},
        "drain_timeout": 5.0,
        "ray": {
            "num_cpus": 0,
            "scaling": {"max_engines": 2, "window": 10.0, "queue_per_engine": 2.0},
        },
    }
    divided = {"engine_type": "sim", "engine_name": "big", "ray": {"num_cpus": 1, "num_gpus": 2}}
    divided["model"] = "big"
    service = Service(cluster, tmp_path, scaled, divided)
    process = service.launch("--name", "two", "--detach", str(service.file))
    assert process.wait(PATIENCE_S) == 0, service.output.read_text()
    try:
        assert servers() == ["big", "core", "small-0", "supervisor"]
        (group,) = ray.util.placement_group_table().values()
        assert (group["strategy"], group["state"]) == ("STRICT_PACK", "CREATED")
        assert group["bundles"] == {0: {"CPU": 1.0, "GPU": 2.0}}
        (pid,) = service.pids("big")
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "CUDA_VISIBLE_DEVICES=0,1" in environ
        (pid,) = service.pids("small-0")
        assert "CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert not [name for name in environ if TOKEN in name]

        again = service.launch("--name", "two", str(service.file))
        assert again.wait(PATIENCE_S) == 1
        assert "a service named 'two' already runs on this cluster" in service.output.read_text()

        core_pids, engine_pids = service.pids("core"), service.pids("small-0")
        ray.kill(ray.get_actor("supervisor", "parrot-two"), no_restart=False)
        clients = [threading.Thread(target=complete, args=(service.url,)) for _ in range(8)]
        for client in clients:
            client.start()
        until(lambda: "small-1" in service.engines, "the queue brings an engine")
        assert (service.pids("core"), service.pids("small-0")) == (core_pids, engine_pids)
        for client in clients:
            client.join(PATIENCE_S)

        before = service.engines["big"]["engine_id"]
        cluster.remove_node(cluster.workers["engine-0"], allow_graceful=False)
        cluster.workers["engine-0"] = cluster.add_node(**WORKERS["engine-0"])
        until(
            lambda: service.engines.get("big", {}).get("engine_id") not in (None, before),
            "the engine with two GPUs serves on the new node",
        )

        ray.kill(ray.get_actor("core", "parrot-two"), no_restart=False)
        until(lambda: (new := service.pids("core")) and new != core_pids, "ServeCore starts again")
        until(lambda: "small-0" in service.engines, "engines find it")
        complete(service.url)
        core_pids += service.pids("core")
    finally:
        stopped = service.launch("--name", "two", "--stop").wait(PATIENCE_S)
    assert stopped == 0, service.output.read_text()
    until(lambda: not servers(), "no actor is left")
    left = [pid for pid in core_pids if is_running(pid)]
    assert [Path(f"/proc/{pid}/cmdline").read_text() for pid in left] == []
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def complete(url: str) -> None:
    body = {"model": "sim", "prompt": "x", "max_tokens": 100, "seed": threading.get_ident() % 997}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert re.search("length", answer.read().decode())


def test_stop_ends_all_servers_of_an_unfinished_launch(cluster: Any, tmp_path: Path) -> None:
    engine = {"engine_type": "sim", "drain_timeout": 5.0, "ray": {"num_cpus": 0}}
    unplaced = {"engine_type": "sim", "engine_name": "big", "ray": {"num_gpus": 64}}
    service = Service(cluster, tmp_path, engine, unplaced)

    def stop() -> tuple[int, str]:
        code = service.launch("--name", "three", "--stop").wait(PATIENCE_S)
        return code, service.output.read_text()

    def check_nothing_is_left() -> None:
        assert servers() == []
        assert all(g["state"] == "REMOVED" for g in ray.util.placement_group_table().values())
        until(lambda: not (service.pids("core") or service.pids("engine-0")), "no process is left")
        code, output = stop()
        assert (code, "there is no service named 'three'" in output) == (1, True), output

    process = service.launch("--name", "three", "--detach", str(service.file))
    until(lambda: service.pids("engine-0"), "an engine has begun")
    process.kill()
    process.wait()
    assert service.launch("--name", "three", str(service.file)).wait(PATIENCE_S) == 1
    assert "stop it with --stop" in service.output.read_text()
    code, output = stop()
    assert (code, "Stopped: big, core, engine-0, supervisor" in output) == (0, True), output
    check_nothing_is_left()

    process = service.launch("--name", "three", "--detach", str(service.file))
    until(lambda: service.pids("engine-0"), "an engine has begun")
    ray.kill(ray.get_actor("supervisor", "parrot-three"), no_restart=True)
    assert process.wait(PATIENCE_S) == 1
    code, output = stop()
    assert (code, "Stopped: big, core, engine-0" in output) == (0, True), output
    check_nothing_is_left()

    service = Service(
        cluster, tmp_path, {**engine, "drain_timeout": 60.0, "instance": {"step_s": 0.3}}
    )
    process = service.launch("--name", "three", "--detach", str(service.file))
    assert process.wait(PATIENCE_S) == 0, service.output.read_text()
    answered: list[None] = []
    client = threading.Thread(target=lambda: answered.append(complete(service.url)))  # type: ignore[func-returns-value]
    client.start()
    until(lambda: service.engines["engine-0"]["num_running"], "a call runs")
    first = service.launch("--name", "three", "--stop")
    (pid,) = service.pids("engine-0")
    log = Path(f"/proc/{pid}/fd/1")
    until(lambda: "leaving ServeCore" in log.read_text(), "the engine drains")
    assert not answered
    first.kill()
    first.wait()
    code, output = stop()
    assert (code, "Stopped: core, engine-0, supervisor" in output) == (0, True), output
    client.join(PATIENCE_S)
    assert answered
    check_nothing_is_left()

    service = Service(cluster, tmp_path, engine)
    process = service.launch("--name", "three", str(service.file))
    service.wait_ready(process)
    code, output = stop()
    assert (code, "Stopped: core, engine-0" in output) == (0, True), output
    assert process.wait(PATIENCE_S) == 0
    check_nothing_is_left()


def test_a_server_that_cannot_be_placed_ends_the_launch(cluster: Any, tmp_path: Path) -> None:
    engine = {"engine_type": "sim", "ray": {"num_gpus": 64}}
    service = Service(cluster, tmp_path, engine)
    process = service.launch("--ready_timeout", "5", str(service.file))
    assert process.wait(PATIENCE_S) == 1
    assert "engine-0: waits for a node with 1 CPU, 64 GPU" in service.output.read_text()
    until(lambda: not servers(), "no actor is left")
