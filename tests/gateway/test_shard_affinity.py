"""The shards at which sessions with an application name are created."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway.shards import ShardLoad, homes
from parrot.utils.shard import MAX_SHARDS
from tests.e2e.programs import Program, program
from tests.gateway.test_shards import Served, free_ports, shard

CORES = [f"http://core-{index}:9000" for index in range(8)]


@pytest.fixture
async def pair() -> AsyncIterator[list[Served]]:
    ports = free_ports()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(shard(index, ports)) for index in range(2)]


async def begin(asked: Served, *apps: str, key: str | None = None) -> int:
    """Create a session, and return its shard."""
    session = await asked.client.create_session(api_key=key, apps=list(apps))
    return session.session_id % MAX_SHARDS


@given(st.text(), st.text(), st.integers(1, 7))
def test_applications_move_only_to_a_new_shard(tenant: str, app: str, count: int) -> None:
    before, after = homes(tenant, app, CORES[:count]), homes(tenant, app, CORES[: count + 1])
    kept = [shard for shard in after if shard != count]
    assert kept == before[: len(kept)]
    assert len(set(after)) == min(3, count + 1)


@pytest.mark.parametrize(
    ("home_has", "asked_has", "spills"),
    [
        ((16, 16, 0), (0, 0, 0), False),
        ((17, 0, 0), (0, 99, 99), True),
        ((0, 17, 0), (99, 0, 99), True),
        ((141, 141, 0), (100, 100, 0), False),
        ((142, 0, 0), (100, 0, 0), True),
        ((0, 142, 0), (0, 100, 0), True),
        ((0, 0, 50), (0, 0, 0), False),
        ((0, 0, 51), (99, 99, 50), True),
        ((0, 0, 90), (0, 0, 90), False),
        ((0, 0, 91), (0, 0, 90), True),
    ],
)
def test_a_shard_with_more_load_or_less_kv_declines_sessions(
    home_has: tuple[int, int, int], asked_has: tuple[int, int, int], spills: bool
) -> None:
    assert ShardLoad(*home_has).declines_for(ShardLoad(*asked_has)) == spills


@given(st.integers(0, 10**8), st.integers(0, 10**8), st.integers(0, 100))
def test_a_load_is_sent_in_a_header(sessions: int, calls: int, kv: int) -> None:
    load = ShardLoad(sessions, calls, kv)
    assert ShardLoad.parse(load.header.decode()) == load


@pytest.mark.parametrize("header", ["", "7", "1 2", "1 2 3 4", "-1 2 3", "not a number", "1.5 2 3"])
def test_invalid_loads_are_ignored(header: str) -> None:
    assert ShardLoad.parse(header) is None


def test_applications_are_spread_evenly() -> None:
    first = Counter(homes("acme", f"app {number}", CORES)[0] for number in range(4000))
    assert max(first.values()) < 1.2 * 500
    assert min(first.values()) > 0.8 * 500
    assert len({homes(f"tenant {number}", "chat", CORES)[0] for number in range(50)}) > 5


async def test_sessions_of_an_application_share_a_shard(pair: list[Served]) -> None:
    found = Counter[int]()
    for number in range(12):
        (at,) = {await begin(asked, f"app {number}", "other") for asked in pair}
        found[at] += 1
    assert set(found) == {0, 1}
    assert [await begin(asked) for asked in pair] == [0, 1], "sessions without an application stay"


async def test_a_graph_with_a_new_session_is_sent_to_its_home(pair: list[Served]) -> None:
    call = {"name": "x", "is_output": True}
    graph = {"calls": [{"template": "Say {{x}}", "parameters": [call]}]}
    for number in range(4):
        app = f"app {number}"
        at = await begin(pair[0], app)
        for asked in pair:
            status, answer = await asked.post(
                "/v1/semantic_graph", graph | {"session": {"apps": [app]}}
            )
            assert status == 200, answer
            assert answer["session_id"] % MAX_SHARDS == at


async def app_of_other_shards(shards: list[Served]) -> str:
    """Return an application whose homes are the second shard, then the others in order, then the
    first."""
    names = [f"app {number}" for number in range(100)]
    urls = [served.url for served in shards]
    tenant, wanted = shards[0].core.tenant(None), [*range(1, len(shards)), 0]
    return next(name for name in names if homes(tenant, name, urls) == wanted)


async def test_sessions_start_at_the_asked_shard_if_the_home_is_fuller(
    pair: list[Served],
) -> None:
    app = await app_of_other_shards(pair)
    first, second = pair
    for _ in range(16):
        assert await begin(first, app) == 1
    await begin(second)
    assert await begin(first, app) == 0
    assert await begin(first, app) == 1, "the load is not above 1.25 times the other load plus 16"
    assert await begin(second, app) == 1


async def test_sessions_start_at_the_next_home_if_the_first_rejects_them() -> None:
    ports = free_ports(3)
    async with AsyncExitStack() as stack:
        trio = [await stack.enter_async_context(shard(index, ports)) for index in range(3)]
        app = await app_of_other_shards(trio)
        graph = {
            "calls": [{"template": "Say {{x}}", "parameters": [{"name": "x", "is_output": True}]}]
        }
        for closed, at in (([], 1), ([1], 2), ([1, 2], 0)):
            for index, served in enumerate(trio):
                served.core.is_closing = index in closed
            assert await begin(trio[0], app) == at
            status, answer = await trio[0].post(
                "/v1/semantic_graph", graph | {"session": {"apps": [app]}}
            )
            assert status == 200, answer
            assert answer["session_id"] % MAX_SHARDS == at
        trio[1].core.is_closing = trio[2].core.is_closing = False


async def test_sessions_start_elsewhere_while_the_home_has_too_little_kv(
    pair: list[Served],
) -> None:
    app = await app_of_other_shards(pair)
    first, second = pair

    async def fill(agent: Program) -> None:
        """Fill 40% of the KV of the session's engine."""
        text = f"{agent.session_id:<40000}"  # different for each session
        await agent.get(await agent.call("{{x}} {{out}}", inputs={"x": text}))

    async with program(second.client) as one, program(second.client) as another:
        await fill(one)
        assert await begin(first, app) == 1
        await fill(another)
        assert await begin(first, app) == 0
        async with program(first.client) as here, program(first.client) as too:
            await fill(here)
            await fill(too)
            assert await begin(first, app) == 1, "no shard has more free KV"
        assert await begin(first, app) == 0
    assert await begin(first, app) == 1


async def test_sessions_start_elsewhere_if_the_home_rejects_all(pair: list[Served]) -> None:
    app = await app_of_other_shards(pair)
    pair[1].core.is_closing = True
    assert await begin(pair[0], app) == 0
    pair[1].core.is_closing = False
    assert await begin(pair[0], app) == 1


async def test_sessions_start_elsewhere_if_the_home_is_down() -> None:
    ports = free_ports()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(shard(0, ports))
        async with shard(1, ports) as second:
            app = await app_of_other_shards([first, second])
            assert await begin(first, app) == 1
        assert await begin(first, app) == 0
        headers = {"x-parrot-forwarded": "1", "x-parrot-load": "no number"}
        url = f"{first.url}/v1/session"
        async with aiohttp.ClientSession() as http:
            answer = await http.post(url, json={"apps": [app]}, headers=headers)
            assert (await answer.json())["session_id"] % MAX_SHARDS == 0
