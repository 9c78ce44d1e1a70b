"""Every block of Python and shell in the documentation runs, or says why it does not."""

import asyncio
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from parrot.cli.app import app
from parrot.engine.config import CONFIG_TYPES
from parrot.serve.config import CoreConfig
from tests.docs.obedient_engine import obedient_engine
from tests.docs.pages import PAGES, ROOT, Block, blocks_of
from tests.gateway.vendors.conftest import serve
from tests.support.programs import program

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
ADDRESS = "http://localhost:9000"
# Python blocks run, and JSON and TOML blocks are parsed, unless a comment says why not. Blocks in
# other languages name their test in a comment.
CHECKED = {"python", "bash", "json", "toml", "text"}
# A file that the programs of a page may read.
DOCUMENT = "Parrots are birds. They live in warm places.\n\nThey eat seeds, and some repeat words."


def runnable(language: str) -> list[Path]:
    return [p for p in PAGES if any(b.language == language and b.is_run for b in blocks_of(p))]


@pytest.mark.parametrize("page", runnable("python"), ids=lambda page: page.name)
async def test_the_programs_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the blocks of a page in order and in one namespace, with an `ObedientEngine`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "document.txt").write_text(DOCUMENT)
    monkeypatch.setattr("builtins.input", lambda *_: "")
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.is_run]
    scope: dict[str, Any] = {"__name__": "docs_page"}
    async with serve(CoreConfig(), obedient_engine()) as site:
        url = str(site.http._base_url).rstrip("/")
        await asyncio.to_thread(run_page, blocks, url, scope, tmp_path)


def run_page(blocks: list[Block], url: str, scope: dict[str, Any], folder: Path) -> None:
    """Run all blocks in one thread, because the event loop of a client belongs to its thread."""
    try:
        for block in blocks:
            execute(block, url, scope, folder)
    finally:
        tidy_up(scope)


def execute(block: Block, url: str, scope: dict[str, Any], folder: Path) -> None:
    """Run a block from a file, because native functions need their source."""
    file = folder / f"{block.page.stem}_{block.line}.py"
    file.write_text(block.code.replace(ADDRESS, url))
    exec(compile(file.read_text(), str(file), "exec"), scope)


def tidy_up(scope: dict[str, Any]) -> None:
    for value in scope.values():
        if type(value).__name__ == "VirtualMachine" and value.session_registered:
            value.unset_global_env()
        elif type(value).__name__ in ("Anthropic", "OpenAI"):
            value.close()
        elif type(value).__name__ == "AsyncOpenAI":
            loop = asyncio.get_event_loop()  # created by `Runner.run_sync`
            loop.run_until_complete(value.close())
            loop.close()


async def test_the_rest_page_s_curl_lines_run() -> None:
    """Ids in the answers on the page are replaced by those of the real answers."""
    program("curl", "curl")
    blocks = [b for b in BLOCKS if b.page.name == "rest.md" and b.language == "bash"]
    async with serve(CoreConfig(), obedient_engine()) as site:
        url = str(site.http._base_url)
        known: dict[str, str] = {}
        for step in re.findall(
            r"^curl .*?(?=^curl|\Z)", "".join(b.code for b in blocks), re.M | re.S
        ):
            shown = "".join(line[2:] for line in step.splitlines() if line.startswith("# "))
            command = re.sub(r"^# .*\n?", "", step, flags=re.MULTILINE)
            for old, new in known.items():
                command = command.replace(old, new)
            command = command.replace("localhost:9000", url.removeprefix("http://").rstrip("/"))
            answer = await asyncio.to_thread(subprocess.check_output, ["bash", "-c", command])
            given = json.loads(answer)
            assert re.findall(r'^\{"(\w+)"', shown)[0] in given, answer
            known |= dict(zip(_ids(shown), _ids(answer.decode()), strict=False))


def _ids(answer: str) -> list[str]:
    """Return the ids for later requests: the session, its key, and the last output variable."""
    numbers = re.findall(r'"session_id":(\d+)', answer)
    keys = re.findall(r'"session_auth":"([^"]+)"', answer)
    return [*numbers, *keys, *re.findall(r'"var_id":"([^"]+)"', answer)[-1:]]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_that_is_not_run_has_a_reason(block: Block) -> None:
    if block.tested_in is not None:
        assert block.page.name in (ROOT / block.tested_in).read_text("utf-8")
    elif block.language == "bash" and block.page.name != "rest.md":
        assert block.reason, f"{block}: write `<!-- not run: REASON -->` above it"
    elif block.reason is not None:
        assert len(block.reason) > 10, block
    else:
        assert block.language in CHECKED, f"{block}: write `<!-- tested in: FILE -->` above it"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("json", "toml")], ids=str)
def test_configurations_are_valid(block: Block) -> None:
    if block.language == "toml":
        tomllib.loads(block.code)
        return
    read = json.loads(re.sub(r"replace-me[\w-]*", "a-secret-of-ones-own", block.code))
    if "engine_type" in read:
        CONFIG_TYPES[read["engine_type"]].model_validate(read)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_commands_of_parrot_exist(block: Block) -> None:
    """Check the subcommands and options, including those in blocks that are not run."""
    commands: Any = typer.main.get_command(app)
    code = block.code.replace("\\\n", " ")
    for line in re.findall(r"^(?:\.venv/bin/)?parrot (.*)$", code, re.MULTILINE):
        command, rest = commands, shlex.split(line, comments=True)
        while hasattr(command, "commands"):
            verb, *rest = rest
            assert verb in command.commands, f"{block}: parrot {verb}"
            command = command.commands[verb]
        if command.context_settings.get("ignore_unknown_options"):
            continue
        known = {name for option in command.params for name in option.opts}
        used = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert used <= known, f"{block}: parrot {verb} {used - known}"
