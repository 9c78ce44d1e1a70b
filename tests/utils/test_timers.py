import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.utils.heaps import TimerQueue
from tests.support.manual_clock import ManualClock


async def test_timers_fire_in_order_of_their_times() -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[tuple[str, float]] = []
    for name, when in (("late", 9.0), ("early", 1.0), ("middle", 5.0)):
        timers.call_at(when, lambda name=name: fired.append((name, clock.now())))
    await clock.advance(6)
    assert fired == [("early", 1.0), ("middle", 5.0)]
    assert len(timers) == 1
    await clock.advance(10)
    assert fired[-1] == ("late", 9.0)
    assert len(timers) == 0


async def test_a_past_time_fires_at_once() -> None:
    clock = ManualClock(start=100)
    timers = TimerQueue(clock)
    fired: list[float] = []
    timers.call_at(3, lambda: fired.append(clock.now()))
    await clock.advance(0)
    assert fired == [100]


async def test_a_cancelled_timer_never_fires() -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[int] = []
    timer = timers.call_at(1, lambda: fired.append(1))
    timers.call_at(2, lambda: fired.append(2))
    timer.cancel()
    timer.cancel()
    await clock.advance(5)
    timer.cancel()
    assert fired == [2]
    assert len(timers) == 0


async def test_a_callback_may_set_and_cancel_timers() -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[float] = []
    other = timers.call_at(1.5, lambda: fired.append(-1))

    def first() -> None:
        other.cancel()
        timers.call_at(1.2, lambda: fired.append(clock.now()))

    timers.call_at(1, first)
    await clock.advance(3)
    assert fired == [1.2]
    timers.call_at(4, lambda: fired.append(clock.now()))
    await clock.advance(3)
    assert fired == [1.2, 4]


async def test_a_callback_that_raises_is_logged_and_stops_no_other_timer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[float] = []

    def no_space() -> None:
        raise OSError(28, "No space left on device")

    timers.call_at(1, no_space)
    timers.call_at(1, lambda: fired.append(clock.now()))
    timers.call_at(2, lambda: fired.append(clock.now()))
    await clock.advance(3)
    timers.call_at(4, lambda: fired.append(clock.now()))
    await clock.advance(3)
    assert fired == [1, 2, 4]
    assert "No space left on device" in caplog.text


async def test_close_forgets_all() -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[int] = []
    timers.call_at(1, lambda: fired.append(1))
    await timers.close()
    await clock.advance(5)
    assert fired == []


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=40))
async def test_exactly_the_uncancelled_ones_fire_on_time(plan: list[tuple[float, bool]]) -> None:
    clock = ManualClock()
    timers = TimerQueue(clock)
    fired: list[tuple[float, float]] = []
    for when, cancelled in plan:
        timer = timers.call_at(when, lambda when=when: fired.append((when, clock.now())))
        if cancelled:
            timer.cancel()
    await clock.advance(100)
    assert all(at == pytest.approx(when) for when, at in fired)
    assert [when for when, _ in fired] == sorted(when for when, gone in plan if not gone)


async def test_a_cancelled_timer_holds_no_references() -> None:
    """Otherwise ended sessions would keep their texts in memory until their expiry time."""

    class Large:
        def ring(self) -> None: ...

    timers = TimerQueue(ManualClock())
    large = Large()
    timer, held = timers.call_at(600.0, large.ring), weakref.ref(large)
    timer.cancel()
    del large
    gc.collect()
    assert held() is None
    await timers.close()
