"""The `parrot` command in a child process: its output, its errors and its exit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parrot.cli.app import app
from parrot.cluster.ports import free_port
from parrot.gateway.page.visitors import page_key
from parrot.protocol.server_config import kept_token
from tests.support.command import parrot

READY = {
    "num_queued": 3,
    "engines": [
        {
            "engine_id": 0,
            "engine_name": "first",
            "engine_type": "sim",
            "model": "m",
            "host": "localhost",
            "port": 9001,
        }
    ],
}


class CoreHandler(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, object]]

    def do_GET(self) -> None:
        self.credentials.add(self.headers["Authorization"])
        status, payload = self.answers.get(self.path, (404, {"error": {}}))
        raw = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def core() -> Iterator[ThreadingHTTPServer]:
    class Handler(CoreHandler):
        answers = {"/health": (200, {}), "/ready": (200, READY)}  # noqa: RUF012
        credentials = set()  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def unused_address() -> str:
    return f"http://127.0.0.1:{free_port('127.0.0.1', set())}"


def test_help_lists_the_commands_and_loads_little() -> None:
    program = "import sys; from parrot.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True
    )
    for command in ("serve", "engine", "up", "launch", "run", "chat", "top", "trace", "doctor"):
        assert f" {command} " in result.stdout
    loaded = set(result.stdout.split())
    assert not loaded & {"torch", "transformers", "fastapi", "aiohttp", "matplotlib", "pydantic"}


@pytest.mark.parametrize(
    "command", ["up", "launch", "run", "ping", "demo", "chat", "top", "trace", "doctor", "config"]
)
def test_each_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output


def test_ping_shows_engines_if_the_config_is_given(
    core: ThreadingHTTPServer, tmp_path: Path
) -> None:
    config = tmp_path / "core.json"
    config.write_text('{"cluster_token": "secret"}')
    result = parrot("ping", "--core", url(core), "--config_path", str(config))
    assert result.returncode == 0, result.stderr
    assert "3 queued" in result.stdout
    assert "first" in result.stdout
    assert "Bearer secret" in core.RequestHandlerClass.credentials


def test_ping_sends_no_token_by_default_and_shows_the_models(core: ThreadingHTTPServer) -> None:
    handler = core.RequestHandlerClass
    handler.answers["/ready"] = (200, {"num_queued": None, "engines": None})
    result = parrot("ping", "--core", url(core))
    assert result.returncode == 0, result.stderr
    assert "engines are registered\n`parrot top` shows the engines" in result.stdout
    sampling = {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0}
    card = {"id": "embedded", "created": 0, "default_sampling": sampling}
    names = {"model_name": "embedded", "tokenizer_name": "embedded"}
    handler.answers["/v1/models"] = (200, {"data": [card], "models": [names]})
    shown = parrot("ping", "--core", url(core)).stdout
    assert "it serves embedded\nDefault sampling of embedded: temperature 0.2, top_p 0.9\n" in shown
    assert handler.credentials == {None}


def test_page_prints_an_address_that_lets_its_user_in(core: ThreadingHTTPServer) -> None:
    result = parrot("page", "--core", url(core))
    token = kept_token(None)
    assert result.stdout == f"{url(core)}/ui/#key={page_key(token)}\n"
    missing = parrot("page", "--core", unused_address())
    assert missing.returncode == 1
    assert "parrot up" in missing.stderr


def test_ping_without_engines_or_core(core: ThreadingHTTPServer) -> None:
    core.RequestHandlerClass.answers["/ready"] = (503, {"error": {"type": "no_engine"}})
    result = parrot("ping", "--core", url(core))
    assert result.returncode == 1
    assert "no engine is registered" in result.stdout
    core.RequestHandlerClass.answers["/ready"] = (200, {"hello": "world"})
    result = parrot("ping", "--core", url(core))
    assert result.returncode == 1
    assert "is not a ServeCore" in result.stderr
    address = unused_address()
    result = parrot("ping", "--core", address)
    assert result.returncode == 1
    assert f"no ServeCore answers at {address}" in result.stderr


@pytest.mark.parametrize("address", ["ftp://x", "http://:80", "http://localhost:notaport"])
def test_a_wrong_address_is_reported(address: str) -> None:
    result = parrot("ping", "--core", address)
    assert result.returncode == 1
    assert f"not an http address: {address}" in result.stderr


def test_run_passes_arguments_and_the_exit_code_on(
    core: ThreadingHTTPServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(os.environ['PARROT_URL'], sys.argv[1:]); sys.exit(7)")
    result = parrot("run", "--core", url(core), str(program), "a", "--core", "-x")
    assert result.returncode == 7
    assert capfd.readouterr().out == f"{url(core)} ['a', '--core', '-x']\n"


def test_run_without_a_core_or_a_program(tmp_path: Path) -> None:
    result = parrot("run", str(tmp_path / "none.py"))
    assert result.returncode == 1
    assert "no such file" in result.stderr
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(5)")
    result = parrot("run", "--core", unused_address(), str(program))
    assert result.returncode == 1
    assert "--embedded starts one" in result.stderr


def test_launch_names_errors(tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_text('{"engine_type": "sim", "hots": "x"}')
    result = parrot("launch", str(config))
    assert result.returncode == 1
    assert "engine.json: unknown key `hots`. Did you mean `host`? (all keys: " in result.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("options", [[], ["--ray"], ["--stop"]])
def test_an_inventory_of_machines_is_rejected(tmp_path: Path, options: list[str]) -> None:
    """The launcher by ssh was removed. The message names the page with the alternatives."""
    inventory = tmp_path / "lab.yaml"
    inventory.write_text("hosts: [{address: 10.0.0.1, core: {}}]")
    result = parrot("launch", *options, str(inventory))
    assert result.returncode == 2
    assert "docs/deployment.md" in result.stderr


def test_demo_checks_its_file_first(tmp_path: Path) -> None:
    result = parrot("demo", str(tmp_path / "none.txt"), "--output_dir", str(tmp_path / "out"))
    assert result.returncode == 1
    assert "none.txt: No such file or directory" in result.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_run_the_clean_up_to_its_end(signum: signal.Signals) -> None:
    program = textwrap.dedent(
        """
        import queue, time
        from parrot.cli.console import orderly_exit
        with orderly_exit():
            try:
                print("up", flush=True)
                queue.SimpleQueue().get()
            finally:
                print("cleaning", flush=True)
                time.sleep(0.3)
                print("clean", flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signum)
        assert process.stdout.readline() == "cleaning\n"
        os.kill(process.pid, signal.SIGINT)  # A second Ctrl-C.
        assert process.stdout.readline() == "clean\n"
    assert process.returncode == 128 + signum


def test_a_second_interrupt_hurries_the_clean_up_and_a_third_changes_nothing() -> None:
    program = textwrap.dedent(
        """
        import queue
        from parrot.cli.console import orderly_exit
        hurried = queue.SimpleQueue()
        with orderly_exit(lambda: hurried.put("hurried")):
            try:
                print("up", flush=True)
                queue.SimpleQueue().get()
            finally:
                print("cleaning", flush=True)
                print(hurried.get(), flush=True)
                input()
                print(hurried.qsize(), flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line, signum in (
            ("up\n", signal.SIGTERM),
            ("cleaning\n", signal.SIGINT),
            ("hurried\n", signal.SIGINT),
        ):
            assert process.stdout.readline() == line
            process.send_signal(signum)
        assert process.communicate("\n")[0] == "0\n"
    assert process.returncode == 128 + signal.SIGTERM
