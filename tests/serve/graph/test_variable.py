"""Semantic variables: waiting readers, readers that leave, and the order of notifications."""

import asyncio

import pytest

from parrot.protocol.errors import AlreadySet, EngineFailed
from parrot.serve.graph.nodes import SemanticVariable
from tests.support.texts import streamed


@pytest.fixture
def variable() -> SemanticVariable:
    return SemanticVariable("id", "x", 7)


async def test_a_reader_that_leaves_in_the_turn_of_the_value_does_not_disturb_others(
    variable: SemanticVariable,
) -> None:
    readers = [asyncio.ensure_future(variable.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    readers[1].cancel()
    variable.set("text")
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2 + [str]


async def test_readers_are_woken_even_if_a_callback_fails(variable: SemanticVariable) -> None:
    def fail(_: SemanticVariable) -> None:
        raise RuntimeError("a defect")

    reader = asyncio.ensure_future(variable.wait())
    await asyncio.sleep(0)
    variable.on_settled(fail)
    with pytest.raises(RuntimeError):
        variable.set("text")
    assert await reader == "text"


async def test_a_stream_ends_with_exactly_the_value_or_the_error(
    variable: SemanticVariable,
) -> None:
    reader = asyncio.ensure_future(streamed(variable))
    await asyncio.sleep(0)
    variable.append("a")
    await asyncio.sleep(0)
    variable.set("a text")
    assert await reader == ["a", " text"]
    assert await streamed(variable) == ["a text"]
    failed = SemanticVariable("id", "x", 7)
    failed.append("a")
    failed.fail(EngineFailed("broken"))
    with pytest.raises(EngineFailed):
        await streamed(failed)
    with pytest.raises(AlreadySet):
        failed.set("late")
