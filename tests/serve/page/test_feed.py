"""The feed: one reading for all viewers, as seldom as its cost asks, and none for nobody."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from parrot.protocol.errors import NotFound, QuotaExceeded
from parrot.serve.page import feed as feeds
from parrot.serve.page.feed import Feed


class SteppedClock:
    """Time passes when somebody sleeps, or as a reading takes it."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        until = self.time + seconds
        await asyncio.sleep(0)
        self.time = max(self.time, until)


class View:
    def __init__(self, clock: SteppedClock, cost_s: float = 0.0) -> None:
        self.read_at: list[float] = []
        self._clock = clock
        self._cost_s = cost_s

    def __call__(self) -> dict[str, Any]:
        self.read_at.append(self._clock.time)
        self._clock.time += self._cost_s
        return {"row": {"n": len(self.read_at)}}


def parse(event: bytes) -> Any:
    return orjson.loads(event.removeprefix(b"event: changes\ndata: "))


async def take(changes: AsyncGenerator[bytes], number: int) -> list[Any]:
    return [parse(await anext(changes))["rows"] for _ in range(number)]


async def test_a_view_is_read_ten_times_a_second() -> None:
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock)
    async with aclosing(feed.changes("v", view, None)) as changes:
        assert await take(changes, 4) == [{"row": {"n": n}} for n in (1, 2, 3, 4)]
    assert view.read_at == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert len(feed) == 0


async def test_a_view_that_is_slow_to_read_is_read_less_often() -> None:
    clock = SteppedClock()
    view = View(clock, cost_s=0.05)
    async with aclosing(Feed(clock, clock.now).changes("v", view, None)) as changes:
        await take(changes, 3)
    assert view.read_at == pytest.approx([0.0, 5.0, 10.0])


async def test_what_sending_takes_counts_but_no_wait_for_who_reads_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "_MAX_SEND_S", 0.01)
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock)
    async with aclosing(feed.changes("v", view, None)) as changes:
        for cost_s in (0.005, 60.0, 0.0):
            await anext(changes)
            clock.time += cost_s
    assert view.read_at == pytest.approx([0.0, 0.5, 60.5])


async def test_topics_share_the_load() -> None:
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock, cost_s=0.005)
    async with (
        aclosing(feed.changes("v", view, None)) as one,
        aclosing(feed.changes("w", View(clock), None)) as two,
    ):
        await anext(one)
        await anext(two)
        await take(one, 2)
    assert view.read_at == pytest.approx([0.0, 1.0, 2.0])


async def test_viewers_share_the_readings() -> None:
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock)
    async with aclosing(feed.changes("v", view, None)) as one:
        await take(one, 1)
        async with aclosing(feed.changes("v", view, None)) as two:
            assert await take(two, 1) == [{"row": {"n": 1}}]
            assert len(view.read_at) == 1
            assert len(feed) == 1
        assert len(feed) == 1
    assert len(feed) == 0


async def test_whoever_comes_back_gets_what_was_missed() -> None:
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock)
    async with aclosing(feed.changes("v", view, None)) as stays:
        first = parse(await anext(stays))
        await take(stays, 2)
        async with aclosing(feed.changes("v", view, first["version"])) as back:
            changes = parse(await anext(back))
    assert not changes["whole"]
    assert changes["rows"] == {"row": {"n": 3}}


async def test_a_view_that_ends_ends_its_viewers_with_the_reason() -> None:
    clock = SteppedClock()
    feed = Feed(clock, clock.now)

    def read() -> dict[str, Any]:
        raise NotFound("the session has ended")

    with pytest.raises(NotFound, match="has ended"):
        await anext(feed.changes("v", read, None))
    assert len(feed) == 0


async def test_viewers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_MAX_VIEWERS", 1)
    clock = SteppedClock()
    feed, view = Feed(clock, clock.now), View(clock)
    async with aclosing(feed.changes("v", view, None)) as changes:
        await take(changes, 1)
        with pytest.raises(QuotaExceeded, match="1 views"):
            await anext(feed.changes("w", view, None))
    async with aclosing(feed.changes("w", view, None)) as changes:
        await take(changes, 1)
