"""Requests that a web page in a browser on the same machine can send: bodies that browsers send
without a preflight request, and host names of the page that resolve to this machine."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.support.app_server import serve_app

SIM = {"engine_type": "sim", "model": "sim"}


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster({"allowed_hosts": ["parrot.example.org"]}, [SIM]) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    authorization = {"Authorization": f"Bearer {cluster.cluster_token}"}
    async with aiohttp.ClientSession(headers=authorization) as session:
        yield session


def urls(cluster: Cluster) -> list[str]:
    paths = ("/v1/session", "/register_engine", "/v1/semantic_call", "/v1/chat/completions")
    engine = cluster.url(cluster.engine_names[0])
    return [*(cluster.core_url + path for path in paths), engine + "/fill", engine + "/ping"]


@pytest.mark.parametrize(
    "declared",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", None],
)
async def test_a_body_that_is_not_declared_as_json_is_rejected(
    cluster: Cluster, http: aiohttp.ClientSession, declared: str | None
) -> None:
    headers = {"Origin": "https://evil.example"}
    if declared is not None:
        headers["Content-Type"] = declared
    skipped = () if declared else ("Content-Type",)
    for url in urls(cluster):
        if url.endswith("/ping"):
            continue  # accepts no body
        async with http.post(
            url, data=b"{}", headers=headers, skip_auto_headers=skipped
        ) as response:
            assert response.status == 415, url
            assert "application/json" in await response.text()


async def test_an_empty_post_of_a_page_is_rejected(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    """A page of another site can send it without the server's permission."""
    for origin in ("https://evil.example", "http://localhost:3000", "null"):
        for url in urls(cluster):
            async with http.post(url, headers={"Origin": origin}) as response:
                assert response.status == 415, url
    json = {"Origin": "http://localhost:9000", "Content-Type": "application/json"}
    async with http.post(cluster.core_url + "/v1/session", headers=json) as response:
        assert response.status == 200


@pytest.mark.parametrize("declared", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_and_empty_bodies_are_accepted(
    cluster: Cluster, http: aiohttp.ClientSession, declared: str
) -> None:
    url = cluster.core_url + "/v1/session"
    async with http.post(url, data=b"{}", headers={"Content-Type": declared}) as response:
        assert response.status == 200
    async with http.post(url) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:9000", "localhost.evil.example", "127.0.0.1.evil.example"],
)
async def test_a_foreign_host_name_is_rejected(
    cluster: Cluster, http: aiohttp.ClientSession, name: str
) -> None:
    engine = cluster.url(cluster.engine_names[0])
    for url in (*urls(cluster), cluster.core_url + "/v1/models", engine + "/tokenizer"):
        for method in ("GET", "POST"):
            async with http.request(method, url, json={}, headers={"Host": name}) as response:
                assert response.status == 421, url
                assert "allowed_hosts" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:9000", "10.1.2.3", "parrot.example.org"],
)
async def test_own_names_and_addresses_are_answered(
    cluster: Cluster, http: aiohttp.ClientSession, name: str
) -> None:
    url = cluster.core_url + "/v1/models"
    async with http.get(url, headers={"Host": name}) as response:
        assert response.status == 200


async def test_any_name_can_be_allowed() -> None:
    core = ServeCore(CoreConfig(allowed_hosts=("*",)))
    async with (
        serve_app(create_app(core)) as url,
        aiohttp.ClientSession() as http,
        http.get(url + "/health", headers={"Host": "x.example"}) as response,
    ):
        assert response.status == 200
