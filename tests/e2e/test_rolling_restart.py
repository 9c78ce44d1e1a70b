"""All servers are restarted one after the other while a program runs."""

import asyncio
import json
import threading
from pathlib import Path

from parrot import P
from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import program
from tests.e2e.test_faults import engine_of_a_running_call

SIM = {
    "engine_type": "sim",
    "heartbeat_interval": 0.3,
    "drain_timeout": 60,
    "instance": {"step_s": 0.01},
}
HANGS_S = 60


@P.semantic_function()
def tell(about: P.Input, story: P.Output(P.SamplingConfig(max_gen_length=40))):
    """Tell me about {{about}}. {{story}}"""


@P.semantic_function()
def join(stories: P.Input, whole: P.Output(P.SamplingConfig(max_gen_length=40))):
    """Make one of these: {{stories}} {{whole}}"""


def restart(cluster: Cluster, name: str) -> None:
    process = cluster.process(name)
    process.terminate()
    assert process.wait(HANGS_S)
    assert process.exit_code == 0, process.log_tail()
    cluster.restart(name)
    cluster.wait_ready()


async def test_no_read_fails_while_every_server_is_restarted_in_turn(tmp_path: Path) -> None:
    core = {"engine_heartbeat_timeout": 3, "journal": str(tmp_path / "journal")}
    over, answers = threading.Event(), []

    def program(url: str) -> None:
        vm = P.VirtualMachine(url, restart_timeout_s=HANGS_S)

        def main() -> None:
            while not over.is_set():
                whole = join([tell(f"parrot {number}") for number in range(4)])
                answers.append(whole.get())

        vm.run(main)

    with Cluster(core=core, engines=[SIM] * 2) as cluster:
        running = [asyncio.create_task(asyncio.to_thread(program, cluster.core_url)) for _ in "ab"]
        for name in ["engine-0", "core", "engine-1"]:
            count = len(answers)
            while len(answers) < count + 2:
                assert not any(task.done() for task in running)
                await asyncio.sleep(0.01)
            await asyncio.to_thread(restart, cluster, name)
        over.set()
        await asyncio.wait_for(asyncio.gather(*running), HANGS_S)
    assert len(answers) > 6
    assert len(set(answers)) == 1


async def test_a_drained_engine_finishes_its_calls_before_it_ends(tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    with Cluster(core={"audit_path": str(audit)}, engines=[SIM]) as cluster:
        async with (
            HttpClient(cluster.core_url) as http,
            HttpClient(cluster.core_url, bearer_token=cluster.cluster_token) as operator,
            program(ServeClient(http)) as session,
        ):
            var_id = await session.call("Count: {{out}}", 150)
            reading = asyncio.create_task(session.get(var_id, timeout_s=None))
            await engine_of_a_running_call(session)
            path = "/v1/admin/engine/0/drain"
            await operator.request("POST", path, body={"is_wanted": True})
            process = cluster.process("engine-0")
            process.terminate()  # `/engine_leave` waits for the call
            assert len(await asyncio.wait_for(reading, HANGS_S)) == 150
            assert await asyncio.to_thread(process.wait, HANGS_S)
            assert process.exit_code == 0, process.log_tail()
    joined, drained = map(json.loads, audit.read_text().splitlines())
    assert (joined["who"], joined["engine"]) == ("engine", "engine-0")
    assert (drained["who"], drained["what"]) == ("operator", f"POST {path}")
    assert (drained["outcome"], drained["engine_id"], drained["is_wanted"]) == ("ok", 0, True)
