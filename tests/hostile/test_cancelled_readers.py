"""A reader that is cancelled in the same turn of the event loop in which its value is set: it gets
a cancellation, and no other reader is affected."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from parrot.protocol.public import FirstVarsRequest, SessionCreateRequest, VarGetRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore

Read = Callable[[ServeCore, dict[str, object], str], Awaitable[object]]


async def one(core: ServeCore, scope: dict[str, object], var_id: str) -> object:
    return await core.read(VarGetRequest(**scope), var_id)


async def timed(core: ServeCore, scope: dict[str, object], var_id: str) -> object:
    return await core.read(VarGetRequest(**scope, timeout=60), var_id)


async def first(core: ServeCore, scope: dict[str, object], var_id: str) -> object:
    return await core.first(FirstVarsRequest(**scope, var_ids=[var_id]))


async def stream(core: ServeCore, scope: dict[str, object], var_id: str) -> object:
    return [text async for text in core.stream(VarGetRequest(**scope), var_id)]


@pytest.mark.parametrize("read", [one, timed, first, stream])
@pytest.mark.parametrize("is_set_first", [True, False])
async def test_cancel_and_set_in_one_turn(read: Read, is_set_first: bool) -> None:
    core = ServeCore(CoreConfig())
    scope: dict[str, object] = core.create_session(SessionCreateRequest()).model_dump()
    var_id = core.create_var(**scope, var_name="x", content=None)
    leaves = [asyncio.create_task(read(core, scope, var_id)) for _ in range(3)]
    stays = asyncio.create_task(read(core, scope, var_id))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if is_set_first:
        core.set_var(**scope, var_id=var_id, content="v")
    for reader in leaves:
        reader.cancel()
    if not is_set_first:
        core.set_var(**scope, var_id=var_id, content="v")
    results = await asyncio.gather(*leaves, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
    assert await stays
    core.check_integrity()
    await core.close()
