"""A reader can start to stream a call that already runs for a reader of the whole value."""

import asyncio

from parrot.cluster import Cluster
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import program

SLOW = {"engine_type": "sim", "instance": {"step_s": 0.01}}
LENGTH = 400


async def test_a_late_reader_sees_the_text_grow_from_its_first_character() -> None:
    with Cluster(engines=[SLOW]) as cluster:
        engine_url, token = cluster.url(cluster.engine_names[0]), cluster.cluster_token
        async with (
            HttpClient(cluster.core_url) as http,
            HttpClient(engine_url, bearer_token=token) as engine_http,
            program(ServeClient(http)) as session,
        ):
            engine = EngineClient(engine_http)
            num_before = (await engine.ping()).num_steps or 0
            var = await session.call("Go on: {{out}}", LENGTH)
            whole = asyncio.create_task(session.get(var, timeout_s=60.0))
            while ((await engine.ping()).num_steps or 0) < num_before + 50:
                await asyncio.sleep(0.01)

            async def stream() -> list[str]:
                return [piece async for piece in session.stream(var, timeout_s=60.0)]

            pieces, others = await asyncio.gather(stream(), stream())
            assert "".join(pieces) == "".join(others) == await whole
            assert len(pieces) > 20, "the whole text came at the end"
            assert len(pieces[0]) > 10, "the first chunk should have all text so far"
