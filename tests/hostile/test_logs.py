"""Requests cannot forge lines of logs and traces, and other users cannot read the files."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import stat
from pathlib import Path

import aiohttp
import pytest

from parrot.cluster import Cluster
from parrot.observe.recorder import TraceFile
from parrot.protocol.errors import EngineFailed
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.utils.logs import JsonFormatter, LogFile, TextFormatter
from tests.gateway.vendors.conftest import MODEL, serve
from tests.support.fake_engine import Script, fake_engine

FORGED = "harmless\n2026-11-22 12:00:00,000 INFO parrot: all is well\r\x1b[2K\x85\u2028\x00"


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("n", logging.INFO, "p", 1, message, args, info)


def test_a_name_cannot_start_a_new_line() -> None:
    logged = record("engine %s joined", FORGED)
    logged.facts = {"func": FORGED}
    line = TextFormatter().format(logged)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert line.count("\\n2026-11-22") == 2
    assert "\n" not in JsonFormatter().format(logged)


def test_an_error_cannot_start_a_new_line() -> None:
    try:
        raise RuntimeError(FORGED)
    except RuntimeError as error:
        text = TextFormatter().format(record("failed", error=error))
    first, *rest = text.splitlines()
    assert first.endswith("failed")
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in text


def test_a_lone_surrogate_is_logged(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / "log")
    for formatter in (TextFormatter(), JsonFormatter()):
        handler.setFormatter(formatter)
        handler.emit(record("file %s", "\udcff"))
    handler.close()
    text, line = (tmp_path / "log").read_text().splitlines()
    assert "\\udcff" in text
    assert json.loads(line)["message"] == "file \udcff"


@pytest.mark.parametrize("is_there", [True, False])
def test_only_the_owner_can_read_files(tmp_path: Path, is_there: bool) -> None:
    before = os.umask(0)
    try:
        log, trace = tmp_path / "log", tmp_path / "trace"
        if is_there:
            for path in (log, trace):
                path.write_text("old\n")
                path.chmod(0o666)
        LogFile(log).close()
        TraceFile(str(trace)).close()
        for path in (log, trace):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert log.read_text() == ("old\n" if is_there else "")
        assert trace.read_text() == ""
    finally:
        os.umask(before)


def test_special_files_keep_their_mode() -> None:
    mode = os.stat(os.devnull).st_mode
    TraceFile(os.devnull).close()
    assert os.stat(os.devnull).st_mode == mode


def test_only_the_owner_can_read_logs_of_started_servers(tmp_path: Path) -> None:
    with Cluster(engines=[{"engine_type": "sim"}], log_dir=tmp_path) as cluster:
        del cluster
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_disconnected_readers_cause_no_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors after the client has disconnected are handled, so asyncio does not report them."""
    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(str(context["message"])))
    engine = fake_engine("e0", model=MODEL)
    kinds = [Script(), Script(steps=20), Script(error=EngineFailed("no")), Script(hang_after=1)]
    engine.scripts = kinds * 24
    async with serve(CoreConfig(), engine) as site:
        scope = site.core.create_session(SessionCreateRequest()).model_dump()
        body = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
        call = {"template": "Go {{y}}", "parameters": [{"name": "y", "is_output": True}]}
        async with aiohttp.ClientSession(site.http._base_url) as http:

            async def chat(after_s: float, is_stream: bool) -> None:
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(after_s):
                        async with http.post(
                            "/v1/chat/completions", json=body | {"stream": is_stream}
                        ) as answer:
                            await answer.text()

            async def read(after_s: float, path: str) -> None:
                with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                    async with http.post("/v1/semantic_call", json=scope | call) as answer:
                        var_id = (await answer.json())["param_info"][0]["var_id"]
                    async with asyncio.timeout(after_s):
                        async with http.get(
                            f"/v1/semantic_var/{var_id}{path}", params=scope
                        ) as answer:
                            await answer.text()

            for n in range(12):
                after_s = 0.002 * n
                await asyncio.gather(
                    chat(after_s, True), chat(after_s, False), read(after_s, ""),
                    read(after_s, "/stream"),
                )  # fmt: skip
        engine.resume.set()
        await asyncio.sleep(0.05)
        gc.collect()
        await asyncio.sleep(0)
    assert logged == []
    assert "never retrieved" not in caplog.text
