"""The registry of live engines."""

import pytest

from parrot.protocol.errors import QuotaExceeded
from parrot.serve.execution.engines import EngineRegistry
from parrot.utils.clock import ManualClock
from tests.support.fake_engine import FakeEngine, fake_engine


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def registry(clock: ManualClock) -> EngineRegistry:
    return EngineRegistry(max_engines=2, clock=clock)


def make(name: str, model: str = "tiny") -> FakeEngine:
    return fake_engine(name, model=model)


def test_ids_are_never_used_again(registry: EngineRegistry) -> None:
    fake = make("a")
    first = registry.add(fake.info, fake)
    assert registry.get(first.id) is first
    assert registry.find(fake.info) is first
    registry.remove(first)
    assert not first.is_alive
    assert registry.find(fake.info) is None
    second = registry.add(fake.info, fake)
    assert second.id != first.id
    assert list(registry) == [second]


def test_quota(registry: EngineRegistry) -> None:
    for name in ("a", "b"):
        registry.add(make(name).info, make(name))
    registry.require_room(make("a").info)  # would replace one
    with pytest.raises(QuotaExceeded):
        registry.add(make("c").info, make("c"))
    assert len(registry) == 2


def test_models_are_listed_once(registry: EngineRegistry) -> None:
    for name in ("a", "b"):
        registry.add(make(name, "same").info, make(name, "same"))
    models = registry.models()
    assert [card.id for card in models.data] == ["same"]
    assert models.data[0].max_model_len == 50_000
    assert [model.model_name for model in models.models] == ["same"]
