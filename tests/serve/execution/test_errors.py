"""Errors of engines and requests: some are retried, and others reach the reader."""

import pytest

from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    EngineFailed,
    InternalError,
    ModelNumerics,
    NotFound,
    OutOfMemory,
    ParrotError,
    PayloadTooLarge,
    PromptTooLong,
    QuotaExceeded,
    SessionGone,
    UnsupportedField,
    ValidationFailed,
)
from parrot.serve.graph.nodes import CompletionState
from parrot.serve.scheduling.placement import LowestCostPlacer
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask
from tests.serve.execution.world import World, error_of, value
from tests.support.fake_engine import Script, fake_engine


async def test_a_defect_of_the_scheduler_fails_the_queued_calls(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join(fake_engine())
    waiting = [world.submit("one"), world.submit("two", session=2)]
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda self: [][0])
        assert [type(await error_of(c)) for c in waiting] == [InternalError] * 2
    assert await world.submit("three").output.wait()


async def test_a_defect_in_placing_one_call_fails_that_call_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = LowestCostPlacer.choose

    def fail_for_one(self: LowestCostPlacer, task: CompletionTask, now: float) -> object:
        if task.completion.session_id == 2:
            raise ZeroDivisionError
        return choose(self, task, now)

    monkeypatch.setattr(LowestCostPlacer, "choose", fail_for_one)
    await world.join(fake_engine())
    good, bad, later = [world.submit("hi", session=session) for session in (1, 2, 3)]
    assert isinstance(await error_of(bad), InternalError)
    assert await good.output.wait()
    assert await later.output.wait()


@pytest.mark.parametrize(
    "error", [ModelNumerics("NaN"), UnsupportedField("no", param="n"), PromptTooLong("long")]
)
async def test_typed_errors_fail_at_once(world: World, error: ParrotError) -> None:
    engine = fake_engine(script=Script(error=error))
    await world.join(engine)
    completion = world.submit("a ", value("b"))
    failed = await error_of(completion)
    assert (type(failed), vars(failed)) == (type(error), vars(error) | {"is_final": True})
    assert completion.state is CompletionState.FAILED
    assert len(engine.requests) == 1
    engine.script = Script()
    await world.submit("a ", value("b")).output.wait()
    assert (
        engine.requests[1].fills[0].parent_context_id == -1
    )  # The first attempt's contexts are retired.


async def test_a_prompt_that_cannot_fit_never_reaches_the_engine(world: World) -> None:
    engine = fake_engine(max_seq_len=10)
    await world.join(engine)
    assert isinstance(await error_of(world.submit("0123456789")), PromptTooLong)
    assert engine.requests == []
    ok = world.submit("0123456")
    await ok.output.wait()
    assert engine.requests[0].sampling_config.max_gen_length == 3


async def test_a_prompt_that_an_engine_finds_too_long_runs_on_a_larger_one(world: World) -> None:
    """The smaller engine counts more tokens than its tokenizer says."""
    error = PromptTooLong("too long for this engine")
    small = fake_engine("small", max_seq_len=100, script=Script(error=error))
    await world.join(small)
    alone = await error_of(world.submit("0123456"))
    assert isinstance(alone, PromptTooLong)
    large = fake_engine("large", max_seq_len=1000)
    await world.join(large)
    completion = world.submit("0123456", session=2)
    assert await completion.output.wait()
    assert completion.stats.engine_name == "large"


@pytest.mark.parametrize("error", [InternalError("bug"), Cancelled("aborted"), EngineFailed("x")])
async def test_an_engines_own_error_is_retried_elsewhere(world: World, error: ParrotError) -> None:
    bad, good = fake_engine("bad", script=Script(error=error)), fake_engine("good")
    await world.join(bad)
    await world.join(good)
    completion = world.submit("a")
    assert await completion.output.wait() == "<1>"
    assert len(bad.requests) == 1
    assert completion.stats.engine_name == "good"
    assert completion.stats.attempts == 2


async def test_a_repeated_error_ends_as_engine_failed(world: World) -> None:
    engine = fake_engine(script=Script(error=InternalError("bug")))
    await world.join(engine)
    assert type(await error_of(world.submit("a"))) is EngineFailed
    assert len(engine.requests) == 3


async def test_a_defect_of_servecore_ends_as_an_error(world: World) -> None:
    def broken(_: str) -> str:
        raise ZeroDivisionError

    await world.join(fake_engine(script=Script(text=broken)))
    assert isinstance(await error_of(world.submit("a")), EngineFailed)


async def test_out_of_memory_evicts_idle_contexts_and_retries(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("old ", value("x")).output.wait()
    held = set(engine.contexts)
    engine.scripts = [Script(error=OutOfMemory("full"))]
    await world.submit("new ", value("y")).output.wait()
    await world.clock.advance(0.1)
    assert held <= set(engine.freed)
    engine.script = Script(error=OutOfMemory("full"))
    assert isinstance(await error_of(world.submit("new")), OutOfMemory)


async def test_contexts_that_the_engine_forgot_are_built_again(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("old ", value("x")).output.wait()
    engine.contexts.clear()
    await world.submit("old ", value("y")).output.wait()
    assert engine.prompts[-1] == "old y"
    engine.script = Script(error=NotFound("never heard of it"))
    assert isinstance(await error_of(world.submit("old ", value("z"))), EngineFailed)


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("missing or wrong cluster token"),
        PayloadTooLarge("the request body exceeds 64 MiB"),
        ValidationFailed("`fills`: too many"),
        SessionGone("?"),
    ],
)
async def test_an_error_between_servecore_and_engine_is_not_the_readers_fault(
    world: World, error: ParrotError
) -> None:
    await world.join(fake_engine("one", script=Script(error=error)))
    failed = await error_of(world.submit("a"))
    assert type(failed) is EngineFailed
    assert "engine one" in failed.message
    assert error.message in failed.message


@pytest.mark.parametrize(
    "error", [PromptTooLong("4097 tokens"), QuotaExceeded("the server behind this engine ...")]
)
async def test_an_error_of_the_request_reaches_the_reader_unchanged(
    world: World, error: ParrotError
) -> None:
    await world.join(fake_engine("one", script=Script(error=error)))
    failed = await error_of(world.submit("a"))
    assert (type(failed), failed.message) == (type(error), error.message)
