"""Who did what on the page, when, and from where."""

import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from parrot.protocol.public import SessionCreateRequest
from parrot.serve.api.app import create_app
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.page.visitors import page_key
from parrot.utils.config import ConfigError
from tests.support.app_server import serve_app

TOKEN = "a-token"


async def test_what_is_done_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    core = ServeCore(CoreConfig(api_keys=("k",), cluster_token=TOKEN, audit_path=str(path)))
    session = core.create_session(SessionCreateRequest(api_key="k"))

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        for key, status in (("wrong", 401), (page_key(TOKEN), 200)):
            async with http.post("/ui/api/enter", json={"key": key}) as answer:
                assert answer.status == status
                cookie = answer.headers.get("Set-Cookie", "").partition(";")[0]
        asked = [
            ("engines/7/drain", {"is_wanted": True}, 404),
            (f"sessions/{session.session_id}/cancel/x", {}, 422),
            (f"sessions/{session.session_id}/end", {}, 200),
        ]
        for verb, body, status in asked:
            async with http.post(
                f"/ui/api/{verb}", json=body, headers={"Cookie": cookie}
            ) as answer:
                assert answer.status == status, await answer.text()
            assert len(lines()) > 0  # it is there when the answer is
        async with http.get("/ui/api/me", headers={"Cookie": cookie}) as answer:
            assert answer.status == 200
    kept = lines()
    assert [line["outcome"] for line in kept] == ["ok", "not_found", "validation_failed", "ok"]
    assert {line["who"] for line in kept} == {"operator"}
    assert {line["from"] for line in kept} == {"127.0.0.1"}
    assert kept[-1]["what"] == f"POST /ui/api/sessions/{session.session_id}/end"
    assert kept[-1]["session_id"] == session.session_id
    assert TOKEN not in path.read_text()
    assert page_key(TOKEN) not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    core = ServeCore(CoreConfig(audit_path=str(tmp_path)))
    with pytest.raises(ConfigError, match="audit_path"):
        create_app(core)
