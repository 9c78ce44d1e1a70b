"""State that a standby keeps from the turns in which it served.

`tests/utils/test_collector.py` runs this in a process of its own."""

import asyncio
import gc
import weakref

import pytest

from parrot.serve.config import CoreConfig
from parrot.server import standby
from parrot.server.standby import Front


class Served:
    """In a cycle, as a ServeCore is."""

    def __init__(self) -> None:
        self.own = self


class NoMore(Exception):
    pass


async def test_nothing_is_left_of_what_it_has_served_before(
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
