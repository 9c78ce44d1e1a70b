"""The audit log records the user, action, time and address of each administrative request."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import Request

from parrot.gateway.audit import AuditLog
from parrot.gateway.page.visitors import page_key
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.config import ConfigError
from tests.gateway.vendors.conftest import MODEL, serve
from tests.serve.tenants.keys import entry, write_keys
from tests.support.app_server import serve_app
from tests.support.fake_engine import fake_engine

TOKEN = "a-token"


async def test_requests_are_recorded(tmp_path: Path) -> None:
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
            assert len(lines()) > 0  # an entry is written before the answer is sent
        async with http.get("/ui/api/me", headers={"Cookie": cookie}) as answer:
            assert answer.status == 200
    kept = lines()
    outcomes = [line["outcome"] for line in kept]
    assert outcomes == ["authentication_failed", "ok", "not_found", "validation_failed", "ok"]
    assert [line["who"] for line in kept] == [None, *["operator"] * 4]
    assert {line["from"] for line in kept} == {"127.0.0.1"}
    assert kept[-1]["what"] == f"POST /ui/api/sessions/{session.session_id}/end"
    assert kept[-1]["session_id"] == session.session_id
    assert TOKEN not in path.read_text()
    assert page_key(TOKEN) not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_registrations_and_admin_requests_are_recorded(tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    path = write_keys(tmp_path / "keys.json", entry("ops", "k", scopes=["admin"]), entry("a", "l"))
    config = CoreConfig(keys_file=path, cluster_token=TOKEN, audit_path=str(audit))
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        session = site.core.create_session(SessionCreateRequest(api_key="l"))
        info = site.engine.info.model_dump(mode="json")
        asked = [
            ("POST", "/register_engine", {"engine_config": info}, TOKEN, 200),
            ("POST", "/register_engine", {"engine_config": info}, "k", 401),
            ("POST", "/v1/admin/engine/0/drain", {"is_wanted": True}, "l", 403),
            ("POST", "/v1/admin/engine/7/drain", {"is_wanted": True}, "k", 404),
            ("GET", "/v1/admin/tenants", None, "k", 200),
            ("DELETE", f"/v1/admin/session/{session.session_id}", None, "k", 200),
            ("DELETE", f"/v1/admin/session/{session.session_id}", None, TOKEN, 404),
        ]
        for method, where, body, key, status in asked:
            headers = {"Authorization": f"Bearer {key}"}
            async with site.http.request(method, where, json=body, headers=headers) as answer:
                assert answer.status == status, (where, await answer.text())
        write_keys(Path(path), entry("a", "l"), entry("b", "m"))
        while "keys changed" not in audit.read_text():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)
    joined, refused, missing, ended, gone, changed = map(json.loads, audit.read_text().splitlines())
    assert (joined["who"], joined["engine"], joined["outcome"]) == ("engine", "e0", "ok")
    assert (refused["who"], refused["outcome"]) == (None, "authentication_failed")
    assert missing["who"] == "operator ops"
    assert missing["what"] == "POST /v1/admin/engine/7/drain"
    assert (ended["who"], ended["session_id"]) == ("operator ops", session.session_id)
    assert (gone["who"], gone["outcome"]) == ("operator", "not_found")
    assert (changed["added"], changed["removed"]) == (["b"], ["ops"])
    for secret in (TOKEN, '"k"', session.session_auth):
        assert secret not in audit.read_text()


async def test_only_the_first_failed_authentications_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    core = ServeCore(CoreConfig(api_keys=("k",), cluster_token=TOKEN, audit_path=str(path)))
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        for n in range(50):
            headers = {"Authorization": f"Bearer guess {n}"}
            async with http.get("/v1/models", headers=headers) as answer:
                assert answer.status == 401
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 10
    assert {line["what"] for line in lines} == {"GET /v1/models"}
    assert "guess" not in path.read_text()


def test_omitted_authentication_failures_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.0
    monkeypatch.setattr("parrot.gateway.audit.time.monotonic", lambda: now)
    audit = AuditLog(str(tmp_path / "audit"))
    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": []})
    for _ in range(25):
        audit.auth_failed(request)
    now = 100.0
    audit.auth_failed(request)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert (len(lines), lines[10]["count"]) == (12, 15)


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    core = ServeCore(CoreConfig(audit_path=str(tmp_path)))
    with pytest.raises(ConfigError, match="audit_path"):
        create_app(core)
