import pytest

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import AuthenticationFailed, NotFound, QuotaExceeded, SessionGone
from parrot.serve.config import CoreConfig
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.sessions import (
    PUBLIC_TENANT,
    Session,
    SessionExpiry,
    SessionRegistry,
    tenant_of,
)
from parrot.utils.clock import ManualClock
from parrot.utils.timers import TimerQueue
from tests.serve.serve_fakes import FakeRunner, add_reader, link_call, make_graph


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=50)


@pytest.fixture
def registry(clock: ManualClock) -> SessionRegistry:
    return SessionRegistry(CoreConfig(max_sessions_num=3), clock, first_id=100)


def create(registry: SessionRegistry, graph: SessionGraph | None = None) -> Session:
    return registry.create("tenant", ["app"], lambda session_id: graph or make_graph())


def test_ids_are_never_reused_and_the_past_is_told_from_the_unknown(
    registry: SessionRegistry,
) -> None:
    first = create(registry)
    registry.remove(first)
    second = create(registry)
    assert second.id > first.id
    assert second.auth != first.auth
    with pytest.raises(SessionGone):
        registry.authenticate(first.id, first.auth)
    for unknown in (second.id + 1, 99, -1, 10**30):
        with pytest.raises(NotFound):
            registry.authenticate(unknown, second.auth)


@pytest.mark.parametrize("wrong", [None, "", "x", "é", "\ud800"])
def test_a_wrong_auth_is_refused(registry: SessionRegistry, wrong: str | None) -> None:
    session = create(registry)
    with pytest.raises(AuthenticationFailed):
        registry.authenticate(session.id, wrong)
    with pytest.raises(AuthenticationFailed):
        registry.authenticate(session.id, session.auth + "x")
    assert registry.authenticate(session.id, session.auth) is session


def test_the_number_of_sessions_is_limited(registry: SessionRegistry) -> None:
    sessions = [create(registry) for _ in range(3)]
    with pytest.raises(QuotaExceeded):
        create(registry)
    registry.remove(sessions[1])
    create(registry)
    assert len(registry) == 3


def test_tenants() -> None:
    assert tenant_of(None, ()) == PUBLIC_TENANT
    keys = ("alpha", "beta")
    assert tenant_of("alpha", keys) != tenant_of("beta", keys)
    assert tenant_of("alpha", keys) == tenant_of("alpha", ())
    assert "alpha" not in tenant_of("alpha", keys)
    for wrong in (None, "", "gamma", "alph", "\ud800"):
        with pytest.raises(AuthenticationFailed):
            tenant_of(wrong, keys)


class Watched:
    """A session under expiry with a life span of 10 seconds."""

    def __init__(self, clock: ManualClock, registry: SessionRegistry) -> None:
        self.runner = FakeRunner()
        self.graph = make_graph(self.runner, clock)
        self.session = create(registry, self.graph)
        self.timers = TimerQueue(clock)
        self.expired: list[tuple[Session, float]] = []
        self.expiry = SessionExpiry(self.timers, clock, 10.0, self.expire)
        self.clock = clock
        self.expiry.watch(self.session)

    def expire(self, session: Session) -> None:
        self.expired.append((session, self.clock.now()))


async def test_an_idle_session_expires_after_its_life_span(
    clock: ManualClock, registry: SessionRegistry
) -> None:
    watched = Watched(clock, registry)
    await clock.advance(9)
    assert watched.expired == []
    assert watched.expiry.remaining_s(watched.session) == 1
    await clock.advance(1)
    assert watched.expired == [(watched.session, 60)]
    assert len(watched.timers) == 0


async def test_activity_renews_a_session(clock: ManualClock, registry: SessionRegistry) -> None:
    watched = Watched(clock, registry)
    for _ in range(5):
        await clock.advance(6)
        registry.authenticate(watched.session.id, watched.session.auth)
    assert watched.expired == []
    await clock.advance(11)
    assert watched.expired == [(watched.session, 90)]


async def test_running_work_keeps_a_session(clock: ManualClock, registry: SessionRegistry) -> None:
    watched = Watched(clock, registry)
    link_call(watched.graph, "y", [], output_criteria="latency")
    await clock.advance(100)
    assert watched.expired == []
    watched.runner.finish(watched.runner.started[0])
    watched.session.last_active = clock.now()  # as ServeCore notes it
    await clock.advance(9.5)
    assert watched.expired == []
    await clock.advance(11)
    assert len(watched.expired) == 1


async def test_an_open_read_keeps_a_session_until_its_deadline(
    clock: ManualClock, registry: SessionRegistry
) -> None:
    watched = Watched(clock, registry)
    node = watched.graph.add_variable("x")
    add_reader(watched.graph, node, PerformanceCriteria.LATENCY, deadline=50 + 35)
    watched.session.timed_reads[watched] = 50 + 35
    await clock.advance(34)
    assert watched.expired == []
    await clock.advance(1)
    assert watched.expired == [(watched.session, 85)]


async def test_a_forgotten_session_does_not_expire(
    clock: ManualClock, registry: SessionRegistry
) -> None:
    watched = Watched(clock, registry)
    watched.expiry.forget(watched.session)
    await clock.advance(100)
    assert watched.expired == []
