"""Changed keys: what they change in the service, and that they did."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from parrot.serve.core import ServeCore
from parrot.serve.tenants.keys_file import KeysWatch
from parrot.serve.tenants.table import KeysChange
from parrot.utils.tasks import TaskSet

Note = Callable[..., None]


@asynccontextmanager
async def watched_keys(core: ServeCore, note: Note | None) -> AsyncIterator[None]:
    """Take in changes of the file of keys during the block. `note` is told of each."""

    async def changed(change: KeysChange) -> None:
        if note is not None:
            note("keys changed", "ok", **change._asdict())
        for _ in core.sessions.keys_changed():
            await asyncio.sleep(0)  # others may have a turn

    def refused(reason: str) -> None:
        if note is not None:
            note("keys changed", "refused", reason=reason)

    tasks = TaskSet()
    tasks.spawn(KeysWatch(core.tenants, core.clock, changed, refused).run(), name="keys")
    try:
        yield
    finally:
        await tasks.close()
