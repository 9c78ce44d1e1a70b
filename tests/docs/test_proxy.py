"""docs/deployment.md: the nginx configuration does not buffer streams, and hides internal
routes."""

import asyncio
import re
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from parrot import P
from parrot.protocol import connections
from parrot.protocol.errors import Unavailable
from parrot.serve.config import CoreConfig
from tests.docs.pages import ROOT
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine
from tests.support.programs import program

NAME = "parrot.example.com"
CONFIG = """\
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder};
    proxy_temp_path {folder};
    fastcgi_temp_path {folder};
    uwsgi_temp_path {folder};
    scgi_temp_path {folder};
    {server}
}}
"""


@P.semantic_function()
def count(numbers: P.Output(P.SamplingConfig(max_gen_length=3))):  # type: ignore[valid-type]
    """Count. {{numbers}}"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest_asyncio.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[tuple[Site, str]]:
    """A ServeCore, and the address of an nginx with the page's configuration in front of it."""
    nginx, openssl = program("nginx-light", "nginx"), program("openssl", "openssl")
    files = {"/etc/ssl/parrot.pem": tmp_path / "pem", "/etc/ssl/parrot.key": tmp_path / "key"}
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -batch -subj /CN=parrot.example.com"
    made += " -addext subjectAltName=IP:127.0.0.1"
    paths = ["-out", str(tmp_path / "pem"), "-keyout", str(tmp_path / "key")]
    await asyncio.to_thread(
        subprocess.run, [openssl, *made.split(), *paths], check=True, capture_output=True
    )
    page = (ROOT / "docs" / "deployment.md").read_text()
    (server,) = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
    engine = fake_engine("e0", model=MODEL)
    async with serve(CoreConfig(allowed_hosts=[NAME]), engine) as site:
        port = free_port()
        changes = {"listen 443": f"listen 127.0.0.1:{port}"}
        changes["http://127.0.0.1:9000"] = str(site.http._base_url).rstrip("/")
        for old, new in (changes | {old: str(new) for old, new in files.items()}).items():
            assert server.count(old) == 1
            server = server.replace(old, new)
        config = tmp_path / "nginx.conf"
        config.write_text(CONFIG.format(folder=tmp_path, server=server))
        process = await asyncio.create_subprocess_exec(
            nginx, "-p", str(tmp_path), "-c", str(config)
        )
        try:
            await answers(port)
            yield site, f"https://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


async def answers(port: int) -> None:
    """Wait until a server listens at the port."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


async def test_streams_are_not_buffered(proxied: tuple[Site, str]) -> None:
    site, url = proxied
    site.engine.script = Script(text=lambda _: "one two three", hang_after=1)
    unverified = ssl._create_unverified_context()
    body = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": "Count."}],
    }
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=unverified)) as http,
        http.post(f"{url}/v1/chat/completions", json=body, headers={"Host": NAME}) as response,
    ):
        assert response.status == 200
        async with asyncio.timeout(20):
            while b'"content":"one' not in await response.content.readline():
                pass  # the first chunk has arrived, although the engine is waiting
        site.engine.resume.set()
        assert (await response.text()).rstrip().endswith("[DONE]")


async def test_programs_check_the_certificate(
    proxied: tuple[Site, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, url = proxied
    site.engine.script = Script(text=lambda _: "one two three")

    def run() -> str:
        with P.VirtualMachine(url).running_scope():
            return count().get()

    # Clients cache TLS settings for the process. Reload them, because the environment has changed.
    monkeypatch.setattr(connections, "_system_tls", ssl.create_default_context)
    with pytest.raises(Unavailable, match="certificate"):
        await asyncio.to_thread(run)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pem"))
    assert await asyncio.to_thread(run) == "one two three"


async def test_internal_routes_are_hidden(proxied: tuple[Site, str]) -> None:
    _, url = proxied
    connector = aiohttp.TCPConnector(ssl=ssl._create_unverified_context())
    async with aiohttp.ClientSession(connector=connector, headers={"Host": NAME}) as http:
        for path, status in {"/health": 200, "/metrics": 404, "/engine_heartbeat": 404}.items():
            async with http.get(url + path) as response:
                assert response.status == status, path
