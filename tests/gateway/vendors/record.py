"""Record the requests of vendors' clients: python -m tests.gateway.vendors.record VENVS [CLIENT...]

`VENVS` is a folder with a virtual environment for each client of `SCRIPTS` and `HARNESSES`, and a
folder `npm` with the agents of `AGENTS`. Each client runs against a ServeCore with scripted
answers. Its requests are written to `transcripts/CLIENT.json`, with its version and the features
that worked. `test_transcripts.py` replays them. With `--url URL --model MODEL --key KEY`, the
scripts run against another server, and nothing is written."""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from parrot.server.app import create_app
from tests.gateway.vendors.harnesses import HARNESSES, Harness, tokenizer_folder
from tests.gateway.vendors.scripted import KEY, MAX_TEXT, MODEL, scripted_core
from tests.gateway.vendors.transcripts import Json, Recorder
from tests.support.app_server import serve_app

HERE = Path(__file__).parent
AGENT_MAX_TEXT = 10**8
TURNS = {  # Questions for agents, and a text that each answer must contain.
    "chat": ("What is the capital of France?", "Paris"),
    "tools": ("Run the command: echo hi", "The tool said: "),
}


class Script(NamedTuple):
    """A script in `clients`, and its virtual environment."""

    venv: str
    name: str


class Agent(NamedTuple):
    """A program from npm that takes the question as its last argument. `{url}`, `{model}` and
    `{key}` may be used in the arguments, the environment and the files of its folder."""

    package: str
    command: list[str]
    env: dict[str, str]
    files: dict[str, Any] = {}  # noqa: RUF012 - never modified


SCRIPTS = {
    "openai2": Script("openai2", "openai_client.py"),
    "openai3": Script("openai3", "openai_client.py"),
    "anthropic": Script("openai3", "anthropic_client.py"),
    "langchain": Script("langchain", "langchain_client.py"),
    "pydantic_ai": Script("pydanticai", "pydantic_ai_client.py"),
    "openai_agents": Script("agents", "openai_agents_client.py"),
    "llama_index": Script("llamaindex", "llama_index_client.py"),
    "dspy": Script("dspy", "dspy_client.py"),
}
_OPENCODE = {
    "model": "parrot/{model}",
    "small_model": "parrot/{model}",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "parrot": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
            "models": {
                "{model}": {"tool_call": True, "limit": {"context": 100000, "output": 1000}}
            },
        }
    },
}
AGENTS = {
    "claude_code": Agent(
        "@anthropic-ai/claude-code",
        ["claude", "--allowedTools", "Bash", "-p"],
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "qwen_code": Agent(
        "@qwen-code/qwen-code",
        ["qwen", "--auth-type", "openai", "--yolo", "-p"],
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{model}"},
    ),
    "codex": Agent(
        "@openai/codex",
        [
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "-c",
            "web_search=disabled",
            "-c",
            "model_provider=parrot",
            "-c",
            'model_providers.parrot={name="Parrot",base_url="{url}/v1",env_key="PARROT_KEY"}',
            "-m",
            "{model}",
        ],
        {"PARROT_KEY": "{key}"},
    ),
    "opencode": Agent("opencode-ai", ["opencode", "run"], {}, {"opencode.json": _OPENCODE}),
}


async def run_script(script: Script, venvs: Path, url: str, model: str, key: str) -> Json:
    """Run the client's script, and return the versions and features that it prints."""
    path = str(HERE / "clients" / script.name)
    printed = await _output([_bin(venvs, script.venv, "python"), path, url, model, key], {}, Path())
    features: Json = json.loads(printed.splitlines()[-1])
    return features


async def run_agent(agent: Agent, venvs: Path, url: str, recorder: Recorder) -> Json:
    def filled(text: str) -> str:
        values = {"{url}": url, "{model}": MODEL, "{key}": KEY}
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    package = venvs / "npm" / "node_modules" / agent.package / "package.json"
    features: dict[str, str | None] = {}
    for name, (asked, wanted) in TURNS.items():
        recorder.feature = name
        with tempfile.TemporaryDirectory() as home:
            for file, content in agent.files.items():
                (Path(home) / file).write_text(filled(json.dumps(content)))
            program = str(venvs / "npm" / "node_modules" / ".bin" / agent.command[0])
            arguments = [filled(argument) for argument in agent.command[1:]]
            env = {key: filled(value) for key, value in agent.env.items()} | {"HOME": home}
            printed = await _output([program, *arguments, asked], env, Path(home))
        features[name] = None if wanted in printed else printed[-300:] or "no answer"
    version = json.loads(package.read_text())["version"]
    return {"versions": {agent.package: version}, "features": features}


async def run_harness(harness: Harness, venvs: Path, url: str, recorder: Recorder) -> Json:
    features: dict[str, str | None] = {}
    for name in harness.profiles:
        recorder.feature = name
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home) / "report"
            folder.mkdir()
            tokenizer = tokenizer_folder(Path(home))
            values = {"url": url, "model": MODEL, "key": KEY, "folder": str(folder)}
            command = harness.arguments(name, values | {"tokenizer": str(tokenizer)})
            program = _bin(venvs, harness.venv, command[0])
            await _output([program, *command[1:]], {"HOME": home}, Path(home))
            features[name] = harness.problem(folder)
    asked = f"import importlib.metadata as m; print(m.version('{harness.package}'))"
    version = await _output([_bin(venvs, harness.venv, "python"), "-c", asked], {}, Path())
    return {"versions": {harness.package: version.strip()}, "features": features}


def _bin(venvs: Path, venv: str, name: str) -> str:
    return str(venvs / venv / "bin" / name)


async def _output(command: list[str], env: dict[str, str], folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | env,
        cwd=folder,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 180)
    return out.decode()


async def record(name: str, venvs: Path) -> Json:
    max_text = AGENT_MAX_TEXT if name in AGENTS else MAX_TEXT
    async with scripted_core(max_text) as (core, _):
        recorder = Recorder(create_app(core))
        async with serve_app(recorder) as url:
            if name in AGENTS:
                printed = await run_agent(AGENTS[name], venvs, url, recorder)
            elif name in HARNESSES:
                printed = await run_harness(HARNESSES[name], venvs, url, recorder)
            else:
                printed = await run_script(SCRIPTS[name], venvs, url, MODEL, KEY)
    passed = [r for r in recorder.requests if printed["features"][r["feature"]] is None]
    return printed | {"max_text": max_text, "requests": passed}


def write(name: str, printed: Json) -> None:
    """Write a transcript with one request per line."""
    lines = [json.dumps(request, ensure_ascii=False) for request in printed.pop("requests")]
    head = json.dumps(printed, ensure_ascii=False, indent=1).removesuffix("\n}")
    text = head + ',\n "requests": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    (HERE / "transcripts" / f"{name}.json").write_text(text)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venvs", type=Path)
    parser.add_argument("clients", nargs="*")
    parser.add_argument("--url")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--key", default=KEY)
    args = parser.parse_args()
    for name in args.clients or [*SCRIPTS, *AGENTS, *HARNESSES]:
        if args.url:
            printed = await run_script(SCRIPTS[name], args.venvs, args.url, args.model, args.key)
        else:
            printed = await record(name, args.venvs)
            write(name, printed)
        for feature, problem in printed["features"].items():
            sys.stdout.write(f"{name} {feature}: {problem or 'passes'}\n")


if __name__ == "__main__":
    asyncio.run(main())
