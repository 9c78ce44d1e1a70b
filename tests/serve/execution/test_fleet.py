"""The fleet of live engines: ids, the quota and the models."""

import pytest

from parrot.protocol.errors import QuotaExceeded
from parrot.protocol.sampling import DefaultSampling
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import Fleet
from tests.support.fake_engine import fake_engine
from tests.support.manual_clock import ManualClock


@pytest.fixture
def fleet() -> Fleet:
    config = CoreConfig(max_engines_num=2)
    clock = ManualClock(100.0)
    return Dispatcher(config, clock, lambda info: fake_engine(info.engine_name)).fleet


async def join(fleet: Fleet, name: str, model: str = "tiny") -> int:
    return await fleet.register(fake_engine(name, model=model).info)


async def test_ids_are_never_used_again(fleet: Fleet) -> None:
    first_id = await join(fleet, "a")
    first = fleet.engines.get(first_id)
    assert first is not None
    fleet.lose(first, "test")
    assert not first.is_alive
    assert fleet.engines.get(first_id) is None
    second_id = await join(fleet, "a")
    assert second_id != first_id
    assert [engine.id for engine in fleet] == [second_id]
    await fleet.close()


async def test_an_engine_that_registers_again_replaces_itself(fleet: Fleet) -> None:
    await join(fleet, "a")
    again = await join(fleet, "a")
    assert [view.id for view in fleet.views()] == [again]
    await fleet.close()


async def test_quota(fleet: Fleet) -> None:
    for name in ("a", "b", "a"):  # The last one replaces the first.
        await join(fleet, name)
    with pytest.raises(QuotaExceeded):
        await join(fleet, "c")
    assert len(list(fleet)) == 2
    await fleet.close()


async def test_models_are_listed_once(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await join(fleet, name, "same")
    models = fleet.models()
    assert [card.id for card in models.data] == ["same"]
    assert models.data[0].max_model_len == 50_000
    assert models.data[0].default_sampling == DefaultSampling(temperature=0.5, top_k=0)
    assert [model.model_name for model in models.models] == ["same"]
    await fleet.close()
