"""Native functions that never end: they take their own session's time, not that of others."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from parrot.protocol.errors import InvalidRequest, ParrotError
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, NativeCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.api.app import create_app
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from tests.e2e.programs import Program, program
from tests.support.app_server import serve_app

ENDLESS = "def f(out):\n    while True:\n        pass\n"
QUICK = "def f(out):\n    out.set('done')\n"


@pytest.fixture
async def client() -> AsyncIterator[ServeClient]:
    core = ServeCore(CoreConfig(native_workers=2, native_timeout=30))
    async with serve_app(create_app(core)) as url, HttpClient(url) as http:
        yield ServeClient(http)
    core.check_integrity()


async def call(session: Program, source: str, timeout_s: float) -> str:
    made = await session.client.native_call(
        NativeCallRequest(
            session_id=session.session_id,
            session_auth=session.session_auth,
            func_name="f",
            func_source=source,
            timeout=timeout_s,
            parameters=[CallParameter(name="out", is_output=True)],
        )
    )
    var_id = made.param_info[0].var_id
    assert var_id is not None
    return var_id


async def test_endless_functions_of_one_session_leave_others_a_worker(client: ServeClient) -> None:
    async with program(client) as greedy, program(client) as other:
        endless = [await call(greedy, ENDLESS, 30) for _ in range(4)]
        reads = [asyncio.create_task(greedy.get(var_id)) for var_id in endless]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        for _ in range(5):
            assert await other.get(await call(other, QUICK, 10)) == "done"
        assert time.monotonic() - start < 20
        assert not any(read.done() for read in reads)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


async def test_the_longest_timeout_is_the_operators(client: ServeClient) -> None:
    async with program(client) as session:
        with pytest.raises(InvalidRequest, match="at most 30 s") as caught:
            await call(session, QUICK, 31)
        assert caught.value.param == "timeout"
        with pytest.raises(ParrotError):
            await session.get(await call(session, ENDLESS, 0.2))
