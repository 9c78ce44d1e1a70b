"""docs/shards.md: its HAProxy gives a key's requests to one shard, and the shards do the rest."""

import asyncio
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.docs.pages import ROOT
from tests.docs.test_proxy import answers, free_port
from tests.serve.shards.test_shards import MODEL, free_ports, shard


async def test_the_proxy_keeps_a_key_at_one_shard(tmp_path: Path) -> None:
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if haproxy is None:
        pytest.skip("needs HAProxy: apt-get install haproxy")
    page = (ROOT / "docs" / "shards.md").read_text()
    (config,) = re.findall(r"```haproxy\n(.*?)```", page, re.DOTALL)
    ports, port = free_ports(), free_port()
    async with AsyncExitStack() as stack:
        shards = [await stack.enter_async_context(shard(index, ports)) for index in range(2)]
        for old, new in {
            ":80": f"127.0.0.1:{port}",
            "10.0.0.1:9000": f"127.0.0.1:{ports[0]}",
            "10.0.0.2:9000": f"127.0.0.1:{ports[1]}",
        }.items():
            assert config.count(old) == 1
            config = config.replace(old, new)
        (tmp_path / "haproxy.cfg").write_text(config)
        process = await asyncio.create_subprocess_exec(
            haproxy, "-q", "-db", "-f", str(tmp_path / "haproxy.cfg")
        )
        try:
            await answers(port)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                for number in range(16):
                    head = {"Authorization": f"Bearer key {number}"}
                    body = {"model": MODEL, "input": "Hello", "store": True}
                    before = [len(one.engine.requests) for one in shards]
                    for _ in range(2):
                        async with http.post("/v1/responses", json=body, headers=head) as answer:
                            assert answer.status == 200
                    after = [len(one.engine.requests) for one in shards]
                    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 2]
                async with http.post("/v1/session", json={}) as answer:
                    scope = await answer.json()
                head = {"Authorization": f"Bearer {scope['session_auth']}"}
                async with http.get(f"/v1/session/{scope['session_id']}", headers=head) as answer:
                    assert answer.status == 200
            assert all(one.engine.requests for one in shards)
        finally:
            process.terminate()
            await process.wait()
