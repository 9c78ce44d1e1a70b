"""Keys can be changed while ServeCore runs."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from parrot.gateway.page.endpoints import Page
from parrot.gateway.page.history import History
from parrot.gateway.page.visitors import Visitors
from parrot.protocol.errors import AuthenticationFailed, PermissionDenied, SessionGone
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.events import EngineLost
from parrot.serve.tenants.keys_file import PERIOD_S, KeysWatch
from parrot.serve.tenants.table import KeysChange
from tests.serve.tenants.keys import entry, write_keys
from tests.support.fake_engine import fake_engine
from tests.support.manual_clock import ManualClock


class World:
    """A core with a keys file, and the recorded reports of the watch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.write("a", "b")
        self.core = ServeCore(CoreConfig(keys_file=str(path)), clock=self.clock)
        self.changes: asyncio.Queue[KeysChange] = asyncio.Queue()
        self.troubles: asyncio.Queue[str] = asyncio.Queue()
        watch = KeysWatch(self.core.tenants, self.clock, self.changed, self.troubles.put_nowait)
        self.task = asyncio.create_task(watch.run())

    def write(self, *names: str, **fields: object) -> None:
        write_keys(self.path, *(entry(name, f"key {name}", **fields) for name in names))
        # Change the time, because a test may write twice within one tick of the file system's
        # clock.
        facts = self.path.stat()
        os.utime(self.path, ns=(facts.st_atime_ns, facts.st_mtime_ns + id(names) % 10**6))

    async def changed(self, change: KeysChange) -> None:
        for _ in self.core.sessions.keys_changed():
            await asyncio.sleep(0)
        self.changes.put_nowait(change)

    def begin(self, name: str) -> tuple[int, str]:
        made = self.core.create_session(SessionCreateRequest(api_key=f"key {name}"))
        return made.session_id, made.session_auth


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "keys.json")
    yield world
    world.task.cancel()
    world.core.check_integrity()
    await world.core.close()


async def next_change(world: World) -> KeysChange:
    change = asyncio.ensure_future(world.changes.get())
    while not change.done():
        await world.clock.advance(PERIOD_S)
        await asyncio.wait([change], timeout=0.01)
    return change.result()


async def test_a_removed_key_ends_its_sessions(world: World) -> None:
    mine, others = world.begin("a"), world.begin("b")
    visitors = Visitors("token", world.core.tenants, world.clock)
    cookies = [visitors.enter("key a"), visitors.enter("key b")]
    world.write("b", "c")
    assert await next_change(world) == KeysChange(["c"], ["a"], [], [])
    with pytest.raises(AuthenticationFailed):
        world.core.tenant("key a")
    with pytest.raises(SessionGone):
        world.core.session_info(*mine)
    with pytest.raises(AuthenticationFailed):
        visitors.of(cookies[0])
    assert visitors.of(cookies[1]).tenant == "b"
    world.core.session_info(*others)
    world.begin("c")


async def test_a_new_key_of_a_tenant_keeps_its_sessions(world: World) -> None:
    mine = world.begin("a")
    cookie = (visitors := Visitors("token", world.core.tenants, world.clock)).enter("key a")
    write_keys(world.path, entry("a", "another key"), entry("b", "key b"))
    assert await next_change(world) == KeysChange([], [], ["a"], [])
    world.core.session_info(*mine)
    with pytest.raises(AuthenticationFailed):
        world.begin("a")
    with pytest.raises(AuthenticationFailed):
        visitors.of(cookie)


async def test_new_scopes_and_limits_apply_at_once(world: World) -> None:
    world.write("a", "b", scopes=["metrics"], limits={"sessions": 1})
    assert await next_change(world) == KeysChange([], [], [], ["a", "b"])
    with pytest.raises(PermissionDenied, match="scope `user`"):
        world.begin("a")


async def test_sessions_end_when_their_scope_is_removed(world: World) -> None:
    mine = world.begin("a")
    write_keys(world.path, entry("a", "key a", scopes=["metrics"]), entry("b", "key b"))
    await next_change(world)
    with pytest.raises(SessionGone):
        world.core.session_info(*mine)


async def test_a_key_removed_during_its_request_creates_no_session(
    world: World,
) -> None:
    tenant = world.core.tenant("key a")
    world.write("b")
    await next_change(world)
    with pytest.raises(AuthenticationFailed):
        world.core.begin_session(tenant, SessionCreateRequest())


async def test_unexpected_file_contents_do_not_stop_the_watch(world: World) -> None:
    mine = world.begin("a")
    depth = 500  # can be parsed, but not serialized
    world.path.write_text('{"keys": [{"id": ' + "[" * depth + "]" * depth + "}]}")
    trouble = asyncio.ensure_future(world.troubles.get())
    while not trouble.done():
        await world.clock.advance(PERIOD_S)
        await asyncio.wait([trouble], timeout=0.01)
    world.core.session_info(*mine)
    world.write("b")
    assert (await next_change(world)).removed == ["a"]


async def test_a_bad_file_changes_nothing_and_is_reported_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    mine = world.begin("a")
    with caplog.at_level(logging.ERROR):
        draft = world.path.with_name("draft")
        draft.write_text("{")
        draft.replace(world.path)
        trouble = asyncio.ensure_future(world.troubles.get())
        while not trouble.done():
            await world.clock.advance(PERIOD_S)
            await asyncio.wait([trouble], timeout=0.01)
        await world.clock.advance(10 * PERIOD_S)
    assert "not valid JSON" in trouble.result()
    assert world.troubles.empty()
    assert caplog.text.count("the keys were not changed") == 1
    world.core.session_info(*mine)
    world.begin("a")
    world.path.unlink()
    await world.clock.advance(PERIOD_S)
    world.write("b")
    assert (await next_change(world)).removed == ["a"]


async def test_a_viewer_of_the_page_is_signed_out_when_the_key_is_removed(world: World) -> None:
    world.write("b", scopes=["admin"])
    await next_change(world)
    page = Page(world.core, None, History(world.core))
    visitor = page._visitors.of(page._visitors.enter("key b"))
    assert visitor.name == "operator b"
    feed = page.events(visitor, None)
    await anext(feed)
    world.write("b", scopes=["user"])
    await next_change(world)
    world.core.events.emit(EngineLost, fake_engine("e0").info, "secret")
    news = asyncio.ensure_future(anext(feed))
    while not news.done():
        await world.clock.advance(1.0)
        await asyncio.wait([news], timeout=0.01)
    assert isinstance(news.exception(), AuthenticationFailed)
