"""A partial output is continued on another engine, or when its call is submitted again."""

from typing import Any

import pytest

from parrot.protocol.engine_api import Capabilities
from parrot.protocol.errors import EngineFailed
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import CallOptions, CompletionState
from tests.serve.execution.world import World, error_of
from tests.support.byte_tokenizer import plain_byte_tokenizer, tokenizer_id_of
from tests.support.fake_engine import Script, fake_engine


async def test_a_stream_continues_on_another_engine_without_repeating(world: World) -> None:
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


async def test_a_stream_continues_with_another_tokenizer(world: World) -> None:
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


@pytest.mark.parametrize("constraint", [{"json_schema": {"type": "object"}}, {"regex": "a.*"}])
async def test_a_constrained_stream_continues_after_the_delivered_text(
    world: World, constraint: dict[str, Any]
) -> None:
    """The other engine gets the delivered tokens, so it can restore the grammar's state."""
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


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_stream_of_tokens_is_not_continued_by_a_server_that_starts_again(
    world: World, is_chat: bool
) -> None:
    """The server renders the messages of a chat, or starts a grammar from its first state."""
    script = Script(text=lambda _: "abcd", steps=2, hang_after=1)
    await world.join(fake_engine("one", script=script))
    options = CallOptions(func_name="f", chat=is_chat)
    sampling = SamplingConfig() if is_chat else SamplingConfig(regex="a.*")
    completion = world.submit("Go", stream=True, sampling=sampling, options=options)
    await world.settle()
    assert completion.output.partial_text == "ab"
    record = Capabilities(features=frozenset({"messages", "regex"}))
    second = fake_engine("two", text=True, capabilities=record)
    await world.join(second)
    world.lose(0)
    assert isinstance(await error_of(completion), EngineFailed)
    assert not second.requests


@pytest.mark.parametrize("constraint", [{"json_schema": {"type": "object"}}, {"regex": "a.*"}])
async def test_a_withdrawn_constrained_stream_starts_again(
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


async def test_an_engine_that_takes_text_generates_only_the_rest(world: World) -> None:
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


async def test_a_withdrawn_call_stops_streaming_and_continues_later(
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
    assert fill.parent_len == len("Goabcd") - 1  # The last token is filled again.
    assert completion.stats.attempts == 2
    await world.submit("!", previous=completion).output.wait()
    assert engine.requests[2].fills[0].parent_len == len("Goabcdef")


async def test_a_withdrawn_call_continues_elsewhere_if_its_engine_is_lost(world: World) -> None:
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


async def test_withdrawn_runs_end_with_their_session(world: World) -> None:
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
