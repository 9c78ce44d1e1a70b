"""Where sessions begin that have an application's name."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.serve.shards.affinity import Load, home
from parrot.serve.shards.shard import MAX_SHARDS
from tests.serve.shards.test_shards import Served, free_ports, shard

CORES = [f"http://core-{index}:9000" for index in range(8)]


@pytest.fixture
async def pair() -> AsyncIterator[list[Served]]:
    ports = free_ports()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(shard(index, ports)) for index in range(2)]


async def begin(asked: Served, *apps: str, key: str | None = None) -> int:
    """The shard of a new session."""
    session = await asked.client.create_session(api_key=key, apps=list(apps))
    return session.session_id % MAX_SHARDS


@given(st.text(), st.text(), st.integers(1, 7))
def test_applications_move_only_to_the_shard_that_came(tenant: str, app: str, count: int) -> None:
    before, after = home(tenant, app, CORES[:count]), home(tenant, app, CORES[: count + 1])
    assert after in (before, count)


@pytest.mark.parametrize(
    ("home_has", "asked_has", "spills"),
    [
        ((16, 16), (0, 0), False),
        ((17, 0), (0, 99), True),
        ((0, 17), (99, 0), True),
        ((141, 141), (100, 100), False),
        ((142, 0), (100, 0), True),
        ((0, 142), (0, 100), True),
    ],
)
def test_a_shard_spills_when_it_has_much_more_sessions_or_calls(
    home_has: tuple[int, int], asked_has: tuple[int, int], spills: bool
) -> None:
    assert Load(*home_has).is_much_above(Load(*asked_has)) == spills


@given(st.integers(0, 10**8), st.integers(0, 10**8))
def test_a_load_is_told_in_a_header(sessions: int, calls: int) -> None:
    load = Load(sessions, calls)
    assert Load.parse(load.header.decode()) == load


@pytest.mark.parametrize("header", ["", "7", "1 2 3", "-1 2", "no number", "1.5 2"])
def test_what_is_no_load_is_not_read(header: str) -> None:
    assert Load.parse(header) is None


def test_applications_are_spread_evenly() -> None:
    homes = Counter(home("acme", f"app {number}", CORES) for number in range(4000))
    assert max(homes.values()) < 1.2 * 500
    assert min(homes.values()) > 0.8 * 500
    assert len({home(f"tenant {number}", "chat", CORES) for number in range(50)}) > 5


async def test_an_applications_sessions_are_together_whoever_is_asked(pair: list[Served]) -> None:
    found = Counter[int]()
    for number in range(12):
        (at,) = {await begin(asked, f"app {number}", "other") for asked in pair}
        found[at] += 1
    assert set(found) == {0, 1}
    assert [await begin(asked) for asked in pair] == [0, 1], "they have no application"


async def test_a_graph_with_a_session_of_its_own_is_sent_home(pair: list[Served]) -> None:
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


async def homeless_app(pair: list[Served]) -> str:
    """An application whose home is the second."""
    names = [f"app {number}" for number in range(100)]
    urls = [served.url for served in pair]
    tenant = pair[0].core.tenant(None)
    return next(name for name in names if home(tenant, name, urls) == 1)


async def test_where_the_home_is_much_fuller_they_begin_where_they_are_asked_for(
    pair: list[Served],
) -> None:
    app = await homeless_app(pair)
    first, second = pair
    for _ in range(16):
        assert await begin(first, app) == 1
    await begin(second)
    assert await begin(first, app) == 0
    assert await begin(first, app) == 1, "that is no more than 16 above one and a quarter"
    assert await begin(second, app) == 1


async def test_where_the_home_refuses_all_too(pair: list[Served]) -> None:
    app = await homeless_app(pair)
    pair[1].core.is_closing = True
    assert await begin(pair[0], app) == 0
    pair[1].core.is_closing = False
    assert await begin(pair[0], app) == 1


async def test_where_the_home_is_down_too() -> None:
    ports = free_ports()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(shard(0, ports))
        async with shard(1, ports) as second:
            app = await homeless_app([first, second])
            assert await begin(first, app) == 1
        assert await begin(first, app) == 0
        headers = {"x-parrot-forwarded": "1", "x-parrot-load": "no number"}
        url = f"{first.url}/v1/session"
        async with aiohttp.ClientSession() as http:
            answer = await http.post(url, json={"apps": [app]}, headers=headers)
            assert (await answer.json())["session_id"] % MAX_SHARDS == 0
