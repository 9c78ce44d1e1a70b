from collections.abc import AsyncIterator

import pytest

from parrot.protocol.errors import AuthenticationFailed, NotFound, QuotaExceeded, SessionGone
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.config import CoreConfig
from parrot.serve.scheduling.load import LoadIndex
from parrot.serve.scheduling.task import Estimates
from parrot.serve.sessions import Session, SessionRegistry
from parrot.serve.tenants.table import TenantTable
from parrot.utils.heaps import TimerQueue
from tests.serve.graph.held_runner import HeldRunner, add_reader, link_call
from tests.support.manual_clock import ManualClock


class World:
    """A registry on virtual time. Sessions live for 10 seconds, and stay when they expire."""

    def __init__(self) -> None:
        self.clock = ManualClock(start=50)
        self.timers = TimerQueue(self.clock)
        self.runner = HeldRunner()
        self.expired: list[tuple[Session, float]] = []
        config = CoreConfig(max_sessions_num=3, session_life_span=10.0)
        self.registry = SessionRegistry(
            config,
            TenantTable(config),
            self.clock,
            self.timers,
            first_id=100,
        )
        self.registry.connect(self.runner, Estimates(LoadIndex().pace), self.expire)

    def expire(self, session: Session, reason: str) -> None:
        self.expired.append((session, self.clock.now()))

    def create(self) -> Session:
        return self.registry.create("tenant", ["app"])


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.timers.close()


async def test_ids_are_never_reused_and_the_past_is_told_from_the_unknown(
    world: World,
) -> None:
    first = world.create()
    world.registry.retire(first)
    world.registry.remove(first)
    second = world.create()
    assert second.id > first.id
    assert second.auth != first.auth
    with pytest.raises(SessionGone):
        world.registry.authenticate(first.id, first.auth)
    for unknown in (second.id + 1, 99, -1, 10**30):
        with pytest.raises(NotFound):
            world.registry.authenticate(unknown, second.auth)


@pytest.mark.parametrize("wrong", [None, "", "x", "é", "\ud800"])
async def test_a_wrong_auth_is_refused(world: World, wrong: str | None) -> None:
    session, gone = world.create(), world.create()
    world.registry.retire(gone)
    world.registry.remove(gone)
    for session_id in (session.id, gone.id, gone.id + 1):  # nobody can tell which are there
        with pytest.raises(NotFound if wrong else AuthenticationFailed):
            world.registry.authenticate(session_id, wrong)
        with pytest.raises(NotFound):
            world.registry.authenticate(session_id, session.auth + "x")
    with pytest.raises(NotFound):
        world.registry.authenticate(gone.id, session.auth)
    assert world.registry.authenticate(session.id, session.auth) is session


async def test_the_number_of_sessions_is_limited(world: World) -> None:
    sessions = [world.create() for _ in range(3)]
    with pytest.raises(QuotaExceeded):
        world.create()
    world.registry.retire(sessions[1])
    world.registry.remove(sessions[1])
    world.create()
    assert len(world.registry) == 3


async def test_an_idle_session_expires_after_its_life_span(world: World) -> None:
    session = world.create()
    await world.clock.advance(9)
    assert world.expired == []
    assert world.registry.remaining_s(session) == 1
    await world.clock.advance(1)
    assert world.expired == [(session, 60)]
    assert len(world.timers) == 0


async def test_activity_renews_a_session(world: World) -> None:
    session = world.create()
    for _ in range(5):
        await world.clock.advance(6)
        world.registry.authenticate(session.id, session.auth)
    assert world.expired == []
    await world.clock.advance(11)
    assert world.expired == [(session, 90)]


async def test_running_work_keeps_a_session(world: World) -> None:
    session = world.create()
    link_call(session.graph, "y", [], output_criteria="latency")
    await world.clock.advance(100)
    assert world.expired == []
    world.runner.finish(world.runner.started[0])
    session.last_active = world.clock.now()  # as ServeCore notes it
    await world.clock.advance(9.5)
    assert world.expired == []
    await world.clock.advance(11)
    assert len(world.expired) == 1


async def test_an_open_read_keeps_a_session_until_its_deadline(world: World) -> None:
    session = world.create()
    node = session.graph.add_variable("x")
    add_reader(session.graph, node, PerformanceCriteria.LATENCY, deadline=50 + 35)
    session.timed_reads[node] = 50 + 35
    await world.clock.advance(34)
    assert world.expired == []
    await world.clock.advance(1)
    assert world.expired == [(session, 85)]


async def test_a_session_that_was_removed_does_not_expire(world: World) -> None:
    session = world.create()
    world.registry.retire(session)
    world.registry.remove(session)
    await world.clock.advance(100)
    assert world.expired == []
