"""docs/chaining.md tells the truth, by OpenAI's own client."""

import asyncio
import re
from pathlib import Path

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, serve
from tests.support.fake_engine import Script, fake_engine

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "chaining.md").read_text("utf-8")


async def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    engine = fake_engine("e0", model=MODEL)
    engine.script = Script(text=lambda prompt: f"[{prompt.rpartition('user')[2][1:]}]")
    async with serve(CoreConfig(), engine) as site:
        url = str(site.http._base_url).rstrip("/")
        code = code.replace("http://localhost:9000", url).replace("embedded", MODEL)
        code = f"{code}\nclient.close()\n"
        scope = {"texts": ["one", "two"]}
        await asyncio.to_thread(exec, compile(code, "chaining.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("[Join these summaries: [Summarize: one")
    assert len(engine.requests) == 3
