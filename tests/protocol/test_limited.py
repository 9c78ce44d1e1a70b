"""Requests of several kinds over one transport."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from parrot.protocol.limited import LimitedTransport


class Held:
    """A transport whose requests and streams wait for `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.open: list[str] = []
        self.is_closed = False

    async def request(self, method: str, path: str, **options: Any) -> Any:
        self.open.append(path)
        try:
            await self.release.wait()
        finally:
            self.open.remove(path)
        return path

    async def stream(
        self, method: str, path: str, **options: Any
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        yield "name", await self.request(method, path)

    async def close(self) -> None:
        self.is_closed = True


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def first(transport: LimitedTransport, path: str) -> object:
    async with aclosing(transport.stream("GET", path)) as events:
        return [event async for event in events]


async def test_a_kind_at_its_limit_does_not_delay_another() -> None:
    held = Held()
    reads, calls = LimitedTransport(held, 2), LimitedTransport(held, 1)
    tasks = [asyncio.create_task(first(reads, f"r{number}")) for number in range(3)]
    await settle()
    tasks += [asyncio.create_task(calls.request("POST", f"c{number}")) for number in range(2)]
    await settle()
    assert held.open == ["r0", "r1", "c0"]
    tasks[0].cancel()  # Its slot becomes free.
    await settle()
    assert held.open == ["r1", "c0", "r2"]
    held.release.set()
    results = await asyncio.gather(*tasks[1:])
    assert results == [[("name", "r1")], [("name", "r2")], "c0", "c1"]
    await reads.close()
    assert held.is_closed
