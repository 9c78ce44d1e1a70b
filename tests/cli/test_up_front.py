"""`parrot up URL`: its errors about servers that cannot be used, and calls through a server."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parrot.cli.front import planned_servers
from parrot.utils.config import ConfigError
from tests.support.app_server import running_in_thread
from tests.support.command import failed
from tests.support.fake_openai import FakeOpenAI


def test_the_address_of_the_api_is_found() -> None:
    with running_in_thread(FakeOpenAI().app()) as url:
        for given in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
            (server,) = planned_servers([given], None, None)
            assert server["url"] == f"{url}/v1"


def test_files_are_named_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("k")
    monkeypatch.chdir(tmp_path)
    with running_in_thread(FakeOpenAI().app()) as url:
        (server,) = planned_servers([url], Path("key"), None)
    assert server["engine"]["instance"] == {"api_key_file": str(tmp_path / "key")}


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeOpenAI(models=()), "the server lists no model"),
        (FakeOpenAI(models_status=401), "Set OPENAI_API_KEY, or name a file with --api-key-file"),
        (FakeOpenAI(models_status=404), "HTTP 404"),
        (FakeOpenAI(models_status=500), "HTTP 500"),
        (FakeOpenAI(models_status=307), "redirects to"),
    ],
)
def test_a_server_that_cannot_be_used(fake: FakeOpenAI, message: str) -> None:
    with running_in_thread(fake.app()) as url:
        with pytest.raises(ConfigError) as raised:
            planned_servers([url + "/v1"], None, None)
        assert message in str(raised.value)
        assert url in str(raised.value)


def test_a_missing_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    message = failed("up", f"http://127.0.0.1:{port}")
    assert f"no answer from http://127.0.0.1:{port}" in message
    assert "Is the server running?" in message


def test_urls_and_models_do_not_mix() -> None:
    assert "`parrot up` takes one model, or URLs of servers" in failed("up", "sim", "http://h")
    with running_in_thread(FakeOpenAI().app()) as url:
        assert "sim is not a URL" in failed("up", url, "sim")


@contextmanager
def up(*urls: str, log_dir: Path, printed: list[str] | None = None) -> Iterator[str]:
    """Run the command in a separate process. Yields the URL that it prints. Its output is appended
    to `printed`."""
    command = [sys.executable, "-m", "parrot.cli", "up", *urls, "--port", "0"]
    with subprocess.Popen(
        [*command, "--log-dir", str(log_dir)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            while not lines or (lines[-1] and not lines[-1].startswith("Logs are in")):
                lines.append(process.stdout.readline())
            text = "".join(lines)
            if printed is not None:
                printed.append(text)
            found = re.search(r"Ready: gpt-fake at (http://\S+)", text)
            assert found is not None, text
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def test_clients_call_the_server_through_parrot(tmp_path: Path) -> None:
    first, second = FakeOpenAI(owned_by="vllm"), FakeOpenAI(owned_by="vllm")
    printed: list[str] = []
    with (
        running_in_thread(first.app()) as one,
        running_in_thread(second.app()) as two,
        up(one, two, log_dir=tmp_path, printed=printed) as url,
    ):
        body = {"model": "gpt-fake", "messages": [{"role": "user", "content": "x"}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"] == "one two three"
        assert len(first.bodies + second.bodies) == 1
    assert_printed(printed[0], "not reported by its server", has_agent=True)


def test_the_context_length_is_printed_if_known(tmp_path: Path) -> None:
    printed: list[str] = []
    with (
        running_in_thread(FakeOpenAI(max_model_len=4000).app()) as server,
        up(server, log_dir=tmp_path, printed=printed),
    ):
        pass
    assert_printed(printed[0], "4,000 tokens", has_agent=False)


def assert_printed(text: str, context: str, *, has_agent: bool) -> None:
    assert f"Context of gpt-fake: {context}. Prompt lengths are estimates." in text
    assert ("ANTHROPIC_BASE_URL" in text) == has_agent
    assert "parrot up Qwen" not in text
