"""`parrot up`: the planned servers and the output, and one run in a child process."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from parrot.cli.coding_agents import CODING_AGENTS, agent_lines, why_not_all
from parrot.cli.up import UpOptions, plan_engines
from parrot.cluster.ports import ask, free_port
from parrot.engine.config import parse_engine_config
from parrot.protocol.server_config import kept_token
from parrot.utils.config import ConfigError
from parrot.utils.gpus import visible_gpus
from parrot.utils.installation import install_line
from tests.support.command import failed, parrot

ROOT = Path(__file__).parents[2]
ANY = UpOptions(None, None, None, None, None, None, False, Path("logs"), 60.0)


def test_one_engine_with_all_cores_or_one_on_each_gpu() -> None:
    assert plan_engines("embedded", replace(ANY, device="auto"), {}, 0)[0]["device"] == "auto"
    engines = plan_engines("llama-3.1-8b", ANY, {}, 3)
    assert [engine["device"] for engine in engines] == ["cuda:0", "cuda:1", "cuda:2"]
    assert engines[0]["scheduler"]["max_num_batched_tokens"] == 8192
    assert len(plan_engines("org/name", ANY, {}, 1)) == 1
    assert len(plan_engines("org/name", replace(ANY, device="cpu"), {}, 4)) == 1


def test_engines_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    engines = plan_engines("embedded", replace(ANY, engines=2), {"PARROT_ENGINE__PORT": "9001"}, 0)
    assert [engine["instance"] for engine in engines] == [{"num_threads": 4}] * 2
    assert not any("port" in engine for engine in engines)
    parse_engine_config(engines[0], "planned")
    chosen = {"PARROT_ENGINE__INSTANCE__NUM_THREADS": "1"}
    engines = plan_engines("embedded", replace(ANY, engines=2), chosen, 0)
    assert engines[0]["instance"] == {"num_threads": 1}


def test_the_command_line_wins_over_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("engine_type: builtin\nmodel: m\ndtype: float16\ndevice: cuda\n")
    environ = {"PARROT_ENGINE__DTYPE": "bfloat16", "PARROT_ENGINE__DEVICE": "cuda:1"}
    (engine,) = plan_engines(str(config), replace(ANY, dtype="float32"), environ, 0)
    assert (engine["dtype"], engine["device"], engine["model"]) == ("float32", "cuda:1", "m")


def test_folders_and_files_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    gguf = tmp_path / "a.b.gguf"
    gguf.touch()
    for path, name in ((tmp_path, tmp_path.name), (gguf, "a.b")):
        (engine,) = plan_engines(str(path), ANY, {}, 0)
        assert (engine["model"], engine["served_model_name"]) == (str(path), name)
    monkeypatch.chdir(tmp_path)
    assert plan_engines(".", ANY, {}, 0)[0]["served_model_name"] == tmp_path.name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3_9b", "qwen3_9b: no such model. Did you mean qwen3_8b? It may be a sample config "),
        ("FOLDER", "it has no config.json; a model is a folder with config.json"),
        ("FOLDER/a.bin", "neither a .gguf nor a config"),
        ("FOLDER/none.gguf", "no such model"),
        ("FOLDER/none.yaml", "cannot be read: No such file"),
        ("FOLDER/launch.json", "Start a launch file with `parrot launch`"),
        ("./org/name", "no such model"),
    ],
)
def test_the_error_for_an_invalid_model_names_valid_ones(
    tmp_path: Path, model: str, message: str
) -> None:
    (tmp_path / "a.bin").touch()
    (tmp_path / "launch.json").write_text('{"engines": []}')
    with pytest.raises(ConfigError) as raised:
        plan_engines(model.replace("FOLDER", str(tmp_path)), ANY, {}, 0)
    assert message in str(raised.value)


def test_more_engines_than_gpus() -> None:
    with pytest.raises(ConfigError, match="3 engines need a GPU each, but there are only 2"):
        plan_engines("org/name", replace(ANY, engines=3), {}, 2)
    with pytest.raises(ConfigError, match=r"command line: `device`: String should match pattern"):
        plan_engines("org/name", replace(ANY, device="tpu"), {}, 0)


def test_engines_that_divide_a_model_have_several_gpus_each() -> None:
    engines = plan_engines("org/name", replace(ANY, tensor_parallel=2), {}, 5)
    assert [engine["device"] for engine in engines] == ["cuda:0", "cuda:2"]
    assert all(engine["instance"]["tensor_parallel"] == 2 for engine in engines)
    parse_engine_config(engines[0], "planned")
    (engine,) = plan_engines("embedded", replace(ANY, tensor_parallel=3), {}, 0)
    assert engine["instance"]["tensor_parallel"] == 3
    with pytest.raises(ConfigError, match="1 engines need 4 GPUs each, but there are only 2"):
        plan_engines("org/name", replace(ANY, tensor_parallel=4), {}, 2)


def test_only_gpus_that_cuda_shows_are_used() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_lines_for_clients_survive_the_shell() -> None:
    lines = agent_lines("http://localhost:9000", "my model", "any", None)
    assert "OPENAI_MODEL=my model" in shlex.split(lines["Qwen Code"])
    words = shlex.split(lines["Codex"])
    assert words[-2:] == ["-m", "my model"]
    provider = tomllib.loads(words[words.index("-m") - 1])["model_providers"]["parrot"]
    assert provider["base_url"] == "http://localhost:9000/v1"
    assert "ANTHROPIC_MODEL=my model" in shlex.split(lines["Claude Code"])
    config = shlex.split(lines["OpenCode"])[0].removeprefix("OPENCODE_CONFIG_CONTENT=")
    assert json.loads(config)["model"] == "parrot/my model"


@pytest.mark.parametrize(
    ("context", "names"),
    [
        (8192, []),
        (10_400, ["OpenCode"]),
        (16_384, ["Qwen Code", "Codex", "OpenCode"]),
        (32_768, [agent.name for agent in CODING_AGENTS]),
        (None, [agent.name for agent in CODING_AGENTS]),
    ],
)
def test_agents_have_a_line_if_the_context_is_long_enough(
    context: int | None, names: list[str]
) -> None:
    assert list(agent_lines("http://localhost:9000", "m", "any", context)) == names
    reason = why_not_all("m", context)
    assert (reason is None) == (len(names) == len(CODING_AGENTS))
    if context == 16_384:
        assert reason == "The context of m, 16,384 tokens, is too short for Claude Code (25,500)."


def test_missing_packages_are_an_error_before_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    program = tmp_path / "program.py"
    program.touch()
    port = free_port("127.0.0.1", set())
    for args in (
        ["up", "embedded", "--port", str(port), "--log_dir", str(tmp_path / "logs")],
        ["run", "--core", f"localhost:{port}", "--embedded", str(program)],
        ["demo", "--output_dir", str(tmp_path / "demo")],
    ):
        said = failed(*args)
        assert said.startswith("error: embedded cannot run here: torch is not installed; ")
        assert said.endswith(install_line("engine"))
    assert not (tmp_path / "logs").exists()


def test_up_serves_until_it_is_stopped(tmp_path: Path) -> None:
    port = free_port("127.0.0.1", set())
    config = tmp_path / "engine.yaml"
    config.write_text(
        "engine_type: sim\nmodel: simulated\ninstance: {step_s: 0.001, max_seq_len: 12000}\n"
    )
    command = [sys.executable, "-m", "parrot.cli", "up", str(config), "--engines", "2"]
    env = {**os.environ, "PARROT_CORE__PORT": str(port), "PARROT_ENGINE__PORT": "9001"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if "Ctrl-C" in line:
                    break
            _, ready = ask("127.0.0.1", port, "/ready", token=kept_token(None)) or (
                None,
                {"engines": []},
            )
            engines = [engine["model"] for engine in ready["engines"]]
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert engines == ["simulated"] * 2, errors
    assert f"Ready: simulated on 2 engines at http://127.0.0.1:{port}" in said
    assert re.search(rf"http://127.0.0.1:{port}/ui/#key=\w{{32}}\n", said)
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in said
    assert "codex -c" in said
    assert "is too short for Claude Code (25,500), Qwen Code (13,300). A model that works: " in said
    assert "ANTHROPIC" not in said
    assert f"Logs are in {tmp_path / 'logs' / str(port)}." in said
    assert (tmp_path / "logs" / str(port) / "engine-1.log").is_file()
    assert process.returncode == 128 + signal.SIGINT
    assert ask("127.0.0.1", port, "/health") is None


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = parrot("up", "sim", "--port", str(port), "--log_dir", str(tmp_path))
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    assert "choose another port with --port" in result.stderr


def test_a_single_server_reports_that_its_port_is_taken() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = parrot("serve", "--host", "127.0.0.1", "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_config_show(tmp_path: Path) -> None:
    path = tmp_path / "core.yaml"
    path.write_text(
        "page: false\ncluster_token: secret-token\nport: 1\njournal: postgresql://me:pass@h/j\n"
    )
    result = parrot("config", "show", str(path), "--port", "9300", PARROT_CORE__MAX_ENGINES_NUM="4")
    assert result.returncode == 0, result.stderr
    for key, value, origin in (
        ("page", "false", "core.yaml"),
        ("port", "9300", "command line"),
        ("max_engines_num", "4", "PARROT_CORE__MAX_ENGINES_NUM"),
        ("journal", r'"postgresql://me:\*\*\*@h/j"', "core.yaml"),
        ("global_scheduler.policy", '"critical_path"', "default"),
    ):
        assert re.search(rf"{key} +│ {value} +│ .*{origin}", result.stdout), key
    assert "secret-token" not in result.stdout
    short = parrot("config", "show", str(path), "--only_set").stdout
    assert "critical_path" not in short
    both = parrot("config", "show").stdout
    assert "ServeCore" in both
    assert "an engine, builtin" in both
    wrong = parrot("config", "show", PARROT_ENGINE__PROT="1")
    assert wrong.returncode == 1
    assert "PARROT_ENGINE__PROT: unknown key `prot`. Did you mean `port`?" in wrong.stderr
    launch = tmp_path / "launch.json"
    launch.write_text('{"engines": []}')
    assert "give one of its configs instead" in parrot("config", "show", str(launch)).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["up"], "Missing argument"),
        (["up", "sim", "--engines", "0"], "greater than or equal to 1"),
        (["up", "sim", "--port", "99999"], "less than or equal to 65535"),
        (["up", "sim", "--core_config", "none.yaml"], "none.yaml: cannot be read"),
        (["up", "sim", "--host", "0.0.0.0", "--port", "0"], "(--insecure)"),
        (["up", "sim", "--host", "none.invalid"], "`host` must be a name or an address of this"),
        (["up", "sim", "--log_dir", "/proc/none", "--port", "0"], "(--log-dir)"),
        (["launch", "none.json"], "none.json: cannot be read"),
        (["config", "show", "none.json"], "none.json: cannot be read"),
        (["config", "shows"], "Did you mean 'show'?"),
        (["serve", "--config_path", "none.json"], "none.json: cannot be read"),
        (["engine", "--config_path", "none.json"], "none.json: cannot be read"),
        (["ping", "--core", "localhost:1"], "parrot up"),
        (["page", "--core", "localhost:1"], "parrot up"),
        (["simulate", "none"], "none: cannot be read"),
        (["trace", "--file", "/etc/hostname"], "what ServeCore writes to its `trace_path`"),
        (["tpo"], "Did you mean 'top'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_for_wrong_inputs_give_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = parrot(*args)
    said = " ".join(re.sub("[│╭╰─╮╯]", " ", result.stdout + result.stderr).split())
    assert result.returncode in (1, 2), said
    assert message in said
    assert "Traceback" not in said
