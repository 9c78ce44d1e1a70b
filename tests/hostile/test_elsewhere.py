"""Servers that try to make ours send requests to other addresses. Our clients do not follow
redirects, and errors reveal nothing about other addresses."""

import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from parrot.protocol.engine_api import EngineInfo, EngineType
from parrot.protocol.errors import ParrotError, Unavailable, ValidationFailed
from parrot.protocol.http import HttpClient
from parrot.protocol.registration_client import RegistrationClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.support.app_server import serve_app

SECRET = "credentials of the machine"


class Lure:
    """An engine that redirects every request to `/target`, which no client should request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        methods = ["GET", "POST"]
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])

    async def _answer(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        if request.url.path == "/target":
            return JSONResponse({"secret": SECRET}, 403)
        return RedirectResponse("/target", 307)


@pytest.fixture
async def lure() -> AsyncIterator[tuple[Lure, str]]:
    lure = Lure()
    async with serve_app(lure.app) as url:
        yield lure, url


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    core = ServeCore(CoreConfig())
    async with serve_app(create_app(core)) as url, HttpClient(url) as http:
        yield http


def info(host: str, port: int = 80) -> EngineInfo:
    return EngineInfo(
        engine_type=EngineType.SIM,
        engine_name="lure",
        model="m",
        tokenizer_id="0" * 64,
        host=host,
        port=port,
        max_seq_len=100,
        tokens_capacity=100,
    )


async def test_no_client_follows_a_redirect(lure: tuple[Lure, str]) -> None:
    server, url = lure
    async with HttpClient(url, bearer_token="secret") as http:
        for method in ("GET", "POST"):
            with pytest.raises(Unavailable, match="redirect"):
                await http.request(method, "/generate", body={"prompt": "private"})
        with pytest.raises(Unavailable, match="redirect"):
            async for _ in http.stream("POST", "/generate_stream", body={}):
                pass
    assert "/target" not in server.asked


async def test_a_failed_registration_does_not_reveal_open_ports(
    lure: tuple[Lure, str], http: HttpClient
) -> None:
    server, url = lure
    errors = set()
    for port in (int(url.rpartition(":")[2]), 1):  # an open port and a closed one
        with pytest.raises(ParrotError) as caught:
            await RegistrationClient(http).register_engine(info("127.0.0.1", port))
        errors.add((caught.value.type, caught.value.message))
    assert len(errors) == 1
    assert server.asked == ["/tokenizer"]


@pytest.mark.parametrize(
    "host",
    ["", " ", "a/b", "user@host", "host:80", "[::1]", "h?x=", "h#x", "-a", "a..b", "x" * 254],
)
async def test_a_host_is_an_address_or_a_name(http: HttpClient, host: str) -> None:
    body = {"engine_config": info("a").model_dump(mode="json") | {"host": host}}
    with pytest.raises(ValidationFailed, match="IP address or a DNS name"):
        await http.request("POST", "/register_engine", body=body)


METADATA = [
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16"),
    *("fd00:ec2::254", "::ffff:169.254.169.254", "0:0:0:0:0:ffff:a9fe:a9fe"),
]


@pytest.mark.parametrize("host", METADATA)
async def test_no_engine_is_a_metadata_service(http: HttpClient, host: str) -> None:
    body = {"engine_config": info(host).model_dump(mode="json")}
    with pytest.raises(ValidationFailed, match="metadata service"):
        await http.request("POST", "/register_engine", body=body)


@pytest.mark.parametrize("address", METADATA)
async def test_no_name_leads_to_a_metadata_service(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """The address is checked when the name is used, because its DNS entry may have changed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    place = (address, 80, 0, 0) if ":" in address else (address, 80)

    def resolved(*args: object, **options: object) -> list[Any]:
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    async with HttpClient("http://engine.example") as client:
        with pytest.raises(Unavailable, match="metadata service"):
            await client.request("GET", "/latest/meta-data/", timeout_s=5.0)


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "169.254.43518", "unix:/tmp/x", "/x"])
async def test_other_spellings_of_the_address_are_rejected(http: HttpClient, host: str) -> None:
    body = {"engine_config": info(host).model_dump(mode="json")}
    with pytest.raises(ParrotError):
        await http.request("POST", "/register_engine", body=body)
