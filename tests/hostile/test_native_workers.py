"""Native functions that never end use up the time of their own session only."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from parrot.protocol.errors import InvalidRequest, ParrotError, QuotaExceeded
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, NativeCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig, SessionQuota
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.e2e.programs import Program, program
from tests.support.app_server import serve_app

ENDLESS = "def f(out):\n    while True:\n        pass\n"
QUICK = "def f(out):\n    out.set('done')\n"


@pytest.fixture
async def client() -> AsyncIterator[ServeClient]:
    async with serving(CoreConfig(native_workers=2, native_timeout=30)) as client:
        yield client


@asynccontextmanager
async def serving(config: CoreConfig) -> AsyncIterator[ServeClient]:
    core = ServeCore(config)
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


async def test_the_operator_limits_the_timeout(client: ServeClient) -> None:
    async with program(client) as session:
        with pytest.raises(InvalidRequest, match="at most 30 s") as caught:
            await call(session, QUICK, 31)
        assert caught.value.param == "timeout"
        with pytest.raises(ParrotError):
            await session.get(await call(session, ENDLESS, 0.2))


async def test_the_functions_of_a_session_have_a_total_time_limit() -> None:
    """After the session's time is used up, neither queued functions nor new ones run."""
    config = CoreConfig(native_workers=2, session_quota=SessionQuota(native_ms=300))
    async with serving(config) as client, program(client) as greedy, program(client) as other:
        calls = [await call(greedy, ENDLESS, 0.4) for _ in range(5)]
        errors = await asyncio.gather(*map(greedy.get, calls), return_exceptions=True)
        assert all(isinstance(error, ParrotError) for error in errors)
        assert ["session_quota.native_ms" in str(error) for error in errors] == [False] + 4 * [True]
        with pytest.raises(QuotaExceeded, match="300 ms"):
            await call(greedy, QUICK, 1)
        assert await other.get(await call(other, QUICK, 10)) == "done"
