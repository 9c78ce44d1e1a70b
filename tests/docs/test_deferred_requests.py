"""The section "Deferred requests" of docs/api.md has a program that runs."""

import asyncio
import re
from pathlib import Path

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, serve
from tests.support.fake_engine import Script, fake_engine

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text("utf-8")


async def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (program,) = [code for code in others if "defer=True" in code]
    client = first.partition("messages")[0]
    engine = fake_engine("e0", model=MODEL)
    engine.script = Script(text=lambda prompt: f"[{prompt.rpartition('user')[2][1:]}]")
    async with serve(CoreConfig(), engine) as site:
        url = str(site.http._base_url).rstrip("/")
        code = f"{client}\n{program}\nclient.close()\n"
        code = code.replace("http://localhost:9000", url).replace("embedded", MODEL)
        scope: dict[str, object] = {}
        await asyncio.to_thread(exec, compile(code, "api.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("[Join these summaries: [Summarize: Birds have wings")
    assert len(engine.requests) == 3
