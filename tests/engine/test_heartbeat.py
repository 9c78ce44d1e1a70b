"""Registration in virtual time, with a ServeCore that starts, stops and forgets its engines."""

import asyncio
import logging
import socket
import time

import pytest
from fastapi import Request

from parrot.engine.app import Fence, ReorderBuffer
from parrot.engine.config import SimConfig
from parrot.engine.core.steps import DeviceLost
from parrot.engine.heartbeat import MAX_RETRY_S, Heartbeat, Registered, reachable
from parrot.engine.service import ServiceState
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import (
    FillRequest,
    GenerateRequest,
    HeartbeatResponse,
    LeaveResponse,
    OutputPart,
    RegisterResponse,
)
from parrot.protocol.engine_client import REGISTRATION_HEADER, CoreIdentity
from parrot.protocol.errors import (
    AuthenticationFailed,
    InvalidRequest,
    QuotaExceeded,
    StaleCore,
    Standby,
    Unavailable,
)
from parrot.protocol.transport import Unreachable
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.logs import LastWarning
from tests.support.manual_clock import ManualClock

INTERVAL_S = 3.0


class FakeServeClient:
    """A ServeCore that answers if `error` is None. `known` holds the engine ids that it has
    assigned since its start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.error = None
        self.registered = asyncio.Event()
        self.known: set[int] = set()
        self.infos = []
        self.times: list[float] = []
        self.beats: list[int] = []
        self.fence = Fence()
        self.left: list[tuple[int, float]] = []
        self.outputs: list[list[OutputPart]] = []
        self.warnings = LastWarning()
        self.warned: list[tuple[str, float | None]] = []

    def _answer(self) -> None:
        self.times.append(self._clock.now())
        if self.error is not None:
            raise self.error

    async def register_engine(self, info) -> RegisterResponse:
        self._answer()
        self.infos.append(info)
        self.known.add(len(self.infos))
        self.registered.set()
        count = len(self.infos)
        return RegisterResponse(engine_id=count, core=f"core{count}", epoch=count, lease_s=30.0)

    async def engine_heartbeat(
        self, engine_id, engine_name, runtime_info, core
    ) -> HeartbeatResponse:
        self.outputs.append(runtime_info.outputs)
        self.warned.append((runtime_info.last_warning, runtime_info.warned_at))
        self._answer()
        assert core == f"core{engine_id}"
        assert engine_name == "sim:9001"
        assert runtime_info.num_max_blocks == 8192
        self.beats.append(engine_id)
        return HeartbeatResponse(state="ok" if engine_id in self.known else "unknown")

    async def engine_leave(self, engine_id, core, timeout_s) -> LeaveResponse:
        assert core == f"core{engine_id}"
        self._answer()
        self.left.append((engine_id, timeout_s))
        return LeaveResponse(num_calls=0)


@pytest.fixture
async def scene():
    clock = ManualClock()
    service = SimService(SimConfig(), clock)
    await service.start()
    client = FakeServeClient(clock)
    client.reorder = ReorderBuffer(clock)
    heartbeat = Heartbeat(
        client,
        service,
        client.reorder,
        client.fence,
        clock,
        Registered(INTERVAL_S, [("localhost", 9000)]),
        client.warnings,
    )
    tasks = []
    client.leave = heartbeat.leave

    def start() -> asyncio.Future[None]:
        tasks.append(asyncio.ensure_future(heartbeat.run()))
        return tasks[-1]

    client.start = start
    yield client, clock, service
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await service.close()


async def fill(service, clock):
    """Fill a context on the engine. Takes 0.1 s."""
    filling = asyncio.ensure_future(service.fill(FillRequest(context_id=1, token_ids=[1] * 20)))
    await clock.advance(0.1)
    await filling


async def test_a_heartbeat_has_the_last_warning_of_the_log(scene):
    client, clock, _ = scene
    with client.warnings.listening():
        client.start()
        await clock.advance(INTERVAL_S)
        log = logging.getLogger("parrot.engine")
        log.warning("first")
        log.error("second\nof %d", 2)
        log.info("no warning")
        await clock.advance(INTERVAL_S)
    log.warning("after the server")
    assert client.warned[0] == ("", None)
    text, at = client.warned[1]
    assert text == r"second\nof 2"
    assert abs(time.time() - at) < 60
    assert client.warnings.text == text


async def test_an_engine_registers_once_and_sends_a_heartbeat_every_interval(scene):
    client, clock, _ = scene
    client.start()
    await clock.advance(4 * INTERVAL_S)
    assert len(client.infos) == 1
    assert client.infos[0].engine_name == "sim:9001"
    assert client.beats == [1] * 4
    assert client.times == [0.0, 3.0, 6.0, 9.0, 12.0]


async def test_leave_is_sent_to_a_reachable_core_only(scene):
    client, clock, _ = scene
    client.start()
    await clock.advance(INTERVAL_S)
    await client.leave(60.0)
    assert client.left == [(1, 60.0)]
    await clock.advance(INTERVAL_S)
    assert client.beats == [1, 1]
    client.error = Unavailable("nobody there")
    await client.leave(60.0)
    assert client.left == [(1, 60.0)]


async def test_an_engine_that_leaves_before_it_has_registered_sends_nothing(scene):
    client, clock, _ = scene
    await client.leave(60.0)
    client.start()
    await clock.advance(INTERVAL_S)
    assert client.left == client.infos == []


async def test_an_engine_that_has_left_does_not_register_again(scene):
    """ServeCore has removed the engine by then. A new registration would bring calls to an engine
    that shuts down."""
    client, clock, _ = scene
    client.start()
    await clock.advance(INTERVAL_S)
    era = client.fence.era
    await client.leave(60.0)
    client.known.clear()
    await clock.advance(10 * INTERVAL_S)
    assert client.beats == [1, 1]
    assert len(client.infos) == 1
    assert client.fence.era == era + 1, "the engine's running calls continue"


@pytest.mark.parametrize("state", [ServiceState.CLOSED, ServiceState.LOST])
async def test_an_engine_that_closes_or_is_lost_does_not_register_again(scene, monkeypatch, state):
    """ServeCore has removed the engine because it rejects calls. After a new registration,
    ServeCore would send calls that fail."""
    client, clock, service = scene
    running = client.start()
    await clock.advance(INTERVAL_S - 0.1)
    client.known.clear()
    beat = client.engine_heartbeat

    async def beat_and_change_state(*args):
        monkeypatch.setattr(service, "state", lambda: state)
        return await beat(*args)

    monkeypatch.setattr(client, "engine_heartbeat", beat_and_change_state)
    await clock.advance(10 * INTERVAL_S)
    assert client.beats == [1]
    assert len(client.infos) == 1
    assert running.done()
    assert isinstance(running.exception(), DeviceLost) == (state is ServiceState.LOST)


async def test_heartbeats_contain_outputs_without_a_reader_until_they_are_acknowledged(scene):
    client, clock, service = scene
    client.start()
    await clock.advance(0.0)
    wanted = {"context_id": 4, "fills": [{"context_id": 4, "token_ids": [97] * 20}]}
    request = GenerateRequest.model_validate(wanted | {"sampling_config": {"max_gen_length": 6000}})
    generating = asyncio.ensure_future(service.generate(request))
    await clock.advance(INTERVAL_S)
    client.error = Unavailable("gone")
    await clock.advance(INTERVAL_S)
    client.error = None
    await clock.advance(60.0)
    whole = (await generating).generated_ids
    first, lost, *later = [parts[0] for parts in client.outputs if parts]
    # The failed heartbeat may have been too large, so this one has no outputs.
    assert client.outputs[2] == []
    assert first.start == 0
    assert first.end == lost.start == later[0].start < lost.end < later[0].end
    reported = [i for part in (first, *later) for i in part.token_ids()]
    assert len(reported) > len(whole) // 2
    assert reported == whole[: len(reported)]
    assert not client.outputs[-1]


async def test_the_engine_retries_with_growing_intervals_until_a_core_starts(scene):
    client, clock, _ = scene
    client.error = Unavailable("nobody there")
    client.start()
    await clock.advance(60.0)
    gaps = [b - a for a, b in zip(client.times, client.times[1:], strict=False)]
    assert gaps[0] < 1.0
    assert gaps == sorted(gaps)
    assert max(gaps) == MAX_RETRY_S
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 1


async def test_the_engine_registers_again_when_the_core_does_not_know_it(scene):
    client, clock, service = scene
    client.start()
    await clock.advance(INTERVAL_S)
    await fill(service, clock)
    assert service.runtime_info().num_free_blocks < 8192
    client.reorder.free([7])  # This free comes from the old core. Its request never arrives.
    client.known.clear()
    await clock.advance(INTERVAL_S)
    assert len(client.infos) == 2
    first, second = client.infos
    assert first.registration != second.registration
    assert first == second.model_copy(update={"registration": first.registration})
    await client.reorder.enter([FillRequest(context_id=7, token_ids=[1])])
    assert service.runtime_info().num_free_blocks == 8192  # The contexts of the old core are freed.
    await clock.advance(2 * INTERVAL_S)
    assert client.beats[-1] == 2


def sent_under(registration: str | None) -> Request:
    """A request of ServeCore under this registration."""
    name = REGISTRATION_HEADER.encode()
    headers = [] if registration is None else [(name, registration.encode())]
    return Request({"type": "http", "headers": headers})


async def test_requests_of_an_earlier_registration_are_refused(scene, monkeypatch):
    """The network may deliver such a request late. Its contexts would never be freed."""
    client, clock, _ = scene
    register = client.register_engine

    async def refuse(info):
        raise Unavailable("starting")

    client.start()
    await clock.advance(INTERVAL_S)
    (first,) = client.infos
    client.fence.check(sent_under(first.registration))
    client.known.clear()
    monkeypatch.setattr(client, "register_engine", refuse)
    await clock.advance(INTERVAL_S)
    with pytest.raises(StaleCore):
        client.fence.check(sent_under(first.registration))
    monkeypatch.setattr(client, "register_engine", register)
    await clock.advance(MAX_RETRY_S)
    second = client.infos[-1]
    with pytest.raises(StaleCore):
        client.fence.check(sent_under(first.registration))
    client.fence.check(sent_under(second.registration))
    client.fence.check(sent_under(None))


async def test_after_a_lost_registration_answer_no_contexts_stay(scene, monkeypatch):
    client, clock, service = scene
    register = client.register_engine

    async def lose_the_answer(info):
        await register(info)
        monkeypatch.setattr(client, "register_engine", register)
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(client, "register_engine", lose_the_answer)
    await fill(service, clock)
    client.start()
    await clock.advance(0.1)
    assert service.runtime_info().num_free_blocks == 8192  # ServeCore may use the same ids again.
    await fill(service, clock)  # ServeCore knows the engine and sends requests.
    assert service.runtime_info().num_free_blocks < 8192
    await clock.advance(INTERVAL_S)
    first, second = client.infos
    assert service.runtime_info().num_free_blocks == 8192
    with pytest.raises(StaleCore):
        client.fence.check(sent_under(first.registration))
    client.fence.check(sent_under(second.registration))


async def test_an_outage_does_not_end_a_registration(scene):
    client, clock, _ = scene
    client.start()
    await clock.advance(INTERVAL_S)
    client.error = Unavailable("restarting")
    await clock.advance(10.0)
    client.error = None
    await clock.advance(MAX_RETRY_S + INTERVAL_S)
    assert len(client.infos) == 1
    assert set(client.beats) == {1}


async def test_contexts_are_freed_when_the_lease_of_an_unreachable_core_ends(scene):
    client, clock, service = scene
    client.start()
    await clock.advance(INTERVAL_S)
    await fill(service, clock)
    client.error = Unavailable("gone")
    await clock.advance(28.0)  # The last request with an answer was sent 28.1 s ago.
    assert service.runtime_info().num_free_blocks < 8192
    await clock.advance(5.0)
    assert service.runtime_info().num_free_blocks == 8192
    client.fence.admit(CoreIdentity(1, "core1"))
    client.error = None  # The engine registers again, although ServeCore might still know it.
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 2
    client.fence.admit(CoreIdentity(2, "core2"))
    with pytest.raises(StaleCore):
        client.fence.admit(CoreIdentity(1, "core1"))


async def test_a_lease_starts_at_the_attempt_that_was_answered(scene):
    client, clock, _ = scene
    client.start()
    await clock.advance(INTERVAL_S)
    client.error = Unavailable("restarting")
    await clock.advance(22.0)
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert client.beats == [1, 1]
    assert client.times[-1] > 28.0
    client.error = Unavailable("restarting again")
    await clock.advance(10.0)  # The first attempt of the answered heartbeat was 34 s ago.
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 1


def test_the_fence_admits_only_the_core_that_owns_the_engine():
    fence = Fence()
    old, owner, new = CoreIdentity(1, "a"), CoreIdentity(2, "b"), CoreIdentity(3, "c")
    fence.admit(old)  # No core owns the engine yet.
    fence.registered(owner)
    fence.admit(owner)
    for other in (old, new, CoreIdentity(2, "x")):
        with pytest.raises(StaleCore):
            fence.admit(other)
    fence.released()
    for one in (owner, new):  # The answer of either core may be in flight.
        fence.admit(one)
    for one in (old, CoreIdentity(2, "x")):
        with pytest.raises(StaleCore):
            fence.admit(one)
    fence.registered(old)  # The answer to the engine's own registration decides.
    fence.admit(old)


@pytest.mark.parametrize("header", ["", "x y", "1", "1 ", "-1 x", "9" * 30 + " x", "\u0661 x"])
def test_invalid_core_headers_are_refused(header):
    with pytest.raises(InvalidRequest):
        CoreIdentity.parse(header)
    named = CoreIdentity.new()
    assert CoreIdentity.parse(named.header) == named


async def test_registration_is_retried_after_a_wrong_token(scene, caplog):
    client, clock, _ = scene
    client.error = AuthenticationFailed("wrong token")
    client.start()
    await clock.advance(20.0)
    assert [r.message for r in caplog.records if "wrong token" in r.message] == [
        "ServeCore: wrong token; retrying"
    ]
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 1


async def test_each_reason_for_a_failed_registration_is_logged_once(scene, caplog):
    client, clock, _ = scene
    client.error = Unavailable("nobody there")
    client.start()
    await clock.advance(20.0)
    client.error = AuthenticationFailed("wrong token")
    await clock.advance(20.0)
    assert [record.message for record in caplog.records if "retrying" in record.message] == [
        "ServeCore: nobody there; retrying",
        "ServeCore: wrong token; retrying",
    ]


async def test_an_engine_on_all_interfaces_registers_a_reachable_address(scene):
    _, _, service = scene
    info = service.engine_info()
    assert await reachable(info, [("localhost", 9000)]) is info
    wild = info.model_copy(update={"host": "0.0.0.0"})
    assert (await reachable(wild, [("127.0.0.1", 9000)])).host == "127.0.0.1"


async def test_registration_is_retried_while_the_name_of_the_core_is_unknown(monkeypatch, caplog):
    """This happens if both start together and the name server learns of ServeCore later."""
    num_questions = 0
    ask = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        nonlocal num_questions
        if host != "core.example":
            return ask(host, *args, **kwargs)
        num_questions += 1
        if num_questions == 1:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    service = SimService(SimConfig(host="0.0.0.0"))
    await service.start()
    client = FakeServeClient(clock := MonotonicClock())
    cores = [("core.example", 9000)]
    heartbeat = Heartbeat(
        client, service, ReorderBuffer(clock), Fence(), clock, Registered(INTERVAL_S, cores),
        LastWarning(),
    )  # fmt: skip
    running = asyncio.ensure_future(heartbeat.run())
    async with asyncio.timeout(10):
        await client.registered.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await service.close()
    assert client.infos[0].host == "127.0.0.1"
    assert "cannot reach core.example: Name or service not known; retrying" in caplog.text


async def test_a_lost_engine_does_not_register_again(scene, monkeypatch):
    client, clock, service = scene
    heartbeat = Heartbeat(
        client,
        service,
        ReorderBuffer(clock),
        Fence(),
        clock,
        Registered(INTERVAL_S, [("localhost", 9000)]),
        LastWarning(),
    )
    task = asyncio.ensure_future(heartbeat.run())
    await client.registered.wait()
    monkeypatch.setattr(service._driver, "is_lost", True)
    while not task.done():
        await clock.advance(INTERVAL_S)
    with pytest.raises(DeviceLost):
        await task
    assert not client.beats


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("http://localhost:9000: connection refused"),
        Standby("another one serves"),
        AuthenticationFailed("wrong token"),
        QuotaExceeded("there are 64 engines"),
    ],
)
async def test_contexts_of_direct_clients_stay_until_a_core_accepts_the_engine(scene, error):
    client, clock, service = scene
    client.error = error
    await fill(service, clock)
    client.start()
    await clock.advance(4 * MAX_RETRY_S)
    assert len(client.times) > 3
    assert service.runtime_info().num_cached_tokens == 32  # Two blocks.
    client.error = None  # From here on, ServeCore assigns the ids of contexts.
    await clock.advance(MAX_RETRY_S)
    assert client.registered.is_set()
    assert service.runtime_info().num_cached_tokens == 0
