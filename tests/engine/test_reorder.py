import asyncio

import pytest

from parrot.engine.reorder import GRACE_S, Arrivals
from parrot.protocol.engine_api import FillPiece
from parrot.protocol.errors import Cancelled
from parrot.utils.clock import ManualClock


def fill(context_id: int, parent: int = -1) -> FillPiece:
    return FillPiece(context_id=context_id, parent_context_id=parent, token_ids=[1])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def arrivals(clock: ManualClock) -> Arrivals:
    return Arrivals(clock)


async def is_held(arrivals: Arrivals, *pieces: FillPiece) -> asyncio.Task[None]:
    task = asyncio.create_task(arrivals.enter(pieces))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_requests_in_order_pass_without_a_pause(arrivals: Arrivals) -> None:
    for pieces in ([fill(1)], [fill(2, 1)], [fill(2)], [fill(3), fill(4, 3)], [fill(5, 4)]):
        entering = arrivals.enter(pieces)
        with pytest.raises(StopIteration):  # it never gave way to another task
            entering.send(None)


async def test_forks_wait_for_the_request_that_creates_their_parent(arrivals: Arrivals) -> None:
    first = await is_held(arrivals, fill(2, 1))
    second = await is_held(arrivals, fill(3, 1))
    grandchild = await is_held(arrivals, fill(4, 3))
    await arrivals.enter([fill(1)])
    await asyncio.wait_for(asyncio.gather(first, second, grandchild), 30)


async def test_the_engine_decides_when_no_parent_comes(
    arrivals: Arrivals, clock: ManualClock
) -> None:
    task = await is_held(arrivals, fill(2, 1))
    other = await is_held(arrivals, fill(3, 1))
    await clock.advance(GRACE_S)
    await asyncio.wait_for(asyncio.gather(task, other), 30)
    again = await is_held(arrivals, fill(4, 1))
    await arrivals.enter([fill(1)])
    await asyncio.wait_for(again, 30)


async def test_a_waiting_request_may_be_cancelled(arrivals: Arrivals) -> None:
    task = await is_held(arrivals, fill(2, 1))
    other = await is_held(arrivals, fill(3, 1))
    task.cancel()
    await arrivals.enter([fill(1)])
    await asyncio.wait_for(other, 30)
    assert task.cancelled()


async def test_a_free_may_overtake_what_it_frees(arrivals: Arrivals, clock: ManualClock) -> None:
    arrivals.free([7])
    with pytest.raises(Cancelled, match="7"):
        await arrivals.enter([fill(7)])
    await clock.advance(GRACE_S + 1)
    await arrivals.enter([fill(7)])


async def test_an_id_may_be_used_again_after_a_free_in_order(arrivals: Arrivals) -> None:
    for _ in range(3):
        await arrivals.enter([fill(7)])
        arrivals.free([7])


async def test_a_reset_forgets_the_last_senders_ids(arrivals: Arrivals) -> None:
    await arrivals.enter([fill(1)])
    arrivals.free([2])
    arrivals.reset()
    await arrivals.enter([fill(2)])
    task = await is_held(arrivals, fill(3, 1))
    await arrivals.enter([fill(1)])
    await asyncio.wait_for(task, 30)
