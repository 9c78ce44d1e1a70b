"""The dispatcher with engines inside the process: submit, settle, cancel, engines lost."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import pytest

from parrot.protocol.engine_api import (
    EngineInfo,
    EngineType,
    FinishReason,
    HeartbeatRequest,
    RuntimeInfo,
    StreamChunk,
)
from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    EngineFailed,
    InternalError,
    ModelNumerics,
    NoEngine,
    NotFound,
    OutOfMemory,
    ParrotError,
    PayloadTooLarge,
    PromptTooLong,
    QuotaExceeded,
    SessionGone,
    StaleCore,
    Unavailable,
    UnsupportedField,
    ValidationFailed,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.transport import Unreachable
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    CompletionState,
    Objective,
    Piece,
    SemanticVariable,
    TextPiece,
    VariablePiece,
)
from parrot.serve.scheduling.placement import PredictedSeconds
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask
from tests.support.byte_tokenizer import (
    byte_tokenizer,
    plain_byte_tokenizer,
    tokenizer_id_of,
)
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.manual_clock import ManualClock

OPTIONS = CallOptions(func_name="f", tenant="acme", cache_salt="acme")
TOKENIZER_ID = tokenizer_id_of(byte_tokenizer())


class World:
    """A dispatcher on virtual time, with what a core would give it."""

    def __init__(self, **scheduler: object) -> None:
        self.clock = ManualClock(1000.0)
        self.engines: dict[str, FakeEngine] = {}
        self._ids = count()
        config = CoreConfig(
            global_scheduler=GlobalSchedulerConfig.model_validate(scheduler),
            engine_heartbeat_timeout=30.0,
            constant_prefix_var_timeout=600.0,
            max_engines_num=4,
        )
        self.dispatcher = Dispatcher(config, self.clock, self.connect)

    def connect(self, info: EngineInfo) -> FakeEngine:
        return self.engines[info.engine_name]

    async def join(self, engine: FakeEngine) -> int:
        self.engines[engine.info.engine_name] = engine
        return await self.dispatcher.fleet.register(engine.info)

    def completion(
        self,
        *pieces: str | SemanticVariable,
        session: int = 1,
        previous: Completion | None = None,
        stream: bool = False,
        options: CallOptions = OPTIONS,
        sampling: SamplingConfig | None = None,
    ) -> Completion:
        number = next(self._ids)
        fill: list[Piece] = [
            TextPiece(p) if isinstance(p, str) else VariablePiece(p) for p in pieces
        ]
        return Completion(
            id=number,
            request_id=number,
            session_id=session,
            options=options,
            fill=tuple(fill),
            output=SemanticVariable(f"v{number}", f"out{number}", session),
            sampling=sampling or SamplingConfig(max_gen_length=20),
            previous=previous,
            wants_stream=stream,
            objective=Objective(PerformanceCriteria.LATENCY, 0, 1.0),
        )

    def submit(self, *pieces: str | SemanticVariable, **kwargs: object) -> Completion:
        completion = self.completion(*pieces, **kwargs)  # type: ignore[arg-type]
        self.dispatcher.submit(completion)
        return completion

    def withdraw(self, completion: Completion) -> None:
        """As the graph does when nobody reads it any more."""
        self.dispatcher.withdraw(completion)
        completion.output.restart()

    def lose(self, engine_id: int) -> None:
        engine = self.dispatcher.fleet.engines.get(engine_id)
        assert engine is not None
        self.dispatcher.fleet.lose(engine, "test")

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


def value(text: str) -> SemanticVariable:
    variable = SemanticVariable("x", "x", 1)
    variable.set(text)
    return variable


async def error_of(completion: Completion) -> ParrotError:
    with pytest.raises(ParrotError) as caught:
        await asyncio.wait_for(completion.output.wait(), 30)
    return caught.value


# Running


async def test_runs_a_completion_and_fills_in_what_it_knows(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    completion = world.submit("Say ", value("hi"), " now: ")
    assert completion.state is CompletionState.QUEUED
    assert await completion.output.wait() == "<12>"
    assert engine.prompts == ["Say hi now: "]
    assert completion.state is CompletionState.DONE
    assert completion.stats.engine_name == "fake"
    assert completion.stats.model == "tiny"
    assert completion.stats.attempts == 1
    assert completion.stats.output_tokens == 5
    assert completion.stats.computed_tokens == 8  # after the constant beginning
    assert completion.times.started is not None
    assert completion.times.finished is not None
    tokenized = completion.output.tokenized
    assert tokenized is not None
    assert tokenized.tokenizer_id == TOKENIZER_ID
    assert len(tokenized.ids) == 4  # without the stop token


async def test_books_are_done_before_the_output_is_set(world: World) -> None:
    await world.join(fake_engine())
    completion = world.completion("a")
    seen: list[CompletionState] = []

    def on_settled(variable: SemanticVariable) -> None:
        seen.append(completion.state)
        world.dispatcher.check_integrity()
        seen.append(world.submit("next").state)

    completion.output.on_settled(on_settled)
    world.dispatcher.submit(completion)
    await completion.output.wait()
    assert seen == [CompletionState.DONE, CompletionState.QUEUED]


async def test_one_request_does_a_completion_with_a_tenants_prefix(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("System. ", value("one")).output.wait()
    await world.submit("System. ", value("two"), session=2).output.wait()
    first, second = engine.requests
    assert len(first.fills) == 2
    assert first.fills[1].parent_context_id == first.fills[0].context_id
    assert first.fills[1].parent_len == 8
    assert len(second.fills) == 1  # the other session forks the same constant context
    assert second.fills[0].parent_context_id == first.fills[0].context_id
    assert engine.prompts == ["System. one", "System. two"]


async def test_other_tenants_and_calls_without_the_option_share_nothing(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("System. ", value("one")).output.wait()
    other = CallOptions(func_name="f", tenant="rival", cache_salt="rival")
    await world.submit("System. ", value("one"), session=2, options=other).output.wait()
    assert engine.requests[1].fills[0].parent_context_id == -1
    single = CallOptions(func_name="f", tenant="third", cache_salt="third", cache_prefix=False)
    await world.submit("System. ", value("one"), session=3, options=single).output.wait()
    assert len(engine.requests[2].fills) == 1
    assert [request.cache_salt for request in engine.requests] == ["acme", "rival", "third"]


async def test_the_engine_hears_which_call_is_more_urgent(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    patient = world.completion("Some time: ")
    patient.objective = Objective(PerformanceCriteria.THROUGHPUT, 0, 1.0)
    world.dispatcher.submit(patient)
    urgent = world.submit("Now: ", session=2)
    await asyncio.gather(patient.output.wait(), urgent.output.wait())
    priorities = dict(zip(engine.prompts, (r.priority for r in engine.requests), strict=True))
    assert priorities["Now: "] < priorities["Some time: "]


async def test_a_defect_of_the_scheduler_reaches_those_who_wait(
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
    choose = PredictedSeconds.choose

    def fail_for_one(self: PredictedSeconds, task: CompletionTask, now: float) -> object:
        if task.completion.session_id == 2:
            raise ZeroDivisionError
        return choose(self, task, now)

    monkeypatch.setattr(PredictedSeconds, "choose", fail_for_one)
    await world.join(fake_engine())
    good, bad, later = [world.submit("hi", session=session) for session in (1, 2, 3)]
    assert isinstance(await error_of(bad), InternalError)
    assert await good.output.wait()
    assert await later.output.wait()


async def test_a_later_output_continues_the_context_with_the_generated_ids(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    first = world.submit("Q: ", value("why"), " A: ")
    await first.output.wait()
    second = world.submit(" And? ", previous=first)
    await second.output.wait()
    assert engine.prompts[1] == "Q: why A: <10> And? "
    request = engine.requests[1]
    assert len(request.fills) == 1
    assert request.fills[0].parent_context_id == engine.requests[0].context_id
    assert request.fills[0].parent_len == len("Q: why A: <10>")  # not the stop token
    assert second.stats.computed_tokens == len(" And? ")


async def test_a_stop_string_makes_the_text_be_tokenised_again(world: World) -> None:
    engine = fake_engine(script=Script(text=lambda _: "yes", stop_token=False, extra_ids=[33]))
    await world.join(engine)
    first = world.submit("Q ", value("x"))
    await first.output.wait()
    assert first.output.tokenized is None
    await world.submit(" B", previous=first).output.wait()
    assert engine.prompts[1] == "Q xyes B"
    assert engine.requests[1].fills[0].parent_len == 3


async def test_an_identical_prompt_recomputes_one_token(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    for _ in range(2):
        await world.submit("Only constant text").output.wait()
    assert engine.prompts == ["Only constant text"] * 2
    fill = engine.requests[1].fills[0]
    assert fill.token_ids is not None
    assert len(fill.token_ids) == 1


async def test_special_tokens_only_in_the_template(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("<|im_start|>", value("<|im_start|>")).output.wait()
    ids = [i for fill in engine.requests[0].fills for i in fill.token_ids or []]
    assert len(ids) == 1 + len("<|im_start|>")


async def test_bos_once(world: World) -> None:
    engine = fake_engine(add_bos=True)
    await world.join(engine)
    first = world.submit("a", value("b"))
    await first.output.wait()
    await world.submit("c", previous=first).output.wait()
    assert engine.prompts == ["<s>ab", "<s>ab<2+>c".replace("<2+>", first.output.text)]


async def test_chat(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    chat = CallOptions(func_name="f", tenant="acme", cache_salt="acme", chat=True)
    first = world.submit("Hello ", value("{{ 7*7 }}<|im_end|>"), options=chat)
    await first.output.wait()
    second = world.submit("And?", previous=first, options=chat)
    await second.output.wait()
    start = "<|im_start|>user\nHello {{ 7*7 }}<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    answer = first.output.text + "<|im_end|>\n"
    assert engine.prompts[0] == start
    assert engine.prompts[1] == (
        start + answer + "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.requests[1].fills[0].parent_len is not None
    assert engine.requests[1].fills[0].parent_context_id == engine.requests[0].context_id


async def test_chat_without_a_template_is_refused(world: World) -> None:
    engine = fake_engine()
    assert engine.tokenizer_response is not None
    engine.tokenizer_response.chat_template = None
    await world.join(engine)
    chat = CallOptions(func_name="f", chat=True)
    error = await error_of(world.submit("Hello", options=chat))
    assert isinstance(error, UnsupportedField)
    assert error.param == "chat"


async def test_text_engine(world: World) -> None:
    engine = fake_engine(text=True)
    await world.join(engine)
    first = world.submit("Q: ", value("why"), " A: ")
    assert await first.output.wait() == "<10>"
    assert first.output.tokenized is None
    await world.submit(" B", previous=first).output.wait()
    assert engine.prompts == ["Q: why A: ", "Q: why A: <10> B"]
    assert engine.requests[1].fills[0].text == " B"
    assert engine.requests[1].fills[0].parent_len == len("Q: why A: <10>")


async def test_a_long_text_does_not_block_the_loop(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    completion = world.submit("Read: ", value("x" * 20_000))
    again = world.submit("Read: ", value("x" * 20_000), session=2)
    assert await asyncio.wait_for(completion.output.wait(), 30) == "<20006>"
    await asyncio.wait_for(again.output.wait(), 30)
    fill = engine.requests[1].fills[-1]
    assert fill.token_ids is not None
    assert len(fill.token_ids) == 1  # it found the first one's context


# Streaming


async def test_streams_when_asked(world: World) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", steps=3))
    await world.join(engine)
    completion = world.submit("Go", stream=True)
    deltas = [delta async for delta in completion.output.stream()]
    assert "".join(deltas) == "abcdef"
    assert len(deltas) >= 2


@pytest.mark.parametrize("looks", ["reads", "follows"])
async def test_a_running_call_is_streamed_from_its_beginning_once_somebody_looks(
    world: World, looks: str
) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(engine)
    completion = world.submit("Go")
    await world.settle()
    assert (completion.output.partial_text, engine.num_followed) == ("", 0)
    for _ in range(2):  # one that looks again costs nothing
        if looks == "reads":
            completion.wants_stream = True
            world.dispatcher.reprioritise(completion)
        else:
            world.dispatcher.follow(completion)
        await world.settle()
        assert completion.output.partial_text == "abcd"
    assert engine.num_followed == 1
    world.dispatcher.check_integrity()
    engine.resume.set()
    assert await completion.output.wait() == "abcdef"
    assert completion.stats.comes_whole == ""


async def test_what_was_followed_goes_on_elsewhere_or_when_it_is_wanted_again(world: World) -> None:
    first = fake_engine("one", script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(first)
    completion = world.submit("Go")
    await world.settle()
    world.dispatcher.follow(completion)
    await world.settle()
    # Too late, in the same turn of the loop: the engine's text is not heard any more.
    (context_id,) = first.chunks
    first.chunks[context_id].put_nowait(StreamChunk(ids=[120], text="x"))
    world.withdraw(completion)
    first.resume.set()
    await world.settle()
    assert completion.output.partial_text == ""
    first.script = Script(text=lambda _: "ef", hang_after=0)
    first.resume.clear()
    world.dispatcher.submit(completion)
    await world.settle()
    assert first.prompts[-1] == "Goabcd"
    second = fake_engine("two", script=Script(text=lambda _: "ef"))
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"


async def test_an_engine_that_cannot_be_followed_says_why(world: World) -> None:
    class Whole(FakeEngine):
        async def follow(self, context_id: int) -> AsyncGenerator[StreamChunk, None]:
            raise UnsupportedField("it answers at once")
            yield

    plain = fake_engine(script=Script(text=lambda _: "abcdef", hang_after=2))
    engine = Whole(plain.info, plain.tokenizer_response, plain.script)
    await world.join(engine)
    completion = world.submit("Go")
    await world.settle()
    world.dispatcher.follow(completion)
    await world.settle()
    assert completion.stats.comes_whole == "it answers at once"
    engine.resume.set()
    assert await completion.output.wait() == "abcdef"


async def test_a_stream_goes_on_elsewhere_without_repeating(world: World) -> None:
    first = fake_engine("one", script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(first)
    completion = world.submit("Go", stream=True)
    await world.settle()
    assert completion.output.partial_text == "abcd"
    second = fake_engine("two", script=Script(text=lambda _: "ef"))
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"
    assert second.prompts == ["Goabcd"]
    assert second.requests[0].sampling_config.max_gen_length == 20 - 4
    assert second.requests[0].resumed_ids == [64, 65, 66, 67]  # a, b, c, d
    assert completion.output.tokenized is not None
    assert len(completion.output.tokenized.ids) == 6
    assert first.num_aborted == 1
    await world.submit("?", previous=completion).output.wait()
    assert second.prompts[1] == "Goabcdef?"
    assert second.requests[1].fills[0].parent_len == len("Goabcdef")


@pytest.mark.parametrize("is_told", [True, False])
async def test_what_is_lost_since_servecore_stood_still_is_not_the_calls_fault(
    world: World, is_told: bool
) -> None:
    """Engines end their work when they are not answered, and register again."""
    engine = fake_engine("one", script=Script(text=lambda _: "ab", hang_after=0))
    for number in range(5):
        if number == 0 or not is_told:
            await world.join(engine)
        if number == 0:
            completion = world.submit("Go")
        await world.settle()
        assert len(engine.requests) == number + 1
        if is_told:  # the engine's request comes before the timer
            world.clock._now += 31.0
            await world.join(engine)
        else:
            await world.clock.stand_still(31.0)
            assert not list(world.dispatcher.fleet)
    engine.script.hang_after = None
    engine.resume.set()
    if not is_told:
        await world.join(engine)
    await world.settle()
    assert await completion.output.wait() == "ab"


@pytest.mark.parametrize("is_same", [True, False])
async def test_an_engine_that_comes_back_alive_was_harmed_by_no_call(
    world: World, is_same: bool
) -> None:
    """It had no answer for its lease: a link was cut. One that was started anew has died."""
    engine = fake_engine("one", script=Script(text=lambda _: "ab", hang_after=0))
    await world.join(engine)
    completion = world.submit("Go")
    for number in range(5):
        await world.settle()
        assert len(engine.requests) == (number + 1 if is_same else min(number + 1, 3))
        if not is_same:
            engine.info = engine.info.model_copy(update={"incarnation": str(number)})
            engine.ping_error = Unavailable("the one before is gone")
        await world.join(engine)
    if is_same:
        engine.script.hang_after = None
        engine.resume.set()
        assert await completion.output.wait() == "ab"
    else:
        assert isinstance(await error_of(completion), EngineFailed)


async def test_a_call_is_not_blamed_for_engines_that_were_silent_when_it_came(
    world: World,
) -> None:
    """A link is cut to all of them: each is taken for dead when its time has come."""
    names = ("one", "two", "three", "four")
    engines = [fake_engine(n, script=Script(text=lambda _: "ab", hang_after=0)) for n in names]
    for engine in engines:
        await world.join(engine)
        await world.clock.advance(1)
    completion = world.submit("Go")
    await world.clock.advance(28)
    assert [engine.is_closed for engine in engines] == [True] * 3 + [False]
    await world.join(fake_engine("five", script=Script(text=lambda _: "ab")))
    await world.clock.advance(1)
    assert [len(engine.requests) for engine in engines] == [1] * 4
    assert await completion.output.wait() == "ab"


async def test_a_stream_goes_on_with_another_tokenizer(world: World) -> None:
    first = fake_engine("one", script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(first)
    completion = world.submit("Go", stream=True)
    await world.settle()
    second = fake_engine("two", script=Script(text=lambda _: "ef"))
    second.tokenizer_response = plain_byte_tokenizer(300)
    tokenizer_id = tokenizer_id_of(second.tokenizer_response)
    second.info = second.info.model_copy(update={"tokenizer_id": tokenizer_id})
    second.__post_init__()
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"
    assert second.prompts == ["Goabcd"]


async def test_everything_was_delivered_before_the_engine_died(world: World) -> None:
    script = Script(text=lambda _: "abcd", steps=2, hang_after=2)
    await world.join(fake_engine("one", script=script))
    sampling = SamplingConfig(max_gen_length=4)
    completion = world.submit("Go", stream=True, sampling=sampling)
    await world.settle()
    await world.join(fake_engine("two"))
    world.lose(0)
    assert await completion.output.wait() == "abcd"


@pytest.mark.parametrize("constraint", [{"json_schema": {"type": "object"}}, {"regex": "a.*"}])
async def test_a_constrained_stream_goes_on_behind_what_was_delivered(
    world: World, constraint: dict[str, Any]
) -> None:
    """The other engine is told how far the grammar has come."""
    script = Script(text=lambda _: "abcd", steps=2, hang_after=1)
    await world.join(fake_engine("one", script=script))
    completion = world.submit("Go", stream=True, sampling=SamplingConfig(**constraint))
    await world.settle()
    second = fake_engine("two", script=Script(text=lambda _: "cd"))
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcd"
    assert second.prompts == ["Goab"]
    assert second.requests[0].resumed_ids == [64, 65]  # a, b


@pytest.mark.parametrize("constraint", [{"json_schema": {"type": "object"}}, {"regex": "a.*"}])
async def test_a_constrained_stream_is_not_continued_by_an_engine_that_takes_text(
    world: World, constraint: dict[str, Any]
) -> None:
    script = Script(text=lambda _: "abcd", steps=2, hang_after=1)
    await world.join(fake_engine("one", text=True, script=script))
    completion = world.submit("Go", stream=True, sampling=SamplingConfig(**constraint))
    await world.settle()
    await world.join(fake_engine("two", text=True))
    world.lose(0)
    assert isinstance(await error_of(completion), EngineFailed)


@pytest.mark.parametrize("constraint", [{"json_schema": {"type": "object"}}, {"regex": "a.*"}])
async def test_a_constrained_stream_that_was_withdrawn_begins_anew(
    world: World, constraint: dict[str, Any]
) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", hang_after=2))
    await world.join(engine)
    completion = world.submit("Go", stream=True, sampling=SamplingConfig(**constraint))
    await world.settle()
    assert completion.output.partial_text == "abcd"
    world.withdraw(completion)
    engine.script = Script(text=lambda _: "abcdef")
    world.dispatcher.submit(completion)
    assert await completion.output.wait() == "abcdef"
    assert engine.prompts == ["Go", "Go"]


async def test_a_text_engine_generates_only_what_is_left(world: World) -> None:
    script = Script(text=lambda _: "abcdef", steps=6, hang_after=4)
    await world.join(fake_engine("one", text=True, script=script))
    completion = world.submit("Go", stream=True, sampling=SamplingConfig(max_gen_length=6))
    await world.settle()
    assert completion.output.partial_text == "abcd"
    second = fake_engine("two", text=True, script=Script(text=lambda _: "ef"))
    await world.join(second)
    world.lose(0)
    assert await completion.output.wait() == "abcdef"
    assert second.prompts == ["Goabcd"]
    assert second.requests[0].sampling_config.max_gen_length == 2
    assert (completion.stats.prompt_tokens, completion.stats.output_tokens) == (2, 6)


async def test_a_withdrawn_call_streams_nothing_more_and_goes_on_where_it_was(
    world: World,
) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", hang_after=2))
    await world.join(engine)
    completion = world.submit("Go", stream=True)
    await world.settle()
    world.withdraw(completion)
    engine.resume.set()
    await world.settle()
    assert (completion.state, completion.output.partial_text) == (CompletionState.IDLE, "")
    assert engine.num_aborted == 1
    engine.script = Script(text=lambda _: "ef")
    world.dispatcher.submit(completion)
    assert completion.output.partial_text == "abcd"
    assert await completion.output.wait() == "abcdef"
    assert engine.prompts == ["Go", "Goabcd"]
    (fill,) = engine.requests[1].fills
    assert fill.parent_context_id == engine.requests[0].context_id
    assert fill.parent_len == len("Goabcd") - 1  # an engine generates behind a token of its own
    assert completion.stats.attempts == 2
    await world.submit("!", previous=completion).output.wait()
    assert engine.requests[2].fills[0].parent_len == len("Goabcdef")


async def test_a_withdrawn_call_goes_on_elsewhere_if_its_engine_is_lost(world: World) -> None:
    await world.join(fake_engine("one", script=Script(text=lambda _: "abcdef", hang_after=2)))
    completion = world.submit("Go", stream=True)
    await world.settle()
    world.withdraw(completion)
    world.lose(0)
    second = fake_engine("two", script=Script(text=lambda _: "ef"))
    await world.join(second)
    world.dispatcher.submit(completion)
    assert await completion.output.wait() == "abcdef"
    assert second.prompts == ["Goabcd"]


async def test_what_a_session_has_withdrawn_goes_with_it(world: World) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", hang_after=2))
    await world.join(engine)
    completion = world.submit("Go", stream=True)
    await world.settle()
    world.withdraw(completion)
    await world.clock.advance(0.1)
    assert engine.freed == []
    list(world.dispatcher.release_session(1))
    await world.clock.advance(0.1)
    assert engine.freed == [engine.requests[0].context_id]


# Errors


@pytest.mark.parametrize(
    "error", [ModelNumerics("NaN"), UnsupportedField("no", param="n"), PromptTooLong("long")]
)
async def test_typed_errors_fail_at_once(world: World, error: ParrotError) -> None:
    engine = fake_engine(script=Script(error=error))
    await world.join(engine)
    completion = world.submit("a ", value("b"))
    failed = await error_of(completion)
    assert (type(failed), vars(failed)) == (type(error), vars(error))
    assert completion.state is CompletionState.FAILED
    assert len(engine.requests) == 1
    engine.script = Script()
    await world.submit("a ", value("b")).output.wait()
    assert engine.requests[1].fills[0].parent_context_id == -1  # nothing of the first is trusted


async def test_a_prompt_that_cannot_fit_never_reaches_the_engine(world: World) -> None:
    engine = fake_engine(max_seq_len=10)
    await world.join(engine)
    assert isinstance(await error_of(world.submit("0123456789")), PromptTooLong)
    assert engine.requests == []
    ok = world.submit("0123456")
    await ok.output.wait()
    assert engine.requests[0].sampling_config.max_gen_length == 3


async def test_a_prompt_that_an_engine_finds_too_long_runs_on_a_larger_one(world: World) -> None:
    """The smaller one counts its tokens in another way than was told."""
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
async def test_an_engines_own_trouble_is_retried_elsewhere(
    world: World, error: ParrotError
) -> None:
    bad, good = fake_engine("bad", script=Script(error=error)), fake_engine("good")
    await world.join(bad)
    await world.join(good)
    completion = world.submit("a")
    assert await completion.output.wait() == "<1>"
    assert len(bad.requests) == 1
    assert completion.stats.engine_name == "good"
    assert completion.stats.attempts == 2


async def test_a_lasting_trouble_ends_as_engine_failed(world: World) -> None:
    engine = fake_engine(script=Script(error=InternalError("bug")))
    await world.join(engine)
    assert type(await error_of(world.submit("a"))) is EngineFailed
    assert len(engine.requests) == 3


async def test_a_defect_of_ours_ends_as_an_error(world: World) -> None:
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


# Engines that are lost


@pytest.mark.parametrize(
    ("error", "ping_error"),
    [
        (Unavailable("connection reset"), Unavailable("connection refused")),
        (StaleCore("it belongs to another"), StaleCore("it belongs to another")),
    ],
)
async def test_a_lost_engines_completions_run_elsewhere(
    world: World, error: ParrotError, ping_error: ParrotError
) -> None:
    one = fake_engine("one", script=Script(hang_after=0))
    await world.join(one)
    hanging = [world.submit(f"job {i} ", value("x")) for i in range(3)]
    await world.settle()
    one.scripts = [Script(error=error)]
    one.ping_error = ping_error
    trigger = world.submit("more")
    await world.settle()
    assert world.dispatcher.fleet.views() == []
    assert {c.state for c in (*hanging, trigger)} == {CompletionState.QUEUED}
    await world.join(fake_engine("two"))
    for completion in (*hanging, trigger):
        await completion.output.wait()
    assert {c.stats.engine_name for c in hanging} == {"two"}
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["two"]
    assert one.is_closed


async def test_a_broken_connection_costs_only_its_own_run(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    await world.join(engine)
    innocent = [world.submit(f"job {i} ", value("x")) for i in range(8)]
    await world.settle()
    for _ in range(4):
        engine.scripts = [Script(error=Unavailable("connection reset")), Script()]
        assert await world.submit("more").output.wait()
    engine.script = Script(error=Unavailable("connection reset"))
    unlucky = await error_of(world.submit("most"))
    assert type(unlucky) is EngineFailed
    assert "engine one could not run the completion: connection reset" in unlucky.message
    engine.resume.set()
    assert [await completion.output.wait() for completion in innocent] == ["<7>"] * 8
    assert {completion.stats.attempts for completion in innocent} == {1}
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["one"]


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("missing or wrong cluster token"),
        PayloadTooLarge("the request body exceeds 64 MiB"),
        ValidationFailed("`fills`: too many"),
        SessionGone("?"),
    ],
)
async def test_what_an_engine_refuses_of_servecore_is_not_the_readers_fault(
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
async def test_what_is_about_the_request_reaches_the_reader_as_it_is(
    world: World, error: ParrotError
) -> None:
    await world.join(fake_engine("one", script=Script(error=error)))
    failed = await error_of(world.submit("a"))
    assert (type(failed), failed.message) == (type(error), error.message)


async def test_a_completion_that_kills_engines_is_given_up(world: World) -> None:
    killer = world.submit("kill")
    for i in range(3):
        gone = Unavailable("gone")
        await world.join(fake_engine(f"e{i}", script=Script(error=gone), ping_error=gone))
        await world.settle()
    assert type(await error_of(killer)) is EngineFailed
    assert killer.stats.attempts == 3
    assert world.dispatcher.fleet.views() == []


@pytest.mark.parametrize("is_reached", [True, False])
async def test_a_call_is_not_blamed_for_engines_that_it_could_not_reach(
    world: World, is_reached: bool
) -> None:
    """They died together, and look idle until somebody asks them. Of two calls at once, the one
    whose connection is still being made is to blame for none of them either."""
    gone = Unavailable("it broke") if is_reached else Unreachable("nobody listens")
    first, second = world.submit("a"), world.submit("b")
    for i in range(3 if is_reached else 5):
        engine = fake_engine(f"e{i}", script=Script(hang_after=0), ping_error=gone)
        engine.scripts = [Script(error=gone)]
        await world.join(engine)
        await world.settle()
        assert world.dispatcher.fleet.views() == []
    await world.join(fake_engine("good", script=Script(text=lambda _: "ab")))
    if is_reached:
        assert type(await error_of(first)) is EngineFailed
        assert type(await error_of(second)) is EngineFailed
    else:
        assert [await call.output.wait() for call in (first, second)] == ["ab", "ab"]


async def test_a_silent_engine_is_lost_and_must_register_again(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    engine_id = await world.join(engine)
    completion = world.submit("a")
    await world.settle()
    beat = HeartbeatRequest(engine_id=engine_id, engine_name="one", runtime_info=RuntimeInfo())
    await world.clock.advance(20)
    assert world.dispatcher.fleet.heartbeat(beat).state == "ok"
    of_another = beat.model_copy(update={"core": "another start of ServeCore"})
    assert world.dispatcher.fleet.heartbeat(of_another).state == "unknown"
    ours = beat.model_copy(update={"core": world.dispatcher.fleet.identity.id})
    assert world.dispatcher.fleet.heartbeat(ours).state == "ok"
    await world.clock.advance(20)
    assert completion.state is CompletionState.RUNNING
    await world.clock.advance(11)
    assert not list(world.dispatcher.fleet)
    assert not completion.output.is_settled
    await world.clock.advance(30)  # within which it may be back
    assert isinstance(completion.output.error, NoEngine)
    assert world.dispatcher.fleet.heartbeat(beat).state == "unknown"
    engine.script = Script()
    await world.join(engine)
    await world.submit("a").output.wait()


def beat(engine_id: int, name: str, num_steps: int | None) -> HeartbeatRequest:
    runtime = RuntimeInfo(num_steps=num_steps)
    return HeartbeatRequest(engine_id=engine_id, engine_name=name, runtime_info=runtime)


async def test_an_engine_whose_steps_stand_still_under_work_is_lost(world: World) -> None:
    stuck = fake_engine("stuck", script=Script(hang_after=0))
    stuck_id = await world.join(stuck)
    await world.clock.advance(1)
    for _ in range(9):  # without work, nothing has to happen
        assert world.dispatcher.fleet.heartbeat(beat(stuck_id, "stuck", 7)).state == "ok"
        await world.clock.advance(10)
    completion = world.submit("a")
    await world.settle()
    other_id = await world.join(fake_engine("other"))
    for i in range(3):
        assert world.dispatcher.fleet.heartbeat(beat(stuck_id, "stuck", 7 + (i > 0))).state == "ok"
        assert world.dispatcher.fleet.heartbeat(beat(other_id, "other", 3)).state == "ok"
        await world.clock.advance(9)
    assert completion.state is CompletionState.RUNNING
    for _ in range(3):
        world.dispatcher.fleet.heartbeat(beat(stuck_id, "stuck", 8))
        world.dispatcher.fleet.heartbeat(beat(other_id, "other", 3))
        await world.clock.advance(9)
    assert completion.output.text == "<1>"
    assert completion.stats.engine_name == "other"
    assert world.dispatcher.fleet.heartbeat(beat(stuck_id, "stuck", 8)).state == "unknown"
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["other"]


async def test_a_server_that_answers_slowly_does_not_cost_its_openai_engine(world: World) -> None:
    engine = fake_engine("proxy", text=True, script=Script(hang_after=0))
    engine.info = engine.info.model_copy(update={"engine_type": EngineType.OPENAI})
    engine_id = await world.join(engine)
    completion = world.submit("a")
    for _ in range(20):
        await world.clock.advance(10)
        assert world.dispatcher.fleet.heartbeat(beat(engine_id, "proxy", 7)).state == "ok"
    engine.resume.set()
    assert await completion.output.wait() == "<1>"


async def test_a_late_result_is_dropped(world: World) -> None:
    one = fake_engine("one", script=Script(text=lambda _: "late", hang_after=0))
    await world.join(one)
    completion = world.submit("a")
    await world.settle()
    two = fake_engine("two", script=Script(text=lambda _: "fresh"))
    world.engines["two"] = two
    await world.join(two)
    await world.clock.advance(29)
    beat = HeartbeatRequest(engine_id=1, engine_name="two", runtime_info=RuntimeInfo())
    world.dispatcher.fleet.heartbeat(beat)
    await world.clock.advance(2)
    one.resume.set()
    await world.settle()
    assert await completion.output.wait() == "fresh"


async def test_a_model_that_was_never_there_is_unknown(world: World) -> None:
    await world.join(fake_engine(model="tiny"))
    options = CallOptions(func_name="f", models=("llama", "opt"))
    waiting = world.submit("a", options=options)
    for _ in range(2):
        await world.clock.advance(20)
        world.dispatcher.fleet.heartbeat(
            HeartbeatRequest(engine_id=0, engine_name="fake", runtime_info=RuntimeInfo())
        )
    error = await error_of(waiting)
    assert isinstance(error, NotFound)
    assert error.param == "models"
    assert "llama or opt; there is tiny" in error.message


async def test_no_engine(world: World) -> None:
    other = CallOptions(func_name="f", models=("llama",))
    await world.join(fake_engine("llama", model="llama"))
    await world.clock.advance(31)  # it is lost
    await world.join(fake_engine(model="tiny"))
    waiting = world.submit("a", options=other)
    await world.clock.advance(29)
    assert not waiting.output.is_settled
    late = world.submit("b", options=other)
    for engine_id in (1,):
        world.dispatcher.fleet.heartbeat(
            HeartbeatRequest(engine_id=engine_id, engine_name="fake", runtime_info=RuntimeInfo())
        )
    await world.clock.advance(2)
    error = await error_of(waiting)
    assert isinstance(error, NoEngine)
    assert "llama" in error.message
    assert not late.output.is_settled  # has its own grace
    llama = fake_engine("llama", model="llama")
    await world.join(llama)
    assert await late.output.wait() == "<1>"


async def test_calls_wait_for_engines_that_are_lost_all_at_once(world: World) -> None:
    """From their loss on, as for any other: a link that was cut is often back in seconds."""
    engines = [fake_engine(name, script=Script(hang_after=0)) for name in ("one", "two")]
    for engine in engines:
        await world.join(engine)
    calls = [world.submit(text, options=CallOptions(func_name="f")) for text in "abc"]
    await world.settle()
    assert sum(len(engine.requests) for engine in engines) == len(calls)
    await world.clock.advance(30.5)
    assert not list(world.dispatcher.fleet)
    await world.clock.advance(29)
    assert not any(call.output.is_settled for call in calls)
    back = fake_engine("one")
    await world.join(back)
    assert [await call.output.wait() for call in calls] == ["<1>"] * 3

    await world.clock.advance(30.5)  # it is lost again, with a call that comes after
    assert not list(world.dispatcher.fleet)
    last = world.submit("d", options=CallOptions(func_name="f"))
    await world.clock.advance(30)
    assert isinstance(await error_of(last), NoEngine)


async def test_registering_again_replaces(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    first = await world.join(engine)
    completion = world.submit("a")
    await world.settle()
    engine.script = Script()
    second = await world.join(engine)
    assert second != first
    assert await completion.output.wait() == "<1>"
    assert [view.id for view in world.dispatcher.fleet.views()] == [second]


async def test_too_many_engines(world: World) -> None:
    engines = [fake_engine(f"e{i}") for i in range(4)]
    for engine in engines:
        await world.join(engine)
    with pytest.raises(QuotaExceeded):
        await world.join(fake_engine("e4"))
    await world.join(engines[0])
    assert [model.model_name for model in world.dispatcher.fleet.models().models] == ["tiny"]


async def test_an_engine_that_gives_no_tokenizer_does_not_join(world: World) -> None:
    engine = fake_engine()

    async def refuse() -> None:
        raise Unavailable("loading")

    engine.tokenizer = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(Unavailable):
        await world.join(engine)
    assert engine.is_closed
    assert world.dispatcher.fleet.views() == []


# Cancelling and freeing


async def test_cancel_in_every_state(world: World) -> None:
    engine = fake_engine(tasks_capacity=1, script=Script(hang_after=0))
    await world.join(engine)
    running = world.submit("a ", value("b"))
    await world.settle()
    queued = world.submit("c")
    idle = world.completion("d")
    await world.settle()
    assert (running.state, queued.state) == (CompletionState.RUNNING, CompletionState.QUEUED)
    error = Cancelled("enough")
    for completion in (idle, queued, running):
        world.dispatcher.cancel(completion, error)
        assert completion.state is CompletionState.CANCELLED
        assert completion.output.error is error
        world.dispatcher.check_integrity()
    await world.clock.advance(0.1)
    assert engine.num_aborted == 1
    assert sorted(engine.freed) == sorted(f.context_id for f in engine.requests[0].fills)
    assert engine.contexts == {}
    engine.script = Script()
    done = world.submit("e")
    await done.output.wait()
    world.dispatcher.cancel(done, error)
    assert done.state is CompletionState.DONE


async def test_runs_that_fork_an_unfinished_context_survive_its_cancellation(
    world: World,
) -> None:
    engine = fake_engine(script=Script(hang_after=0))
    await world.join(engine)
    first = world.submit("Shared beginning. ", value("one"))
    second = world.submit("Shared beginning. ", value("two"), session=2)
    await world.settle()
    shared = engine.requests[0].fills[0].context_id
    assert engine.requests[1].fills[0].parent_context_id == shared
    engine.script = Script()
    world.dispatcher.cancel(first, Cancelled("enough"))
    world.dispatcher.check_integrity()
    engine.resume.set()
    assert await second.output.wait() == "<21>"
    assert second.stats.attempts == 1
    third = world.submit("Shared beginning. ", value("three"), session=3)
    await third.output.wait()
    assert engine.requests[2].fills[0].parent_context_id == -1  # it may never have been computed
    list(world.dispatcher.release_session(2))
    await world.clock.advance(0.1)
    assert shared in engine.freed


async def test_releasing_a_session_frees_its_contexts_in_one_request(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    mine = [world.submit("T: ", value(str(i))) for i in range(5)]
    other = world.submit("T: ", value("x"), session=2)
    for completion in [*mine, other]:
        await completion.output.wait()
    list(world.dispatcher.release_session(1))
    await world.settle()
    assert len(engine.freed) == 5
    assert engine.free_batches == 1
    list(world.dispatcher.release_session(2))
    await world.clock.advance(0.1)
    assert len(engine.contexts) == 1  # the tenant's constant beginning
    await world.clock.advance(20)
    beat = HeartbeatRequest(engine_id=0, engine_name="fake", runtime_info=RuntimeInfo())
    for _ in range(30):
        world.dispatcher.fleet.heartbeat(beat)
        await world.clock.advance(20)
    assert engine.contexts == {}  # it expired


async def test_frees_are_sent_until_the_engine_acknowledges_them(world: World) -> None:
    engine = fake_engine()
    engine_id = await world.join(engine)
    await world.submit("T: ", value("x")).output.wait()
    engine.free_error = Unavailable("busy")
    list(world.dispatcher.release_session(1))
    for _ in range(20):
        await world.clock.advance(10)
        world.dispatcher.fleet.heartbeat(beat(engine_id, "fake", None))
    assert 20 < engine.free_batches < 60
    assert engine.freed == []
    engine.free_error = None
    await world.clock.advance(10)
    assert len(engine.freed) == 1
    freed = engine.free_batches
    await world.clock.advance(10)
    assert engine.free_batches == freed


async def test_a_free_that_fails_is_sent_again(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("T: ", value("x")).output.wait()
    engine.free_error = InternalError("hiccup")
    list(world.dispatcher.release_session(1))
    await world.settle()
    assert engine.free_batches == 1
    engine.free_error = None
    await world.clock.advance(0.1)
    assert len(engine.freed) == 1


async def test_constant_beginnings_expire_one_after_the_other(world: World) -> None:
    """Nothing happens meanwhile but that time passes and the engine is alive."""
    engine = fake_engine()
    await world.join(engine)

    async def spend(seconds: int) -> None:
        for _ in range(0, seconds, 10):
            await world.clock.advance(10)
            beat = HeartbeatRequest(engine_id=0, engine_name="fake", runtime_info=RuntimeInfo())
            world.dispatcher.fleet.heartbeat(beat)
        await world.settle()

    for number, constant in enumerate(("First. ", "Second. ", "Third. ")):
        await world.submit(constant, value("x"), session=number).output.wait()
        list(world.dispatcher.release_session(number))
        await spend(20)
    shared = [request.fills[0].context_id for request in engine.requests]
    await spend(530)
    for number in range(3):
        assert not set(shared[number:]) & set(engine.freed)
        await spend(20)
        assert shared[number] in engine.freed


async def test_contexts_are_evicted_for_room(world: World) -> None:
    engine = fake_engine(tokens_capacity=100)
    await world.join(engine)
    for i in range(10):
        await world.submit(f"{i}" * 20, value("y" * 10), session=i).output.wait()
    await world.clock.advance(0.1)
    assert len(engine.freed) > 10
    assert sum(map(len, engine.contexts.values())) <= 300
    (view,) = world.dispatcher.fleet.views()
    assert view.num_tokens <= 100


async def test_reprioritise(world: World) -> None:
    engine = fake_engine(tasks_capacity=1)
    first, second = world.completion("a", session=1), world.completion("b", session=1)
    slow = Objective(PerformanceCriteria.THROUGHPUT, 1, 0.0)
    first.objective = second.objective = slow
    world.dispatcher.submit(first)
    world.dispatcher.submit(second)
    second.objective = Objective(PerformanceCriteria.LATENCY, 0, 0.0)
    world.dispatcher.reprioritise(second)
    world.dispatcher.reprioritise(world.completion("unknown"))
    await world.join(engine)
    await first.output.wait()
    assert engine.prompts == ["b", "a"]


async def test_length_limited_output_keeps_all_ids(world: World) -> None:
    script = Script(text=lambda _: "abc", stop_token=False, finish_reason=FinishReason.LENGTH)
    await world.join(fake_engine(script=script))
    completion = world.submit("x")
    await completion.output.wait()
    assert completion.output.tokenized is not None
    assert len(completion.output.tokenized.ids) == 3
