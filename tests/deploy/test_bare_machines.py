"""The commands of the systemd units and of the Slurm script work."""

import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

from parrot.cluster.ports import free_port
from parrot.engine.config import engine_settings, parse_engine_config
from tests.deploy.commands import DEPLOY, PARROT, ROOT, SIM, environment, running, wait_for
from tests.support import programs

FIRST_PORT = 9001
TOKEN = "secret-of-the-cluster"


def unit(name: str, instance: str = "") -> dict[str, list[str]]:
    """Return the service settings of a unit, with its specifiers replaced."""
    text = (DEPLOY / "systemd" / name).read_text().partition("[Service]")[2]
    text = text.replace("%i", instance).replace("%H", socket.gethostname())
    settings: dict[str, list[str]] = {}
    for line in text.partition("\n[")[0].splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def command_of(settings: dict[str, list[str]], folder: Path) -> list[str]:
    """Parse the command line like systemd, and replace its paths by paths in `folder`."""
    (line,) = settings["ExecStart"]
    line = line.replace("/opt/parrot/bin/parrot", shlex.join(PARROT))
    return shlex.split(line.replace("$$", "$").replace("/etc/parrot", str(folder)))


def seconds(settings: dict[str, list[str]]) -> float:
    return float(settings["TimeoutStopSec"][0])


def test_the_units_run_servecore_and_an_engine(tmp_path: Path) -> None:
    port = free_port("127.0.0.1", set())
    engine_port = free_port("127.0.0.1", {port})
    gpu = str(engine_port - FIRST_PORT)
    core, engine = unit("parrot-core.service"), unit("parrot-engine@.service", gpu)
    (tmp_path / "core.yaml").write_text(f"port: {port}\njournal: {tmp_path}/journal.db\n")
    (tmp_path / "engine.yaml").write_text("drain_timeout: 120\nhost: 127.0.0.1\n")
    core_env = {"PARROT_CORE__CLUSTER_TOKEN": TOKEN}
    engine_env = {"PARROT_ENGINE__CLUSTER_TOKEN": TOKEN} | SIM
    engine_env["PARROT_ENGINE__SERVE_CORE__PORT"] = str(port)
    assert engine["Environment"][0] == f"CUDA_VISIBLE_DEVICES={gpu}"
    settings = engine_settings(tmp_path / "engine.yaml", {}, engine_env)
    assert seconds(engine) > parse_engine_config(settings.payload, settings.blamed).drain_timeout
    with running(command_of(core, tmp_path), core_env, tmp_path / "core.log"):
        wait_for(port, "/health", tmp_path / "core.log")
        with running(command_of(engine, tmp_path), engine_env, tmp_path / "engine.log"):
            wait_for(engine_port, "/ready", tmp_path / "engine.log")
            wait_for(port, "/ready", tmp_path / "core.log")
    log = (tmp_path / "engine.log").read_text()
    assert f"{socket.gethostname()}-{gpu} is ready on 127.0.0.1:{engine_port}" in log


def test_the_units_restart_without_a_limit() -> None:
    """By default, systemd gives up after 5 starts within 10 s."""
    for name in ("parrot-core.service", "parrot-engine@.service"):
        text = (DEPLOY / "systemd" / name).read_text()
        assert "StartLimitIntervalSec=0\n" in text.partition("[Service]")[0]
        assert unit(name)["Restart"] == ["always"]


SRUN = """#!/usr/bin/env bash
exec "$@"
"""
PROGRAM = '''
import os
from parrot import P

@P.semantic_function()
def greet(name: P.Input, words: P.Output(P.SamplingConfig(max_gen_length=5))):
    """Greet {{name}}: {{words}}"""

vm = P.VirtualMachine(os.environ["PARROT_URL"], api_key=os.environ["PARROT_KEY"])
vm.run(lambda: print("answered:", greet("the job").get()))
'''


def test_the_job_of_slurm_runs_a_program_and_ends_with_it(tmp_path: Path) -> None:
    """Run the job on one node with two GPUs."""
    script = DEPLOY / "slurm" / "parrot.sbatch"
    assert re.search(r"^#SBATCH --ntasks-per-node=1$", script.read_text(), re.MULTILINE)
    programs.program("hostname", "hostname")
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = free_port("127.0.0.1", set())
    env = environment(
        {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PARROT": shlex.join(PARROT),
            "PORT": str(port),
            "ENGINE_PORT": str(free_port("127.0.0.1", {port})),
            "SLURM_GPUS_ON_NODE": "2",
            "RUN": shlex.join([PARROT[0], str(program)]),
        }
        | {"PARROT_ENGINE__ENGINE_TYPE": "sim", "PARROT_ENGINE__HEARTBEAT_INTERVAL": "0.2"}
    )
    done = subprocess.run(
        ["bash", str(script), "some/model"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "answered: " in done.stdout
    for gpu in range(2):
        assert f"{socket.gethostname()}-{gpu} is ready" in done.stderr
