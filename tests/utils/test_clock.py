import asyncio

from parrot.utils.clock import MonotonicClock
from tests.support.manual_clock import ManualClock


async def test_sleepers_wake_in_order_of_their_times() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper(n, s)) for n, s in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
    await clock.advance(2.5)
    assert woken == [("a", 1.0), ("b", 2.0)]
    assert clock.now() == 2.5
    await clock.advance(0.5)
    assert woken[-1] == ("c", 3.0)
    await asyncio.gather(*tasks)


async def test_a_woken_task_may_sleep_again_within_the_same_advance() -> None:
    clock = ManualClock()
    ticks: list[float] = []

    async def ticker() -> None:
        for _ in range(3):
            await clock.sleep(1.0)
            ticks.append(clock.now())

    task = asyncio.create_task(ticker())
    await clock.advance(10.0)
    assert ticks == [1.0, 2.0, 3.0]
    assert task.done()


async def test_a_cancelled_sleeper_is_skipped() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await asyncio.sleep(0)
    task.cancel()
    await clock.advance(2.0)
    assert task.cancelled()
    assert clock.now() == 2.0


def test_monotonic_clock_never_decreases() -> None:
    clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
