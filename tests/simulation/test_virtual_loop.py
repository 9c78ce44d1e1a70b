"""The event loop on virtual time."""

import asyncio

import pytest

from parrot.simulation.loop import Deadlock, LoopClock, run_virtual
from parrot.utils.clock import Clock
from parrot.utils.heaps import TimerQueue


def test_an_hour_takes_no_time():
    async def main() -> float:
        clock: Clock = LoopClock()
        await asyncio.sleep(3000)
        await clock.sleep(600.5)
        return clock.now()

    assert run_virtual(main()) == 3600.5


def test_timers_fire_in_order_and_ties_as_they_were_set():
    async def main() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((asyncio.get_running_loop().time(), name))

        names = {"late": 3.0, **{f"tie{n}": 2.0 for n in range(20)}, "early": 1.0}
        await asyncio.gather(*(wait(name, s) for name, s in names.items()))
        return seen

    ties = [(2.0, f"tie{n}") for n in range(20)]
    assert run_virtual(main()) == [(1.0, "early"), *ties, (3.0, "late")]


def test_time_does_not_advance_while_a_task_can_run():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        timer = asyncio.create_task(asyncio.sleep(0.001))
        times = []
        for _ in range(1000):
            await asyncio.sleep(0)
            times.append(loop.time())
        await timer
        return times

    assert set(run_virtual(main())) == {0.0}


def test_functions_for_threads_run_at_once_and_raise():
    async def main() -> None:
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        assert asyncio.get_running_loop().time() == 0.0

    run_virtual(main())


def test_timeouts_and_cancelled_timers():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()
        far = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(1)
        far.cancel()
        await asyncio.gather(far, return_exceptions=True)
        timers = TimerQueue(LoopClock())
        fired: list[float] = []
        timers.call_at(8.0, lambda: fired.append(8.0))
        timers.call_at(7.0, lambda: fired.append(7.0)).cancel()
        await asyncio.sleep(3)
        await timers.close()
        assert fired == [8.0]
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 9.0


def test_a_deadlock_error_names_the_waiting_tasks():
    async def waits_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.create_task(waits_for_ever(), name="the reader")

    with pytest.raises(Deadlock, match=r"at 2 s .*the reader \(.*waits_for_ever:\d+\)"):
        run_virtual(main())


def test_the_end_of_time_is_a_deadlock_too():
    async def main() -> None:
        await asyncio.sleep(100)

    with pytest.raises(Deadlock, match="main"):
        run_virtual(main(), end_s=99)
    run_virtual(main(), end_s=100)
