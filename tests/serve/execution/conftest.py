from collections.abc import AsyncIterator

import pytest

from tests.serve.execution.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.dispatcher.check_integrity()
    await world.dispatcher.close()
