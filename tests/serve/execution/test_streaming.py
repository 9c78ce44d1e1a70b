"""Streaming of outputs to readers."""

from collections.abc import AsyncGenerator

import pytest

from parrot.protocol.engine_api import StreamChunk
from parrot.protocol.errors import UnsupportedField
from parrot.protocol.sampling import SamplingConfig
from tests.serve.execution.world import World
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.texts import streamed


async def test_an_output_is_streamed_on_request(world: World) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", steps=3))
    await world.join(engine)
    completion = world.submit("Go", stream=True)
    deltas = await streamed(completion.output)
    assert "".join(deltas) == "abcdef"
    assert len(deltas) >= 2


@pytest.mark.parametrize("looks", ["reads", "follows"])
async def test_a_running_call_is_streamed_from_its_first_token_once_it_has_a_reader(
    world: World, looks: str
) -> None:
    engine = fake_engine(script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(engine)
    completion = world.submit("Go")
    await world.settle()
    assert (completion.output.partial_text, engine.num_followed) == ("", 0)
    for _ in range(2):  # The second reader shares the stream.
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


async def test_a_followed_output_continues_elsewhere_and_after_a_withdrawal(world: World) -> None:
    first = fake_engine("one", script=Script(text=lambda _: "abcdef", steps=3, hang_after=2))
    await world.join(first)
    completion = world.submit("Go")
    await world.settle()
    world.dispatcher.follow(completion)
    await world.settle()
    # The chunk arrives in the turn of the loop in which the call is withdrawn: it is dropped.
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


async def test_the_error_of_an_engine_that_cannot_be_followed(world: World) -> None:
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


async def test_everything_was_delivered_before_the_engine_died(world: World) -> None:
    script = Script(text=lambda _: "abcd", steps=2, hang_after=2)
    await world.join(fake_engine("one", script=script))
    sampling = SamplingConfig(max_gen_length=4)
    completion = world.submit("Go", stream=True, sampling=sampling)
    await world.settle()
    await world.join(fake_engine("two"))
    world.lose(0)
    assert await completion.output.wait() == "abcd"
