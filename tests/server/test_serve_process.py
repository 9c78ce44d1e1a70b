"""The command `python3 -m parrot.serve.http_server`: its config, its shutdown, its idle CPU
time."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from parrot.server.http_server import main, serve
from parrot.utils.config import ConfigError

MODULE = [sys.executable, "-m", "parrot.serve.http_server"]  # its documented name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def wait_until_wanted(session_url: str) -> None:
    """Wait until the output of the session's only call has a reader."""
    while True:
        _, session = ask(session_url)
        (call,) = session["calls"]
        if call["activated_s"] is not None:
            return
        time.sleep(0.02)


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    process = subprocess.Popen(
        [*MODULE, "--port", str(port), *options], text=True, stderr=subprocess.PIPE
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                ask(f"{url}/health")
                break
            except urllib.error.URLError:
                assert process.poll() is None
                time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_sigterm_answers_open_reads_and_exits_with_0(tmp_path: Path) -> None:
    config = tmp_path / "core.json"
    config.write_text('{"session_life_span": 50}')
    with running("--config_path", str(config), "--log_dir", str(tmp_path / "log")) as (
        process,
        url,
    ):
        _, scope = ask(f"{url}/v1/session", {})
        call = {"template": "x{{y}}", "parameters": [{"name": "y", "is_output": True}]}
        _, made = ask(f"{url}/v1/semantic_call", scope | call)
        query = urllib.parse.urlencode(scope)
        var_url = f"{url}/v1/semantic_var/{made['param_info'][0]['var_id']}?{query}"
        answers: list[tuple[int, Any]] = []
        reader = threading.Thread(target=lambda: answers.append(ask(var_url)))
        reader.start()
        wait_until_wanted(f"{url}/v1/session/{scope['session_id']}?{query}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        reader.join()
        ((status, answer),) = answers
        assert (status, answer["error"]["type"]) == (503, "unavailable")
        assert (tmp_path / "log" / "core_server.log").exists()


@pytest.mark.slow
def test_an_idle_process_uses_next_to_nothing() -> None:
    with running("--release_mode") as (process, url):
        _, scope = ask(f"{url}/v1/session", {})
        assert "session_id" in scope
        time.sleep(0.5)
        before = cpu_seconds(process.pid)
        time.sleep(3)
        assert cpu_seconds(process.pid) - before <= 0.05  # 5 ticks


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ([], '{"prot": 1}', "unknown key `prot`"),
        ([], '{"port": "1"}', "`port`"),
        (["--port", "99999"], "{}", "port"),
    ],
)
def test_a_bad_config_ends_the_start_with_a_message(
    tmp_path: Path, options: list[str], content: str, message: str
) -> None:
    config = tmp_path / "core.json"
    config.write_text(content)
    with pytest.raises(SystemExit) as caught:
        main(["--config_path", str(config), *options])
    assert message in str(caught.value)


async def test_an_open_server_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(server: object) -> None: ...

    monkeypatch.setattr("parrot.server.http_server.AppServer.serve", nothing)
    for host in ("127.0.0.1", "localhost", "::1"):
        await serve(CoreConfig(host=host))
    await serve(CoreConfig(host="0.0.0.0", api_keys=("k" * 16,), cluster_token="t"))
    with pytest.raises(ConfigError, match=r"api_keys\.1: the key has 5 characters"):
        await serve(CoreConfig(host="0.0.0.0", api_keys=("k" * 16, "short"), cluster_token="t"))
    assert not caplog.records
    await serve(CoreConfig(host="0.0.0.0", insecure=True))
    assert "without api_keys" in caplog.text


def test_ids_of_sessions_do_not_count_them_and_the_newest_is_listed_first(tmp_path: Path) -> None:
    config = tmp_path / "core.json"
    journal = str(tmp_path / "journal")
    fields = {"journal": journal, "api_keys": ["k"], "cluster_token": "t"}
    config.write_text(json.dumps(fields))
    ids: list[int] = []
    for _ in range(2):  # The second process restores the sessions of the first.
        with running("--config_path", str(config)) as (_, url):
            for _ in range(4):
                ids.append(ask(f"{url}/v1/session", {"api_key": "k"})[1]["session_id"])
            request = urllib.request.Request(
                f"{url}/v1/sessions?limit=3", headers={"Authorization": "Bearer k"}
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                listed = json.loads(answer.read())["sessions"]
            assert [one["session_id"] for one in listed] == ids[:-4:-1]
            request.full_url += f"&before={listed[-1]['session_id']}"
            with urllib.request.urlopen(request, timeout=20) as answer:
                older = json.loads(answer.read())["sessions"]
            assert [one["session_id"] for one in older] == ids[-4:-7:-1]
    assert len(set(ids)) == len(ids)
    assert all(abs(after - before) > 1000 for before, after in pairwise(ids))
