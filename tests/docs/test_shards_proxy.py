"""docs/reliability.md: HAProxy sends all requests of one key to one shard."""

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from tests.docs.haproxy import haproxy_of
from tests.docs.test_proxy import free_port
from tests.gateway.test_shards import MODEL, free_ports, shard


async def test_the_proxy_keeps_a_key_at_one_shard(tmp_path: Path) -> None:
    ports, port = free_ports(), free_port()
    addresses = {
        ":80": f"127.0.0.1:{port}",
        "10.0.0.1:9000": f"127.0.0.1:{ports[0]}",
        "10.0.0.2:9000": f"127.0.0.1:{ports[1]}",
    }
    async with AsyncExitStack() as stack:
        shards = [await stack.enter_async_context(shard(index, ports)) for index in range(2)]
        async with haproxy_of("shards", port, addresses, tmp_path):
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
