"""A conversation of many turns is one graph. Only the new turn is sent to the engine, or all of it
if the engine no longer has its context."""

from typing import Any

import pytest

from parrot.serve.contexts.forecast import GROUP_SIZE
from tests.gateway.vendors.conftest import MODEL, serve
from tests.support.fake_engine import fake_engine

PATH = "/v1/chat/completions"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rendered(messages: list[dict[str, Any]]) -> str:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_without_the_context_gets_the_whole_conversation(
    core_config: Any, is_streamed: bool
) -> None:
    engine = fake_engine("e0", model=MODEL, tokens_capacity=3000, max_seq_len=3000)
    async with serve(core_config, engine) as site:
        messages: list[dict[str, Any]] = []

        async def turn(text: str) -> int:
            """Send a turn, and return the number of tokens that were sent to the engine."""
            messages.append(user(text))
            body = {"model": MODEL, "messages": messages, "max_tokens": 100}
            if is_streamed:
                await site.stream(PATH, body | {"stream": True})
            else:
                await site.post(PATH, body)
            assert engine.prompts[-1] == rendered(messages)
            messages.append({"role": "assistant", "content": f"<{len(engine.prompts[-1])}>"})
            return sum(len(piece.token_ids or ()) for piece in engine.requests[-1].fills)

        sizes = [await turn(f"turn {i} " + 100 * "x") for i in range(5)]
        assert max(sizes[1:]) < 2 * sizes[0]
        other = {"model": MODEL, "messages": [user(2500 * "y")], "max_tokens": 100}
        await site.post(PATH, other)  # uses all blocks
        assert await turn("again") > sum(sizes) / 2
        assert await turn("and again") < sizes[0]


async def test_a_conversation_of_many_turns_can_be_continued_from_any(core_config: Any) -> None:
    """Old turns are combined into groups, but a prompt can continue any single turn."""
    engine = fake_engine("e0", model=MODEL, tokens_capacity=12_000, max_seq_len=12_000)
    async with serve(core_config, engine) as site:
        messages: list[dict[str, Any]] = []

        async def turn(before: list[dict[str, Any]], text: str) -> int:
            """Send a turn, and return the number of tokens that were sent to the engine."""
            before.append(user(text))
            await site.post(PATH, {"model": MODEL, "messages": before, "max_tokens": 20})
            assert engine.prompts[-1] == rendered(before)
            before.append({"role": "assistant", "content": f"<{len(engine.prompts[-1])}>"})
            return sum(len(piece.token_ids or ()) for piece in engine.requests[-1].fills)

        sizes = [await turn(messages, f"turn {i}") for i in range(4 * GROUP_SIZE)]
        one = 2 * max(sizes[:3])
        assert max(sizes) < one
        for num_turns in (1, 2, GROUP_SIZE, GROUP_SIZE + 3, 3 * GROUP_SIZE):
            assert await turn(messages[: 2 * num_turns], "else") < one
        await site.post(PATH, {"model": MODEL, "messages": [user(11_800 * "y")], "max_tokens": 20})
        assert await turn(messages, "again") > sum(sizes)
        assert await turn(messages, "and again") < one
        for num_turns in (GROUP_SIZE + 3, 2 * GROUP_SIZE, 3 * GROUP_SIZE):
            assert await turn(messages[: 2 * num_turns], "else") < GROUP_SIZE * one
