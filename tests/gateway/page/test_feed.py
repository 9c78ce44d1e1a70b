"""The feed reads each view once for all viewers, less often if it is expensive, and only if it has
viewers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from parrot.gateway.page import feed as feeds
from parrot.gateway.page.feed import Feed
from parrot.protocol.errors import NotFound, QuotaExceeded
from tests.support.manual_clock import ManualClock


class Service:
    """A feed on virtual time, with the CPU time of its thread."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cpu_s = 0.0
        self.feed = Feed(self.clock, lambda: self.cpu_s)

    async def next(self, changes: AsyncGenerator[bytes], within_s: float = 0.1) -> Any:
        """Return the next changes of a viewer."""
        event = asyncio.ensure_future(anext(changes))
        await self.clock.advance(within_s)
        assert event.done()
        return orjson.loads((await event).removeprefix(b"event: changes\ndata: "))


class View:
    """A view that changes with each reading. A reading takes `cost_s` seconds."""

    def __init__(self, service: Service, cost_s: float = 0.0) -> None:
        self.read_at: list[float] = []
        self._service = service
        self._cost_s = cost_s

    def __call__(self) -> dict[str, Any]:
        self.read_at.append(self._service.clock.now())
        self._service.cpu_s += self._cost_s
        return {"row": {"n": len(self.read_at)}}


async def test_a_view_is_read_ten_times_a_second_while_it_has_viewers() -> None:
    service = Service()
    view = View(service)
    async with aclosing(service.feed.changes("v", view, None)) as changes:
        for n in (1, 2, 3, 4):
            assert (await service.next(changes, 0.0 if n == 1 else 0.1))["rows"]["row"] == {"n": n}
    assert view.read_at == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert len(service.feed) == 0
    await service.clock.advance(10.0)
    assert len(view.read_at) == 4


async def test_an_up_to_date_viewer_is_woken_only_by_changes() -> None:
    service = Service()
    rows: dict[str, Any] = {"row": {}}
    async with aclosing(service.feed.changes("v", lambda: dict(rows), None)) as changes:
        await service.next(changes)
        event = asyncio.ensure_future(anext(changes))
        await service.clock.advance(10.0)
        assert not event.done()
        rows["other"] = {}
        await service.clock.advance(0.1)
        assert b"other" in await event


async def test_a_view_that_is_slow_to_read_is_read_less_often() -> None:
    service = Service()
    view = View(service, cost_s=0.05)
    async with aclosing(service.feed.changes("v", view, None)) as changes:
        for within_s in (0.0, 5.0, 5.0):
            await service.next(changes, within_s)
    assert view.read_at == pytest.approx([0.0, 5.0, 10.0])


async def test_the_time_to_send_counts_but_not_the_wait_for_slow_viewers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "_MAX_SEND_S", 0.01)
    service = Service()
    view = View(service)
    async with aclosing(service.feed.changes("v", view, None)) as changes:
        for within_s, cost_s in ((0.0, 0.005), (0.5, 60.0), (1.0, 0.0)):
            await service.next(changes, within_s)
            service.cpu_s += cost_s
    assert view.read_at == pytest.approx([0.0, 0.5, 1.5])


async def test_topics_share_the_load() -> None:
    service = Service()
    view = View(service, cost_s=0.005)
    async with (
        aclosing(service.feed.changes("v", view, None)) as one,
        aclosing(service.feed.changes("w", View(service), None)) as two,
    ):
        await service.next(one, 0.0)
        await service.next(two, 0.0)
        await service.next(one, 1.0)
        await service.next(one, 1.0)
    assert view.read_at == pytest.approx([0.0, 1.0, 2.0])


async def test_viewers_share_the_readings() -> None:
    service = Service()
    feed, view = service.feed, View(service)
    async with aclosing(feed.changes("v", view, None)) as one:
        await service.next(one, 0.0)
        async with aclosing(feed.changes("v", view, None)) as two:
            assert (await service.next(two, 0.0))["rows"] == {"row": {"n": 1}}
            assert len(view.read_at) == 1
            assert len(feed) == 1
        assert len(feed) == 1
    assert len(feed) == 0


async def test_a_viewer_that_leaves_does_not_affect_others() -> None:
    service = Service()
    view = View(service)
    stays, leaves = (service.feed.changes("v", view, None) for _ in range(2))
    async with aclosing(stays), aclosing(leaves):
        await service.next(stays, 0.0)
        await service.next(leaves, 0.0)
        waiting = asyncio.ensure_future(anext(leaves))
        await service.clock.advance(0.0)
        waiting.cancel()
        assert (await service.next(stays))["rows"] == {"row": {"n": 2}}


async def test_a_returning_viewer_gets_missed_changes() -> None:
    service = Service()
    view = View(service)
    async with aclosing(service.feed.changes("v", view, None)) as stays:
        first = await service.next(stays, 0.0)
        await service.next(stays)
        await service.next(stays)
        async with aclosing(service.feed.changes("v", view, first["version"])) as back:
            changes = await service.next(back, 0.0)
    assert not changes["whole"]
    assert changes["rows"] == {"row": {"n": 3}}


async def test_a_view_that_ends_ends_its_viewers_with_the_reason() -> None:
    service = Service()
    is_there = False

    def read() -> dict[str, Any]:
        if not is_there:
            raise NotFound("the session has ended")
        return {}

    with pytest.raises(NotFound, match="has ended"):
        await anext(service.feed.changes("v", read, None))
    assert len(service.feed) == 0
    is_there = True
    viewers = [service.feed.changes("v", read, None) for _ in range(2)]
    for viewer in viewers:
        await service.next(viewer, 0.0)
    is_there = False
    for viewer in viewers:
        with pytest.raises(NotFound, match="has ended"):
            await service.next(viewer)
    assert len(service.feed) == 0


async def test_viewers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_MAX_VIEWERS", 1)
    service = Service()
    feed, view = service.feed, View(service)
    async with aclosing(feed.changes("v", view, None)) as changes:
        await service.next(changes, 0.0)
        with pytest.raises(QuotaExceeded, match="1 views"):
            await anext(feed.changes("w", view, None))
    async with aclosing(feed.changes("w", view, None)) as changes:
        await service.next(changes, 0.0)
