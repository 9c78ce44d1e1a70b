"""A standby keeps no state from earlier periods in which it was active.

`tests/utils/test_collector.py` runs these tests in a separate process."""

import asyncio
import gc
import weakref

import pytest

from parrot.serve.config import CoreConfig
from parrot.server import standby
from parrot.server.standby import Front


class Served:
    """An object in a reference cycle, like a ServeCore."""

    def __init__(self) -> None:
        self.own = self


class NoMore(Exception):
    pass


async def test_no_objects_of_earlier_active_periods_remain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[weakref.ref[Served]] = []

    async def take_turn(config: CoreConfig, address: str, front: Front) -> None:
        assert all(one() is None for one in served)
        if served:
            raise NoMore
        served.append(weakref.ref(Served()))
        gc.freeze()  # like the objects that a journal has restored
        await asyncio.sleep(0)

    monkeypatch.setattr(standby, "_take_turn", take_turn)
    monkeypatch.setattr("parrot.utils.collector.gc", gc)
    config = CoreConfig()
    with pytest.raises(NoMore):
        await standby._take_turns(config, "", Front(config))
    assert gc.get_freeze_count() == 0
