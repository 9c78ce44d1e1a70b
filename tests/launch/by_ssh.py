"""Machines that ssh reaches: this one, under two names."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from parrot.cluster.ports import ask, free_port
from tests.deploy.commands import ROOT, environment
from tests.support.warm_servers import WarmServers

KEY, TOKEN = "key-of-the-test-0123456789", "token-of-the-test-0123456789"

# Runs the command here, as sshd would: by a shell. It notes its own arguments first.
FAKE_SSH = """#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
os.execvp("sh", ["sh", "-c", sys.argv[sys.argv.index("--") + 2]])
"""
REAL_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
exec {ssh} -F {folder}/ssh_config "$@"
"""
# Agents have their servers forked from the tests' own process.
SITE = """
from parrot.cluster import process
from tests.support.warm_servers import WarmServers
process.subprocess = WarmServers({address!r}).instead_of_subprocess()
"""
PYTHON = """#!/bin/sh
export PYTHONPATH={site}:{root} XDG_STATE_HOME={state} PATH={bin}:$PATH
exec {python} "$@"
"""


def script(path: Path, text: str, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(**values))
    path.chmod(0o755)
    return path


class Machines:
    """What a test needs of them. `host` goes into each entry of the inventory."""

    def __init__(self, folder: Path, warm: WarmServers, **host: Any) -> None:
        self.folder, self.log = folder, folder / "ssh.log"
        self.state, self.bin = folder / "state", folder / "bin"
        self.host, self.is_fake = host, not host
        taken: set[int] = set()
        self.core_port, self.second_port, self.engine_port = [
            free_port("0.0.0.0", taken) for _ in range(3)
        ]
        while self.engine_port + 1 in taken or ask("127.0.0.1", self.engine_port + 1, "/"):
            self.engine_port = free_port("0.0.0.0", taken)
        self.used_ports: list[int] = []
        script(folder / "site" / "sitecustomize.py", SITE, address=warm.address())
        # Its folder's name has a blank, which a shell would take for the end of a word.
        self.host["python"] = str(
            script(
                folder / "an environment" / "python",
                PYTHON,
                site=folder / "site",
                root=ROOT,
                state=self.state,
                bin=self.bin,
                python=sys.executable,
            )
        )

    def inventory(self, num_engines: int = 2, **engine: Any) -> Path:
        config = {"engine_type": "sim", "port": self.engine_port, "heartbeat_interval": 0.2}
        self.used_ports = [self.core_port, *range(self.engine_port, self.engine_port + num_engines)]
        hosts = [
            {"address": "127.0.0.1", **self.host, "core": self.core(self.core_port)},
            {
                "address": "localhost",
                **self.host,
                "engines": [
                    {"config": {**config, "drain_timeout": 5.0, **engine}, "count": num_engines}
                ],
            },
        ]
        path = self.folder / "lab.json"
        path.write_text(json.dumps({"hosts": hosts}))
        return path

    def core(self, port: int, **config: Any) -> dict[str, Any]:
        return {"port": port, "api_keys": [KEY], "cluster_token": TOKEN, **config}

    def two_shards(self, **engine: Any) -> None:
        """An inventory of two ServeCores, each with an engine beside it: both share the first's,
        and the second has one of its own."""
        config = {"port": self.engine_port, "drain_timeout": 5.0, **engine}
        first, second = (
            self.core(port, journal=str(self.folder / f"{port}.db"))
            for port in (self.core_port, self.second_port)
        )
        own = {**config, "port": self.engine_port + 1}
        self.used_ports = [self.core_port, self.second_port, config["port"], own["port"]]
        hosts = [
            {"address": "127.0.0.1", "core": first, "engines": [{"config": config}]},
            {
                "address": "localhost",
                "core": second,
                "engines": [{"config": own, "serve_core": "localhost"}],
            },
        ]
        described = {"hosts": [{**host, **self.host} for host in hosts]}
        (self.folder / "lab.json").write_text(json.dumps(described))

    def launch(self, *args: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "parrot.cli", "launch", str(self.folder / "lab.json")]
        env = environment({"PATH": f"{self.bin}:{os.environ['PATH']}", "TERM": "dumb"})
        return subprocess.Popen(
            [*command, *args],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def launched(self, *args: str) -> tuple[int, str]:
        """The exit code and the output of a launcher that ends by itself."""
        process = self.launch(*args)
        output = process.communicate(timeout=100)[0]
        return process.returncode, output

    def holder(self, site: str) -> int:
        return int((self.state / "parrot" / "launch" / f"lab@{site}" / "lock").read_text() or 0)

    def answers(self, port: int, path: str = "/health") -> bool:
        answer = ask("127.0.0.1", port, path, token=TOKEN)
        return answer is not None and answer[0] == 200

    def check_nothing_is_left(self) -> None:
        for port in self.used_ports:
            assert ask("127.0.0.1", port, "/health") is None
        left = {path.suffix for path in self.state.rglob("*") if path.is_file()}
        assert left <= {".log", ""}  # "": the lock
        assert not any(path.read_text() for path in self.state.rglob("lock"))

    def check_no_secret_was_shown(self, output: str) -> None:
        shown = self.log.read_text() + output
        shown += "".join(path.read_text() for path in self.state.rglob("*.log"))
        assert TOKEN not in shown
        assert KEY not in shown


class Output:
    """A launcher's output, line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, [""]

    def until(self, *parts: str) -> str:
        """The next line with all of these."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.lines.append(line)
            if all(part in line for part in parts):
                return line
        raise AssertionError(f"no line with {parts} in:\n{''.join(self.lines)}")

    @property
    def text(self) -> str:
        return "".join(self.lines)


def fake_machines(folder: Path, warm: WarmServers) -> Machines:
    machines = Machines(folder, warm)
    script(machines.bin / "ssh", FAKE_SSH, python=sys.executable, log=str(machines.log))
    return machines


@contextmanager
def real_machines(folder: Path, warm: WarmServers) -> Iterator[Machines]:
    """Behind an sshd of their own, with keys of their own."""
    ssh, keygen, sshd = shutil.which("ssh"), shutil.which("ssh-keygen"), "/usr/sbin/sshd"
    if ssh is None or keygen is None or not os.access(sshd, os.X_OK):
        pytest.skip("needs sshd: apt-get install openssh-server")
    for name in ("host_key", "user_key"):
        command = [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    port = free_port("127.0.0.1", set())
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port},[localhost]:{port} {host_key}\n")
    (folder / "ssh_config").write_text(f"UserKnownHostsFile {known}\nAddressFamily inet\n")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it confines who has not shown a key
    machines = Machines(
        folder,
        warm,
        port=port,
        user=pwd.getpwuid(os.getuid()).pw_name,
        identity_file=str(folder / "user_key"),
    )
    script(machines.bin / "ssh", REAL_SSH, log=machines.log, ssh=ssh, folder=folder)
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", f"{folder}/sshd_config"], stderr=log)
    try:
        while not _listens(port):
            assert server.poll() is None, (folder / "sshd.log").read_text()
        yield machines
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
