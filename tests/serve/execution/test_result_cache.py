"""Identical deterministic calls: shared runs and cached results."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import Cancelled, EngineFailed, ModelNumerics, SessionGone, Unavailable
from parrot.protocol.public import (
    CompletionInfo,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.result_cache import ResultCache
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    RunStats,
    SemanticVariable,
    TextPiece,
    TokenizedText,
)
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.manual_clock import ManualClock
from tests.support.requests import given, made, taken, var_ids

GREEDY = {"temperature": 0.0, "max_gen_length": 20}


class Program:
    """One session."""

    def __init__(self, core: ServeCore, api_key: str | None) -> None:
        self.core = core
        self.scope: dict[str, Any] = core.create_session(
            SessionCreateRequest(api_key=api_key)
        ).model_dump()

    def call(
        self, question: str = "same", *inputs: str, sampling: dict[str, Any] = GREEDY, **fields: Any
    ) -> str:
        parameters = [given("q", question)]
        parameters += [taken(f"i{n}", var_id) for n, var_id in enumerate(inputs)]
        template = "Ask " + "".join(f"{{{{{p['name']}}}}} " for p in parameters) + "{{out}}"
        body = {"template": template, "parameters": [*parameters, made("out", **sampling)]}
        request = SemanticCallRequest.model_validate(self.scope | body | fields)
        return var_ids(self.core.submit_call(request))["out"]

    def read(self, var_id: str, **fields: Any) -> asyncio.Task[str]:
        async def text(request: VarGetRequest) -> str:
            return (await self.core.read(request, var_id)).content

        return asyncio.ensure_future(text(self.request(**fields)))

    def stream(self, var_id: str) -> asyncio.Task[list[str]]:
        async def collect() -> list[str]:
            return [text async for text in self.core.stream(self.request(), var_id)]

        return asyncio.ensure_future(collect())

    def request(self, **fields: Any) -> VarGetRequest:
        return VarGetRequest.model_validate(self.scope | fields)

    def infos(self) -> list[CompletionInfo]:
        return self.core.session_info(*self.scope.values()).calls

    def end(self) -> None:
        self.core.delete_session(*self.scope.values())


class World:
    def __init__(self, *, tasks: int = 64, **scheduler: Any) -> None:
        self.clock = ManualClock(100.0)
        config = CoreConfig(global_scheduler=GlobalSchedulerConfig(**scheduler))
        self.engines: dict[str, FakeEngine] = {}
        self.tasks = tasks
        dispatcher = Dispatcher(config, self.clock, lambda info: self.engines[info.engine_name])
        self.core = ServeCore(config, clock=self.clock, dispatcher=dispatcher)

    async def join(self, name: str = "e0", script: Script | None = None) -> FakeEngine:
        engine = fake_engine(name, tasks_capacity=self.tasks, script=script)
        self.engines[name] = engine
        await self.core.register_engine(RegisterRequest(engine_config=engine.info))
        return engine

    def program(self, api_key: str | None = None) -> Program:
        return Program(self.core, api_key)

    async def settle(self) -> None:
        await self.clock.advance(0)
        await self.clock.advance(0)
        self.core.check_integrity()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.settle()
    await world.core.close()


async def test_a_running_call_is_shared_by_many_readers(world: World) -> None:
    engine = await world.join(script=Script(hang_after=0))
    programs = [world.program() for _ in range(3)]
    reads = [p.read(p.call()) for p in programs for _ in range(2)]
    await world.settle()
    assert len(engine.requests) == 1
    engine.resume.set()
    assert len(set(await asyncio.gather(*reads))) == 1
    assert len(engine.requests) == 1
    reused = [info.reused for p in programs for info in p.infos()]
    assert sorted(reused) == [False] + [True] * 5
    assert {info.engine for p in programs for info in p.infos()} == {"e0"}
    assert b"parrot_calls_reused_total 5.0" in b"".join(world.core.metrics())


async def test_a_run_has_at_most_64_waiters(world: World) -> None:
    """All waiters of a run are settled in one turn of the event loop."""
    engine = await world.join(script=Script(hang_after=0))
    program = world.program()
    calls = [program.call() for _ in range(130)]
    reads = [program.read(call) for call in calls]
    await world.settle()
    assert len(engine.requests) == 3
    reads[0].cancel()  # The first run has a free place again.
    await world.settle()
    reads.append(program.read(program.call()))
    await world.settle()
    assert len(engine.requests) == 3
    engine.resume.set()
    assert len(set(await asyncio.gather(*reads[1:]))) == 1


async def test_a_cached_result_is_used_at_once(world: World) -> None:
    engine = await world.join()
    first, second = world.program(), world.program()
    value = await first.read(first.call())
    first_tokens = first.infos()[0].output_tokens
    first.end()
    again = second.call()
    assert await second.read(again) == value
    after = second.call("then", again)
    await second.read(after)
    assert len(engine.requests) == 2
    used, own = second.infos()
    assert (used.reused, used.state, used.engine, used.attempts) == (True, "done", "e0", 0)
    assert used.output_tokens == first_tokens > 0
    assert not own.reused
    node = world.core.sessions.find(1).graph.variable(again)  # type: ignore[union-attr]
    assert node.tokenized is not None  # So consumers use its token ids.
    assert await second.stream(second.call()) == [value]


async def test_a_changed_input_recomputes_its_dependent_calls(world: World) -> None:
    engine = await world.join()

    async def run(chunks: list[str]) -> str:
        program = world.program()
        parts = [program.call(chunk) for chunk in chunks]
        return await program.read(program.call("sum", *parts))

    engine.script = Script(text=lambda prompt: f"<{prompt[:8]}>")
    first = await run(["a", "b", "c", "d"])
    assert len(engine.requests) == 5
    assert await run(["a", "b", "c", "d"]) == first
    assert len(engine.requests) == 5
    await run(["a", "b", "X", "d"])
    assert len(engine.requests) == 7


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": {"max_gen_length": 20}},
        {"sampling": GREEDY | {"max_gen_length": 21}},
        {"sampling": GREEDY | {"seed": 1}},
        {"sampling": {"max_gen_length": 20, "seed": 1}},
        {"models": ["tiny"]},
        {"reuse": False},
        {"question": "another"},
        {"api_key": "other"},
    ],
)
async def test_calls_that_differ_run_separately(world: World, other: dict[str, Any]) -> None:
    engine = await world.join()
    first, second = world.program("key"), world.program(other.pop("api_key", "key"))
    await first.read(first.call())
    await second.read(second.call(**other))
    assert len(engine.requests) == 2


async def test_seeded_calls_are_shared_and_random_ones_are_not(world: World) -> None:
    engine = await world.join()
    program = world.program()
    for _ in range(2):
        await program.read(program.call(sampling={"temperature": 1.0, "seed": 7}))
        await program.read(program.call(sampling={"temperature": 1.0}))
    assert len(engine.requests) == 3


async def test_a_call_without_reuse_does_not_share_its_result(world: World) -> None:
    engine = await world.join()
    program = world.program()
    await program.read(program.call(reuse=False))
    await program.read(program.call())
    assert len(engine.requests) == 2


async def test_reuse_can_be_disabled() -> None:
    world = World(reuse_results=False)
    engine = await world.join()
    program = world.program()
    await program.read(program.call())
    await program.read(program.call())
    assert len(engine.requests) == 2
    await world.core.close()


async def test_late_streams_get_all_text_as_it_grows(world: World) -> None:
    engine = await world.join(script=Script(text=lambda _: "abcdefghi", hang_after=2))
    early, late = world.program(), world.program()
    first = early.stream(early.call())
    await world.settle()
    var_id = late.call()
    deltas = late.core.stream(late.request(), var_id)
    assert await anext(deltas) == "abcdef"
    engine.resume.set()
    assert [text async for text in deltas] == ["ghi"]
    assert await first == ["abc", "def", "ghi"]
    assert len(engine.requests) == 1


async def test_a_follower_that_wants_a_stream_makes_a_queued_run_stream() -> None:
    world = World(tasks=1)
    engine = await world.join(script=Script(text=lambda _: "abcdefghi", hang_after=3))
    program = world.program()
    busy = program.read(program.call("first"))
    await world.settle()
    reading = program.read(program.call())
    streaming = program.stream(program.call())
    await world.settle()
    engine.resume.set()
    assert await streaming == ["abc", "def", "ghi"]
    assert (await busy, await reading) == ("abcdefghi", "abcdefghi")
    assert len(engine.requests) == 2
    await world.core.close()


async def test_a_run_continues_when_its_first_waiter_is_cancelled(world: World) -> None:
    engine = await world.join(script=Script(text=lambda _: "abcdefghi", hang_after=1))
    programs = [world.program() for _ in range(4)]
    ids = [program.call() for program in programs]
    reads = [p.stream(var_id) for p, var_id in zip(programs, ids, strict=True)]
    await world.settle()
    reads[0].cancel()
    await world.settle()
    programs[1].core.cancel_var(*programs[1].scope.values(), ids[1])
    await world.settle()
    programs[2].end()
    await world.settle()
    assert (len(engine.requests), engine.num_aborted) == (1, 0)
    again = programs[0].stream(ids[0])
    engine.resume.set()
    assert "".join(await reads[3]) == "abcdefghi"
    assert "".join(await again) == "abcdefghi"
    assert len(engine.requests) == 1
    for read, error in ((reads[1], Cancelled), (reads[2], SessionGone)):
        with pytest.raises(error):
            await read
    states = [info.state for p in (*programs[:2], programs[3]) for info in p.infos()]
    assert states == ["done", "cancelled", "done"]
    assert not programs[3].infos()[0].reused  # It is the only waiter now.


async def test_a_queued_run_keeps_its_place_when_its_first_waiter_is_cancelled() -> None:
    world = World(tasks=1)
    engine = await world.join(script=Script(hang_after=0))
    busy, first, second = (world.program() for _ in range(3))
    blocking = busy.read(busy.call("busy"))
    await world.settle()
    leaving, staying = first.read(first.call()), second.read(second.call())
    await world.settle()
    leaving.cancel()
    await world.settle()
    first.end()
    engine.script = Script()
    engine.resume.set()
    await asyncio.gather(blocking, staying)
    assert len(engine.requests) == 2
    await world.core.close()


async def test_each_session_with_a_shared_result_learns_think_times(world: World) -> None:
    """It does not matter which session submitted the call first."""
    engine = await world.join(script=Script(hang_after=0))
    first, second = world.program(), world.program()
    reads = [program.read(program.call()) for program in (first, second)]
    await world.settle()
    first.end()
    engine.resume.set()
    await reads[1]
    with pytest.raises(SessionGone):
        await reads[0]
    think_times = world.core.dispatcher._ledger.think_times
    assert think_times.num_open == 1
    second.end()
    assert think_times.num_open == 0


async def test_any_session_continues_a_shared_result_on_its_engine(world: World) -> None:
    engine = await world.join(script=Script(hang_after=0))
    first, second = world.program(), world.program()
    reads = [program.read(program.call()) for program in (first, second)]
    await world.settle()
    reads[0].cancel()
    await world.settle()
    first.end()
    engine.resume.set()
    await reads[1]
    engine.script = Script()
    request = {"template": "Go on {{out}}", "parameters": [made("out")], "successor_of": 1}
    submitted = SemanticCallRequest.model_validate(second.scope | request)
    await second.read(var_ids(world.core.submit_call(submitted))["out"])
    assert len(engine.requests) == 2
    (fill,) = engine.requests[1].fills
    assert fill.parent_context_id == engine.requests[0].context_id


async def test_a_run_stops_with_its_last_waiter(world: World) -> None:
    engine = await world.join(script=Script(hang_after=0))
    programs = [world.program() for _ in range(3)]
    reads = [program.read(program.call()) for program in programs]
    await world.settle()
    for read in reversed(reads):
        assert engine.num_aborted == 0
        read.cancel()
        await world.settle()
    assert engine.num_aborted == 1


async def test_a_failure_reaches_all_waiters_and_is_not_cached(world: World) -> None:
    engine = await world.join(script=Script(error=ModelNumerics("NaN")))
    programs = [world.program() for _ in range(3)]
    reads = [program.read(program.call()) for program in programs]
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(result) for result in results] == [ModelNumerics] * 3
    assert len(engine.requests) == 1
    engine.script = Script()
    assert await programs[0].read(programs[0].call())


async def test_a_lost_engine_reruns_a_shared_call_once_elsewhere(world: World) -> None:
    lost = await world.join("lost", Script(text=lambda _: "abcdefghi", hang_after=1))
    leader, follower = world.program(), world.program()
    reads = [leader.stream(leader.call()), follower.stream(follower.call())]
    await world.settle()
    other = await world.join("other", Script(text=lambda _: "defghi"))
    reads[0].cancel()
    lost.script, lost.ping_error = Script(error=Unavailable("gone")), Unavailable("gone")
    trigger = follower.read(follower.call("something else"))
    world.core.dispatcher.fleet.lose(next(iter(world.core.dispatcher.fleet)), "gone")
    assert "".join(await reads[1]) == "abcdefghi"  # The streamed text is continued.
    await trigger
    assert (len(lost.requests), len(other.requests)) == (1, 2)


async def test_an_urgent_follower_makes_its_leader_urgent() -> None:
    world = World(tasks=1)
    engine = await world.join(script=Script(hang_after=0))
    program = world.program()
    busy = program.read(program.call("busy"))
    await world.settle()
    patient = [program.read(program.call(name)) for name in ("a", "b", "same", "c")]
    urgent = program.read(program.call(), criteria="latency")
    await world.settle()
    engine.script = Script()
    engine.resume.set()
    await asyncio.gather(busy, urgent, *patient)
    assert "same" in engine.prompts[1]
    await world.core.close()


async def test_closing_fails_leaders_and_followers(world: World) -> None:
    await world.join(script=Script(hang_after=0))
    programs = [world.program() for _ in range(3)]
    reads = [program.read(program.call()) for program in programs]
    await world.settle()
    await world.core.close()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 3


async def test_a_waiter_may_be_withdrawn_while_a_failure_is_delivered(world: World) -> None:
    """The follower is withdrawn while the failure of the leader is being reported."""
    engine = await world.join(script=Script(error=EngineFailed("broken")))
    engine.scripts = [Script(error=ModelNumerics("NaN"))]
    program = world.program()
    first, second = program.call(), program.call()
    joined = program.call("join", first, second)
    with pytest.raises(ModelNumerics):
        await program.read(joined)
    await world.settle()
    assert [info.state for info in program.infos()] == ["failed", "idle", "failed"]
    assert len(engine.requests) == 1


# The key


OTHER_VALUES = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "max_gen_length": 7,
    "ignore_tokenizer_eos": True,
    "stop_token_ids": (3,),
    "stop_str": ("stop",),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "length_penalty": 0.5,
    "n": 2,
    "best_of": 2,
    "logit_bias": {5: 1.0},
    "seed": 8,
    "json_schema": {"type": "object"},
    "regex": "a+",
    "grammar": 'start: "a"',
    "choices": ("a", "b"),
    "logprobs": 2,
    "extra": {"min_tokens": 1},
}


def key_of(**sampling: Any) -> bytes:
    completion = Completion(
        id=1,
        request_id=1,
        session_id=1,
        options=CallOptions("f", tenant="acme", cache_salt="acme"),
        fill=(TextPiece("x"),),
        output=SemanticVariable("o", "o", 1),
        sampling=SamplingConfig(**{"seed": 7} | sampling),
    )
    return small_cache(2000, ManualClock()).key(completion, [b"prompt"])


def test_each_sampling_field_is_part_of_the_key():
    assert set(OTHER_VALUES) == set(SamplingConfig.model_fields)
    keys = [key_of(), *[key_of(**{name: value}) for name, value in OTHER_VALUES.items()]]
    assert len(set(keys)) == len(keys)


def test_explicit_defaults_do_not_change_the_key():
    assert key_of(presence_penalty=0.0, stop_str=None) == key_of()
    assert key_of(top_p=1.0) != key_of()  # An unset value is the model's default.
    assert key_of(logit_bias={5: 1.0}) != key_of(logit_bias={5: 2.0})
    assert key_of(stop_str=("a", "b")) != key_of(stop_str=("ab",))


# The cache alone

STATS = RunStats("e0", "m")


def small_cache(num_bytes: int, clock: ManualClock) -> ResultCache:
    config = GlobalSchedulerConfig(reuse_cache_size=num_bytes, reuse_timeout=10.0)
    return ResultCache(config, clock)


def put(cache: ResultCache, tenant: str, key: bytes, text: str = "x" * 100) -> None:
    cache.put(tenant, key, text, TokenizedText("t", (1, 2, 3)), STATS, 1)
    cache.check_integrity()


def test_the_least_recently_used_result_of_the_largest_tenant_is_evicted() -> None:
    cache = small_cache(561 * 6, ManualClock())
    put(cache, "small", b"s")
    for number in range(5):
        put(cache, "large", bytes([number]))
    assert cache.num_bytes == 6 * 561
    assert cache.get("large", b"\x00") is not None
    put(cache, "large", b"new")
    assert cache.get("large", b"\x01") is None
    assert cache.get("large", b"\x00") is not None
    for number in range(100, 200):
        put(cache, "large", bytes([number]))
    kept = cache.get("small", b"s")
    assert kept is not None
    assert (kept.text, kept.tokenized) == ("x" * 100, TokenizedText("t", (1, 2, 3)))


def test_tenants_share_no_results_and_huge_results_are_not_cached() -> None:
    cache = small_cache(2000, ManualClock())
    put(cache, "a", b"key")
    assert cache.get("b", b"key") is None
    put(cache, "a", b"giant", "x" * 2000)
    assert cache.get("a", b"giant") is None
    assert cache.get("a", b"key") is not None


async def test_results_expire() -> None:
    clock = ManualClock()
    cache = small_cache(2000, clock)
    put(cache, "a", b"key")
    await clock.advance(9.9)
    assert cache.get("a", b"key") is not None
    await clock.advance(0.1)
    assert cache.get("a", b"key") is None
    cache.check_integrity()
    assert cache.num_bytes == 0
