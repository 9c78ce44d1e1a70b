"""One engine and two ServeCores, which see nothing of each other there. Real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from parrot.engine.app import create_app
from parrot.engine.config import SimConfig, parse_engine_config
from parrot.engine.owners.owners import Owner, Owners
from parrot.engine.owners.share import Share, shares
from parrot.engine.reorder import ReorderBuffer
from parrot.engine.sim.engine import SimService
from parrot.protocol.engine_api import (
    EmbedRequest,
    FillRequest,
    GenerateRequest,
    LeaseUse,
    ServerLoad,
    StreamChunk,
)
from parrot.protocol.engine_client import (
    CORE_HEADER,
    REGISTRATION_HEADER,
    CoreIdentity,
    EngineClient,
)
from parrot.protocol.errors import Cancelled, NotFound, StaleCore
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from tests.support.app_server import serve_app

SLOW = {"step_s": 0.02, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
SHARED = {"shard_cores": [{"host": "10.0.0.2"}], "instance": SLOW}


@dataclass
class Scene:
    service: SimService
    owners: Owners
    url: str
    clients: list[EngineClient]
    identities: list[CoreIdentity]

    async def lose(self, owner: Owner) -> None:
        """As its heartbeat does when the ServeCore has not answered for its lease."""
        owner.fence.released()
        owner.reorder.reset()
        assert owner.share is not None
        await owner.service.reset()
        owner.share.lost()


def beat(share: Share, service: SimService) -> None:
    """A heartbeat to a ServeCore that uses nothing."""
    lease = share.offer(service.engine_info())
    share.answered(LeaseUse(number=lease.number, tokens=lease.tokens, calls=lease.calls))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    service = SimService(config := SimConfig.model_validate(SHARED))
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    async with serve_app(app) as url:
        scene = Scene(service, app.state.owners, url, [], [])
        for owner in scene.owners:
            identity = CoreIdentity.new()
            headers = {REGISTRATION_HEADER: owner.fence.registering()}
            owner.fence.registered(identity)
            http = HttpClient(url, headers=headers | {CORE_HEADER: identity.header})
            scene.clients.append(EngineClient(http))
            scene.identities.append(identity)
        for _ in range(2):  # the first had all as long as it was alone
            for owner in scene.owners:
                assert owner.share is not None
                beat(owner.share, service)
        yield scene
        for client in scene.clients:
            await client.close()
    service.check_integrity()
    await service.close()


def fill(text: bytes, context_id: int = 1, parent: int = -1, salt: str = "") -> FillRequest:
    return FillRequest(
        context_id=context_id, parent_context_id=parent, token_ids=[*text], cache_salt=salt
    )


def generation(context_id: int, num_tokens: int, parent: int = -1) -> GenerateRequest:
    piece = {"context_id": context_id, "token_ids": [97] * 20, "parent_context_id": parent}
    sampling = {"max_gen_length": num_tokens, "ignore_tokenizer_eos": True}
    return GenerateRequest.model_validate(
        {"context_id": context_id, "parent_context_id": parent, "fills": [piece]}
        | {"sampling_config": sampling}
    )


async def test_equal_ids_are_different_contexts_and_only_own_ones_are_forked(scene: Scene) -> None:
    first, second = scene.clients
    assert (await first.fill(fill(b"a" * 30, salt="x"))).filled_len == 30
    assert (await second.fill(fill(b"b" * 50, salt="y"))).filled_len == 50
    for parent in (2, 3):  # as the engine calls the contexts
        with pytest.raises(NotFound):
            await list(scene.owners)[1].service.fill(fill(b"c", context_id=5, parent=parent))
    assert (await second.fill(fill(b"d", context_id=6, parent=1, salt="y"))).filled_len == 1
    assert await second.free_contexts([1, 6, 2, 3]) == 50 + 51
    assert await first.free_contexts([1]) == 30
    assert await first.free_contexts([1]) == 0


async def test_equal_beginnings_are_shared_within_a_salt_alone(scene: Scene) -> None:
    first, second = scene.clients
    await first.fill(fill(b"a" * 64, salt="x"))
    assert (await second.fill(fill(b"a" * 64, context_id=1, salt="y"))).cached_tokens == 0
    assert (await second.fill(fill(b"a" * 64, context_id=2, salt="x"))).cached_tokens > 0


async def test_the_death_of_one_disturbs_nothing_of_the_other(scene: Scene) -> None:
    first, second = scene.clients
    dying, living = scene.owners
    doomed = asyncio.ensure_future(first.generate(generation(1, 4000)))
    reading = asyncio.ensure_future(dying.service.read(EmbedRequest(inputs=[[97] * 20_000])))
    pieces: list[int] = []
    begun = asyncio.Event()

    def take(chunk: StreamChunk) -> None:
        pieces.extend(chunk.ids)
        begun.set()

    going_on = asyncio.ensure_future(second.generate(generation(1, 40), take))
    await asyncio.wait_for(begun.wait(), 30)
    (part,) = dying.service.runtime_info({}).outputs
    assert part.context_id == 1
    told = dying.service.runtime_info({1: part.end}).outputs
    assert [later.start for later in told] == [part.end]
    assert living.service.runtime_info({}).outputs == [], "it is streamed"
    await scene.lose(dying)
    with pytest.raises(Cancelled):
        await doomed
    with pytest.raises(Exception, match="engine"):
        await reading
    answer = await going_on
    assert len(answer.generated_ids) == 40
    assert pieces == answer.generated_ids
    with pytest.raises(StaleCore):
        await first.fill(fill(b"late", context_id=9))
    assert await second.free_contexts([1]) == 60
    assert scene.service.runtime_info().num_cached_tokens == 0


async def test_what_does_not_say_whose_it_is_gets_facts_alone(scene: Scene) -> None:
    async with HttpClient(scene.url) as http:
        unnamed = EngineClient(http)
        await unnamed.ping()
        assert await unnamed.tokenizer()
        for refused in (unnamed.fill(fill(b"x")), unnamed.free_contexts([1])):
            with pytest.raises(StaleCore, match="name your registration"):
                await refused
    mixed = {CORE_HEADER: scene.identities[0].header}
    mixed[REGISTRATION_HEADER] = list(scene.owners)[1].fence.registration
    async with HttpClient(scene.url, headers=mixed) as http:
        with pytest.raises(StaleCore, match="belongs to another ServeCore"):
            await EngineClient(http).fill(fill(b"x"))


async def test_each_is_told_of_the_others_load(scene: Scene) -> None:
    first, second = scene.owners
    async with first.place(generation(1, 80)):
        info = second.service.runtime_info()
        assert info.server_load == ServerLoad(num_running=1, num_others=1, other_tokens=100)
        own = first.service.runtime_info().server_load
        assert own == ServerLoad(num_running=1)
    assert second.service.runtime_info().server_load == ServerLoad()
    assert first.service.engine_info().is_leased


async def test_a_heartbeat_that_is_asked_for_is_that_of_who_asks(scene: Scene) -> None:
    first, second = (owner.share for owner in scene.owners)
    assert first is not None
    assert second is not None
    other, due = asyncio.ensure_future(first.due()), asyncio.ensure_future(second.due())
    await scene.clients[1].beat()
    await asyncio.wait_for(due, 30)
    assert not other.done()
    beat(second, scene.service)
    again = asyncio.ensure_future(second.due())
    await asyncio.sleep(0)
    assert not again.done(), "it has come"
    for waiting in (other, again):
        waiting.cancel()


async def test_calls_beyond_the_lease_wait_for_own_ones_alone(scene: Scene) -> None:
    info = scene.service.engine_info().model_copy(update={"tasks_capacity": 4})
    first, second = shares(2)
    for share in (first, second):
        share.offer(info)
    call = generation(1, 5)
    async with AsyncExitStack() as stack:
        ending = await stack.enter_async_context(AsyncExitStack())
        for held in (ending, ending, stack, stack):  # nobody else was there
            await held.enter_async_context(first.place(call))
        waiting = asyncio.ensure_future(stack.enter_async_context(second.place(call)))
        await asyncio.sleep(0)
        assert (waiting.done(), first.num_waited, second.num_waited) == (False, 0, 1)
        await ending.aclose()
        first.answered(LeaseUse(number=first.offer(info).number, tokens=0, calls=2))
        second.offer(info)
        await waiting
        cancelled = asyncio.ensure_future(stack.enter_async_context(first.place(call)))
        refused = asyncio.ensure_future(stack.enter_async_context(first.place(call)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert (refused.done(), first.num_calls, second.num_calls) == (False, 2, 1)
        first.lost()
        await refused  # by the fence
    assert (first.num_calls, first.num_tokens, second.num_calls) == (0, 0, 0)


async def test_a_cancelled_call_has_its_place_until_it_has_ended(scene: Scene) -> None:
    info = scene.service.engine_info().model_copy(update={"tasks_capacity": 2})
    first, second = shares(2)

    def answer(share: Share, wanted: int, used: int = 0) -> int:
        lease = share.offer(info)
        use = LeaseUse(number=lease.number, tokens=0, calls=used, wanted_calls=wanted)
        share.answered(use)
        return lease.calls

    assert answer(first, 2, used=2) == 2
    async with AsyncExitStack() as stack, AsyncExitStack() as cancelled:
        await stack.enter_async_context(first.place(generation(1, 5)))
        await cancelled.enter_async_context(first.place(generation(2, 5)))
        assert answer(second, 1) == 0
        assert answer(first, 1, used=1) == 1  # the ServeCore has cancelled one
        assert answer(second, 1) == 0, "it runs still"
        due = asyncio.ensure_future(second.due())
        await asyncio.sleep(0)
        assert not due.done()
        await cancelled.aclose()
        await due
        assert answer(second, 1) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"shard_cores": [{"host": "localhost", "port": 9000}]}, "same address"),
        ({"shard_cores": [{"host": "b"}], "tasks_capacity": 1}, "must be 2"),
    ],
)
def test_configs_that_cannot_be(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_engine_config({"engine_type": "sim"} | bad, "x")
