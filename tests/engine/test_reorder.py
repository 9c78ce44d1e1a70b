import asyncio

import pytest

from parrot.engine.app import GRACE_S, ReorderBuffer
from parrot.protocol.engine_api import FillPiece
from parrot.protocol.errors import Cancelled
from tests.support.manual_clock import ManualClock


def fill(context_id: int, parent: int = -1) -> FillPiece:
    return FillPiece(context_id=context_id, parent_context_id=parent, token_ids=[1])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def buffer(clock: ManualClock) -> ReorderBuffer:
    return ReorderBuffer(clock)


async def is_held(buffer: ReorderBuffer, *pieces: FillPiece) -> asyncio.Task[None]:
    task = asyncio.create_task(buffer.enter(pieces))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_requests_in_order_enter_without_waiting(buffer: ReorderBuffer) -> None:
    for pieces in ([fill(1)], [fill(2, 1)], [fill(2)], [fill(3), fill(4, 3)], [fill(5, 4)]):
        entering = buffer.enter(pieces)
        with pytest.raises(StopIteration):  # The coroutine never yielded to another task.
            entering.send(None)


async def test_forks_wait_for_the_request_that_creates_their_parent(buffer: ReorderBuffer) -> None:
    first = await is_held(buffer, fill(2, 1))
    second = await is_held(buffer, fill(3, 1))
    grandchild = await is_held(buffer, fill(4, 3))
    await buffer.enter([fill(1)])
    await asyncio.wait_for(asyncio.gather(first, second, grandchild), 30)


async def test_forks_enter_after_the_grace_period_without_their_parent(
    buffer: ReorderBuffer, clock: ManualClock
) -> None:
    task = await is_held(buffer, fill(2, 1))
    other = await is_held(buffer, fill(3, 1))
    await clock.advance(GRACE_S)
    await asyncio.wait_for(asyncio.gather(task, other), 30)
    again = await is_held(buffer, fill(4, 1))
    await buffer.enter([fill(1)])
    await asyncio.wait_for(again, 30)


async def test_a_waiting_request_may_be_cancelled(buffer: ReorderBuffer) -> None:
    task = await is_held(buffer, fill(2, 1))
    other = await is_held(buffer, fill(3, 1))
    task.cancel()
    await buffer.enter([fill(1)])
    await asyncio.wait_for(other, 30)
    assert task.cancelled()


async def test_a_free_may_overtake_its_request(buffer: ReorderBuffer, clock: ManualClock) -> None:
    buffer.free([7])
    with pytest.raises(Cancelled, match="7"):
        await buffer.enter([fill(7)])
    await clock.advance(GRACE_S + 1)
    await buffer.enter([fill(7)])


async def test_an_id_may_be_used_again_after_a_free_in_order(buffer: ReorderBuffer) -> None:
    for _ in range(3):
        await buffer.enter([fill(7)])
        buffer.free([7])


async def test_a_reset_forgets_the_ids_of_the_last_sender(buffer: ReorderBuffer) -> None:
    await buffer.enter([fill(1)])
    buffer.free([2])
    buffer.reset()
    await buffer.enter([fill(2)])
    task = await is_held(buffer, fill(3, 1))
    await buffer.enter([fill(1)])
    await asyncio.wait_for(task, 30)
