"""Each server is ended and started again in turn, while a program goes on."""

import asyncio
import threading
from pathlib import Path

from parrot import P
from parrot.cluster import Cluster

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
