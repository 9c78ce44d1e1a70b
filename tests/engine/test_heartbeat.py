"""Registration on virtual time, against a ServeCore that comes, goes and forgets."""

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
    """`error` None: ServeCore is up. `known` holds the ids it has given out since it started."""

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
    """Let the engine hold a context, in 0.1 s."""
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


async def test_it_registers_once_and_beats_every_interval(scene):
    client, clock, _ = scene
    client.start()
    await clock.advance(4 * INTERVAL_S)
    assert len(client.infos) == 1
    assert client.infos[0].engine_name == "sim:9001"
    assert client.beats == [1] * 4
    assert client.times == [0.0, 3.0, 6.0, 9.0, 12.0]


async def test_it_leaves_where_it_is_registered_if_anybody_is_there(scene):
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


async def test_it_leaves_at_once_before_it_has_registered(scene):
    client, clock, _ = scene
    await client.leave(60.0)
    client.start()
    await clock.advance(INTERVAL_S)
    assert client.left == client.infos == []


async def test_an_engine_that_has_left_does_not_register_again(scene):
    """ServeCore has given it up by then, and would give it calls while it ends."""
    client, clock, _ = scene
    client.start()
    await clock.advance(INTERVAL_S)
    era = client.fence.era
    await client.leave(60.0)
    client.known.clear()
    await clock.advance(10 * INTERVAL_S)
    assert client.beats == [1, 1]
    assert len(client.infos) == 1
    assert client.fence.era == era + 1, "what it has begun goes on"


@pytest.mark.parametrize("state", [ServiceState.CLOSED, ServiceState.LOST])
async def test_an_engine_that_ends_does_not_register_again(scene, monkeypatch, state):
    """ServeCore has seen that it refuses calls, and would blame each that it gets for its loss."""
    client, clock, service = scene
    running = client.start()
    await clock.advance(INTERVAL_S - 0.1)
    client.known.clear()
    beat = client.engine_heartbeat

    async def beat_at_the_end(*args):
        monkeypatch.setattr(service, "state", lambda: state)
        return await beat(*args)

    monkeypatch.setattr(client, "engine_heartbeat", beat_at_the_end)
    await clock.advance(10 * INTERVAL_S)
    assert client.beats == [1]
    assert len(client.infos) == 1
    assert running.done()
    assert isinstance(running.exception(), DeviceLost) == (state is ServiceState.LOST)


async def test_it_tells_of_outputs_that_nobody_takes_until_that_is_answered(scene):
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
    assert client.outputs[2] == []  # a beat that was refused may have been too large
    assert first.start == 0
    assert first.end == lost.start == later[0].start < lost.end < later[0].end
    told = [i for part in (first, *later) for i in part.token_ids()]
    assert len(told) > len(whole) // 2
    assert told == whole[: len(told)]
    assert not client.outputs[-1]


async def test_it_waits_for_a_core_that_starts_later_ever_less_often(scene):
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


async def test_it_registers_again_when_the_core_has_forgotten_it(scene):
    client, clock, service = scene
    client.start()
    await clock.advance(INTERVAL_S)
    await fill(service, clock)
    assert service.runtime_info().num_free_blocks < 8192
    client.reorder.free([7])  # of the old core, for a request that never came
    client.known.clear()
    await clock.advance(INTERVAL_S)
    assert len(client.infos) == 2
    first, second = client.infos
    assert first.registration != second.registration
    assert first == second.model_copy(update={"registration": first.registration})
    await client.reorder.enter([FillRequest(context_id=7, token_ids=[1])])
    assert service.runtime_info().num_free_blocks == 8192  # the old core's contexts are gone
    await clock.advance(2 * INTERVAL_S)
    assert client.beats[-1] == 2


def sent_under(registration: str | None) -> Request:
    """A request of ServeCore's."""
    name = REGISTRATION_HEADER.encode()
    headers = [] if registration is None else [(name, registration.encode())]
    return Request({"type": "http", "headers": headers})


async def test_what_was_sent_before_it_registered_again_is_refused(scene, monkeypatch):
    """A network may bring it late: nobody would free its contexts."""
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


async def test_a_registration_whose_answer_was_lost_leaves_nothing(scene, monkeypatch):
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
    assert service.runtime_info().num_free_blocks == 8192  # ServeCore may use the ids anew
    await fill(service, clock)  # ServeCore uses the engine that it knows
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


async def test_work_ends_with_the_lease_when_the_core_is_gone(scene):
    client, clock, service = scene
    client.start()
    await clock.advance(INTERVAL_S)
    await fill(service, clock)
    client.error = Unavailable("gone")
    await clock.advance(28.0)  # the last answer was to a request 28.1 s ago
    assert service.runtime_info().num_free_blocks < 8192
    await clock.advance(5.0)
    assert service.runtime_info().num_free_blocks == 8192
    client.fence.admit(CoreIdentity(1, "core1"))
    client.error = None  # it registers again, though ServeCore might know it
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 2
    client.fence.admit(CoreIdentity(2, "core2"))
    with pytest.raises(StaleCore):
        client.fence.admit(CoreIdentity(1, "core1"))


async def test_a_lease_counts_from_the_attempt_that_was_answered(scene):
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
    await clock.advance(10.0)  # 34 s after the first attempt of the beat that was answered
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 1


def test_the_fence_lets_in_whom_the_engine_obeys():
    fence = Fence()
    old, owner, new = CoreIdentity(1, "a"), CoreIdentity(2, "b"), CoreIdentity(3, "c")
    fence.admit(old)  # nobody yet
    fence.registered(owner)
    fence.admit(owner)
    for other in (old, new, CoreIdentity(2, "x")):
        with pytest.raises(StaleCore):
            fence.admit(other)
    fence.released()
    for one in (owner, new):  # whose answer may be on its way
        fence.admit(one)
    for one in (old, CoreIdentity(2, "x")):
        with pytest.raises(StaleCore):
            fence.admit(one)
    fence.registered(old)  # what it says itself counts
    fence.admit(old)


@pytest.mark.parametrize("header", ["", "x y", "1", "1 ", "-1 x", "9" * 30 + " x", "\u0661 x"])
def test_what_names_no_core(header):
    with pytest.raises(InvalidRequest):
        CoreIdentity.parse(header)
    named = CoreIdentity.new()
    assert CoreIdentity.parse(named.header) == named


async def test_a_wrong_token_is_tried_again_not_fatal(scene, caplog):
    client, clock, _ = scene
    client.error = AuthenticationFailed("wrong token")
    client.start()
    await clock.advance(20.0)
    assert [r.message for r in caplog.records if "wrong token" in r.message] == [
        "ServeCore: wrong token; trying on"
    ]
    client.error = None
    await clock.advance(MAX_RETRY_S)
    assert len(client.infos) == 1


async def test_each_reason_for_not_registering_is_said_once(scene, caplog):
    client, clock, _ = scene
    client.error = Unavailable("nobody there")
    client.start()
    await clock.advance(20.0)
    client.error = AuthenticationFailed("wrong token")
    await clock.advance(20.0)
    assert [record.message for record in caplog.records if "trying on" in record.message] == [
        "ServeCore: nobody there; trying on",
        "ServeCore: wrong token; trying on",
    ]


async def test_an_engine_on_all_interfaces_tells_an_address_that_can_be_called(scene):
    _, _, service = scene
    info = service.engine_info()
    assert await reachable(info, [("localhost", 9000)]) is info
    wild = info.model_copy(update={"host": "0.0.0.0"})
    assert (await reachable(wild, [("127.0.0.1", 9000)])).host == "127.0.0.1"


async def test_a_core_whose_name_is_not_known_yet_is_tried_again(monkeypatch, caplog):
    """As when both are started together and the name server learns of ServeCore later."""
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
    assert "no way to core.example: Name or service not known; trying on" in caplog.text


async def test_an_engine_that_is_lost_registers_no_more(scene, monkeypatch):
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
async def test_while_no_core_takes_it_those_who_ask_it_keep_their_work(scene, error):
    client, clock, service = scene
    client.error = error
    await fill(service, clock)
    client.start()
    await clock.advance(4 * MAX_RETRY_S)
    assert len(client.times) > 3
    assert service.runtime_info().num_cached_tokens == 32  # two blocks
    client.error = None  # ServeCore gives out the ids of contexts anew
    await clock.advance(MAX_RETRY_S)
    assert client.registered.is_set()
    assert service.runtime_info().num_cached_tokens == 0
