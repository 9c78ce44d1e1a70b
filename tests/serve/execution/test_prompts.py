"""Requests to engines: the forked contexts and the filled pieces of prompts."""

import asyncio

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import UnsupportedField
from parrot.serve.graph.nodes import CallOptions
from tests.serve.execution.world import World, error_of, value
from tests.support.fake_engine import Script, fake_engine


async def test_one_request_does_a_completion_with_a_tenants_prefix(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("System. ", value("one")).output.wait()
    await world.submit("System. ", value("two"), session=2).output.wait()
    first, second = engine.requests
    assert len(first.fills) == 2
    assert first.fills[1].parent_context_id == first.fills[0].context_id
    assert first.fills[1].parent_len == 8
    assert len(second.fills) == 1  # The other session forks the same constant context.
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
    assert request.fills[0].parent_len == len("Q: why A: <10>")  # Without the stop token.
    assert second.stats.computed_tokens == len(" And? ")


async def test_after_a_stop_string_the_text_is_tokenized_again(world: World) -> None:
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


async def test_chat_without_a_template_is_rejected(world: World) -> None:
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
    assert len(fill.token_ids) == 1  # The prompt is in the first call's context.


async def test_length_limited_output_keeps_all_ids(world: World) -> None:
    script = Script(text=lambda _: "abc", stop_token=False, finish_reason=FinishReason.LENGTH)
    await world.join(fake_engine(script=script))
    completion = world.submit("x")
    await completion.output.wait()
    assert completion.output.tokenized is not None
    assert len(completion.output.tokenized.ids) == 3
