"""The ids, credentials, limits and expiry of sessions."""

from collections.abc import AsyncIterator

import pytest

from parrot.protocol.errors import (
    AuthenticationFailed,
    NotFound,
    QuotaExceeded,
    SessionGone,
    TimedOut,
)
from parrot.serve.core import ServeCore
from parrot.serve.events import SessionExpired
from tests.support.held_world import HeldEngine, HeldWorld
from tests.support.manual_clock import ManualClock


class World(HeldWorld):
    """A core with at most 3 sessions, which expire after 10 s. The first one exists."""

    def __init__(self, core: ServeCore, engine: HeldEngine, clock: ManualClock) -> None:
        super().__init__(core, engine, clock)
        self.expired: list[tuple[int, float]] = []  # seconds since the start
        core.events.add({SessionExpired: self._on_expired})
        self._start = clock.now()

    def _on_expired(self, event: SessionExpired) -> None:
        self.expired.append((event.session.id, self.clock.now() - self._start))

    async def end(self) -> None:
        self.core.delete_session(**self.scope)
        await self.settle()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.open(max_sessions_num=3, session_life_span=10.0)
    yield world
    await world.close()


async def test_ids_are_never_reused_and_ended_sessions_differ_from_unknown_ones(
    world: World,
) -> None:
    first_id, first_auth = world.scope.values()
    await world.end()
    world.enter()
    second_id, second_auth = world.scope.values()
    assert second_id > first_id
    assert second_auth != first_auth
    with pytest.raises(SessionGone):
        world.core.sessions.authenticate(first_id, first_auth)
    for unknown in (second_id + 1, 99, -1, 10**30):
        with pytest.raises(NotFound):
            world.core.sessions.authenticate(unknown, second_auth)


@pytest.mark.parametrize("wrong", [None, "", "x", "é", "\ud800"])
async def test_a_wrong_auth_is_rejected(world: World, wrong: str | None) -> None:
    gone_id, gone_auth = world.scope.values()
    await world.end()
    world.enter()
    session_id, auth = world.scope.values()
    authenticate = world.core.sessions.authenticate
    for some_id in (session_id, gone_id, session_id + 1):  # the errors must not reveal which exist
        with pytest.raises(NotFound if wrong else AuthenticationFailed):
            authenticate(some_id, wrong)
        with pytest.raises(NotFound):
            authenticate(some_id, auth + "x")
    with pytest.raises(NotFound):
        authenticate(gone_id, auth)
    with pytest.raises(SessionGone):
        authenticate(gone_id, gone_auth)
    assert authenticate(session_id, auth).id == session_id


async def test_the_number_of_sessions_is_limited(world: World) -> None:
    world.enter()
    world.enter()
    with pytest.raises(QuotaExceeded):
        world.enter()
    await world.end()
    world.enter()
    assert len(world.core.sessions) == 3


async def test_an_idle_session_expires_after_its_life_span(world: World) -> None:
    session = world.core.sessions.authenticate(*world.scope.values())
    await world.clock.advance(9)
    assert world.expired == []
    assert world.core.sessions.remaining_s(session) == 1
    await world.clock.advance(1)
    assert world.expired == [(session.id, 10)]
    assert len(world.core.sessions) == 0


async def test_activity_renews_a_session(world: World) -> None:
    for _ in range(5):
        await world.clock.advance(6)
        session = world.core.sessions.authenticate(*world.scope.values())
    assert world.expired == []
    await world.clock.advance(11)
    assert world.expired == [(session.id, 40)]


async def test_running_work_keeps_a_session(world: World) -> None:
    world.call("y", output_criteria="latency")
    await world.clock.advance(100)
    assert world.expired == []
    await world.finish("y")
    await world.clock.advance(9.5)
    assert world.expired == []
    await world.clock.advance(11)
    assert len(world.expired) == 1


async def test_an_open_read_keeps_a_session_until_its_deadline(world: World) -> None:
    reading = world.read(world.variable(), timeout=35)
    await world.clock.advance(34)
    assert world.expired == []
    assert not reading.done()
    await world.clock.advance(1)
    assert [when for _, when in world.expired] == [35]
    with pytest.raises(TimedOut):
        await reading


async def test_a_session_that_was_removed_does_not_expire(world: World) -> None:
    await world.end()
    await world.clock.advance(100)
    assert world.expired == []
