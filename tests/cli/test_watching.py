"""`parrot chat`, `top`, `trace` and `doctor` against real servers with simulated engines."""

import io
import json
import os
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parrot.cli.page_feed import PageFeed
from parrot.cli.top import screen
from parrot.cli.word_wrap import WordWrap
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from tests.support.command import failed, parrot

SIM = {"engine_type": "sim", "model": "simulated", "instance": {"step_s": 0.001}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(engines=[SIM]) as cluster:
        yield cluster


def post(url: str, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def run_chain(url: str) -> dict[str, Any]:
    """Run a session with the outputs `joke` and `why`. Returns its scope."""
    scope: dict[str, Any] = post(url, "/v1/session", {"apps": ["jokes"]})
    var_id = None
    for template, output in (("Tell: {{joke}}", "joke"), ("{{joke}} since {{why}}", "why")):
        given = [] if var_id is None else [{"name": "joke", "var_id": var_id}]
        sampling = {"max_gen_length": 5, "ignore_tokenizer_eos": True}
        made = {"name": output, "is_output": True, "sampling_config": sampling}
        body = scope | {"template": template, "func_name": f"f_{output}"}
        answer = post(url, "/v1/semantic_call", body | {"parameters": [*given, made]})
        var_id = answer["param_info"][-1]["var_id"]
    query = f"session_id={scope['session_id']}&session_auth={scope['session_auth']}"
    with urllib.request.urlopen(f"{url}/v1/semantic_var/{var_id}?{query}", timeout=30) as answer:
        answer.read()
    return scope


def delete(url: str, scope: dict[str, Any]) -> None:
    """End the session, as a program does at its end."""
    headers = {"Authorization": f"Bearer {scope['session_auth']}"}
    path = f"{url}/v1/session/{scope['session_id']}"
    request = urllib.request.Request(path, method="DELETE", headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


def test_a_question_and_a_conversation(cluster: Cluster) -> None:
    core = ("--core", cluster.core_url, "--max-tokens", "4")
    one = parrot("chat", *core, "hello")
    assert one.returncode == 0, one.stderr
    assert one.stdout.endswith("\n")
    assert "(The answer reached its maximum length. --max-tokens is 4.)" in one.stderr
    many = parrot("chat", *core, "--system", "Be brief.", stdin="a\n\nb\n/new\nc\n/exit\nd\n")
    assert many.returncode == 0, many.stderr
    rows = PageFeed(cluster.core_url, None, None).now("overview").values()
    chats = [row for row in rows if row.get("kind") == "API"]
    assert {row["app"] for row in chats} == {"parrot"}
    assert {"hello", "b", "c"} <= {row["words"] for row in chats}
    listing = parrot("trace", "last", "--core", cluster.core_url, "--output_dir", os.devnull)
    assert listing.returncode == 1
    assert "--output-dir names another folder" in listing.stderr


def test_top_prints_calls_and_engines(cluster: Cluster) -> None:
    scope = run_chain(cluster.core_url)
    delete(cluster.core_url, scope)
    result = parrot("top", "--core", cluster.core_url)
    assert result.returncode == 0, result.stderr
    assert "finished: 1" in result.stdout
    assert "engines: 1" in result.stdout
    assert "simulated" in result.stdout
    assert "jokes" in result.stdout


def test_top_shows_tenants_no_loads_of_engines() -> None:
    engine = {"engine_name": "e0", "model": "m", "is_draining": False}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen({"engine:0": engine}, None))
    (line,) = [line for line in console.export_text().splitlines() if "e0" in line]
    assert line.split() == ["e0", "serving", "m"]


def test_q_leaves_top_and_all_columns_fit(cluster: Cluster) -> None:
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "parrot.cli", "top", "--core", cluster.core_url]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    shown = b""
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, env=environ) as process:
        while b"output" not in shown:  # The last column.
            shown += os.read(controller, 4096)
        os.write(controller, b"q")
        assert process.wait(30) == 0
    os.close(terminal)
    os.close(controller)
    for head in (b"application", b"failed", b"prompt", b"cached"):
        assert head in shown


def test_top_shows_which_engines_drain(cluster: Cluster) -> None:
    feed = PageFeed(cluster.core_url, None, None)
    (engine,) = (row for key, row in feed.now("overview").items() if key.startswith("engine:"))
    path = f"/ui/api/engines/{engine['engine_id']}/drain"
    for is_wanted, state in ((True, "drained"), (False, "serving")):
        feed._server.ask("POST", path, {"is_wanted": is_wanted})
        shown = parrot("top", "--once", "--core", cluster.core_url)
        assert state in shown.stdout, shown.stdout + shown.stderr


def test_requests_use_the_served_model_name() -> None:
    with Cluster(engines=[SIM | {"served_model_name": "short"}]) as cluster:
        core = ("--core", cluster.core_url)
        assert "--model may be short" in failed("chat", "x", "--model", "simulated", *core)
        # The older spelling of the option.
        assert parrot("chat", "x", "--max_tokens", "2", *core).returncode == 0
        assert "short" in parrot("ping", *core).stdout


def test_a_live_session_a_finished_and_a_recorded_one_give_the_same_graph(tmp_path: Path) -> None:
    file, live_dir, recorded_dir = tmp_path / "trace.jsonl", tmp_path / "live", tmp_path / "rec"
    kept_dir = tmp_path / "kept"
    with Cluster({"trace_path": str(file)}, [SIM]) as cluster:
        url = cluster.core_url
        scope = run_chain(url)
        name = str(scope["session_id"])
        assert name in parrot("trace", "--core", url).stdout
        live = parrot("trace", name, "--core", url, "--output_dir", str(live_dir))
        assert live.returncode == 0, live.stderr
        delete(url, scope)
        listed = parrot("trace", "--core", url).stdout
        assert "finished" in listed.partition(name)[2].splitlines()[0]
        kept = parrot("trace", "last", "--core", url, "--output_dir", str(kept_dir))
        assert kept.returncode == 0, kept.stderr
    assert "f_joke" in live.stdout
    assert (live_dir / f"session_{name}.svg").exists()
    recorded = parrot("trace", "last", "--file", str(file), "--output_dir", str(recorded_dir))
    assert recorded.returncode == 0, recorded.stderr

    def shape(folder: Path) -> list[tuple[str, str]]:
        events = json.loads((folder / f"session_{name}.trace.json").read_text())["traceEvents"]
        return [(event["ph"], event["name"]) for event in events]

    names = [name for _, name in shape(live_dir)]
    assert [n for n in names if n.startswith("f_")] == ["f_joke → joke", "f_why → why"]
    assert names.count("joke") == 2  # An arrow.
    assert shape(recorded_dir) == shape(kept_dir) == shape(live_dir)
    assert name in parrot("trace", "--file", str(file)).stdout


def test_errors_for_wrong_inputs_say_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    core = ("--core", cluster.core_url)
    nobody = ("--core", f"http://127.0.0.1:{free_port('127.0.0.1', set())}")
    assert "--model may be simulated" in failed("chat", "x", "--model", "m", *core)
    for command in (("chat", "x"), ("top",), ("trace",)):
        said = failed(*command, *nobody)
        assert "Cannot connect to" in said
        assert "`parrot up" in said
    other = tmp_path / "core.json"
    other.write_text('{"cluster_token": "another"}')
    for command in ("top", "trace"):
        said = failed(command, *core, "--config_path", str(other))
        assert "give ServeCore's config file (--config-path) or an API key" in said
        assert "cannot be read" in failed(command, *core, "--config_path", str(tmp_path / "no"))
    assert "there is no run 12, or it was not kept" in failed("trace", "12", *core)
    assert "cannot be read" in failed("trace", "--file", str(tmp_path / "none"))
    assert "not an http address" in failed("top", "--core", "ftp://x")


def test_missing_keys_are_reported_and_given_keys_are_used(tmp_path: Path) -> None:
    with Cluster({"api_keys": ["k1"], "cluster_token": "t"}, [SIM]) as cluster:
        core = ("--core", cluster.core_url)
        assert "--api-key, or PARROT_KEY" in failed("chat", "x", *core)
        assert parrot("chat", "x", *core, "--max_tokens", "2", PARROT_KEY="k1").returncode == 0
        assert parrot("top", *core, "--api_key", "k1").returncode == 0
        assert "--api-key" in failed("top", *core, "--api_key", "k2")
        operator = parrot("trace", *core, PARROT_CORE__CLUSTER_TOKEN="t")
        assert "`parrot trace SESSION`" in operator.stdout, operator.stderr


@contextmanager
def scripted(
    *chunks: str, model: str = "m", asked: list[dict[str, Any]] | None = None
) -> Iterator[str]:
    """Run a server with OpenAI's API that answers with these lines. `asked` records the
    requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps({"data": [{"id": model}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked is not None:
                asked.append(body)
            self.answer("".join(f"data: {chunk}\n\n" for chunk in chunks).encode())

        def answer(self, raw: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def said(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_an_answer_cannot_contain_control_sequences() -> None:
    with scripted(said("a\x1b[2J\x9bb\n"), said("ü\tc"), '{"choices": []}', "[DONE]") as url:
        result = parrot("chat", "x", "--core", url)
    assert result.stdout == "a[2Jb\nü\tc\n"


def test_an_answer_has_a_maximum_length() -> None:
    asked: list[dict[str, Any]] = []
    with scripted(said("a"), "[DONE]", asked=asked) as url:
        result = parrot("chat", "x", "--core", url)
    assert asked[0]["max_tokens"] == 1024
    assert "temperature" not in asked[0]  # The server's default applies.
    assert result.stderr == ""


def test_commands_are_not_sent_to_the_model() -> None:
    asked: list[dict[str, Any]] = []
    with scripted(said("a"), "[DONE]", asked=asked) as url:
        result = parrot("chat", "--core", url, stdin="/help\n/x\n/etc/hosts is a file?\n")
    assert [body["messages"][-1]["content"] for body in asked] == ["/etc/hosts is a file?"]
    for command in ("/new", "/help", "/exit", "Ctrl-C"):
        assert command in result.stdout
    assert "Unknown command /x. /help lists the commands." in result.stderr


def test_the_included_model_is_introduced_once() -> None:
    with scripted(said("a"), "[DONE]", model="embedded") as url:
        result = parrot("chat", "--core", url, stdin="x\ny\n")
    assert result.stderr.count("a toy with 135M parameters") == 1
    assert "parrot up Qwen/Qwen3-0.6B" in result.stderr
    assert result.stdout == "a\na\n"


def test_a_terminal_receives_complete_words() -> None:
    controller, terminal = os.openpty()
    chunks = [said("Whether "), said("it's a lo"), said("ng li"), said("ne\nor a word."), "[DONE]"]
    with scripted(*chunks) as url, os.fdopen(terminal, "w") as screen:
        command = [sys.executable, "-m", "parrot.cli", "chat", "x", "--core", url]
        environ = {**os.environ, "COLUMNS": "12"}
        subprocess.run(command, stdout=screen, env=environ, check=True, timeout=60)
        shown = os.read(controller, 1000).decode().replace("\r\n", "\n")
    os.close(controller)
    assert shown == "Whether it's\na long line\nor a word.\n"


@pytest.mark.parametrize(
    ("width", "text", "lines"),
    [
        (10, "one two three", ["one two", "three"]),
        (10, "one two ten", ["one two", "ten"]),
        (7, "one two", ["one two"]),
        (5, "abcdefgh ij", ["abcdefgh", "ij"]),
        (10, "    x = 1\n\n  y", ["    x = 1", "", "  y"]),
        (6, "日本語の文", ["日本語の文"]),
    ],
)
def test_lines_break_at_words(width: int, text: str, lines: list[str]) -> None:
    wrap = WordWrap(width)
    shown = "".join(map(wrap.feed, text)) + wrap.end()
    assert shown.split("\n") == lines


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([said("a")], "the answer broke off; send the message again"),
        ([said("a"), '{"error": {"message": "the engine is gone"}}'], "the engine is gone"),
        (["{"], "the answer is not in OpenAI's format"),
        (["[]"], "the answer is not in OpenAI's format"),
    ],
)
def test_an_answer_that_fails(chunks: list[str], message: str) -> None:
    with scripted(*chunks) as url:
        assert message in failed("chat", "x", "--core", url)
        assert message in failed("chat", "--core", url, stdin="x\n")


def test_another_server_has_no_page() -> None:
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        said = failed("top", "--core", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()
    assert "without its page" in said
