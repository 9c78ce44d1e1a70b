"""The CUDA device of each rank, on a machine with made-up devices."""

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.load import rank_device
from parrot.engine.runner.ranks.group import RankGroup
from parrot.utils.config import ConfigError


class MadeUpMember:
    def __init__(self, rank: int, size: int) -> None:
        self.group = RankGroup(rank, size)

    def join(self, device: torch.device, layout: MemoryLayout | None, *, with_tables: bool) -> None:
        raise AssertionError("no rank may join")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that become the current device of the thread. The machine has four."""
    found: list[torch.device] = []

    def choose(device: torch.device) -> None:
        assert device.index is not None, "torch refuses a device without a number"
        found.append(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return found


def config(device: str, ranks: int = 1) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {"model": "m", "device": device, "instance": {"tensor_parallel": ranks}}
    )


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:2", 2)])
def test_one_rank_uses_the_configured_device(
    chosen: list[torch.device], name: str, index: int
) -> None:
    assert rank_device(config(name), None) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


def test_ranks_use_consecutive_devices_from_the_configured_one_on(
    chosen: list[torch.device],
) -> None:
    settings = config("cuda:1", 3)
    found = [rank_device(settings, MadeUpMember(rank, 3)) for rank in range(3)]
    assert found == chosen == [torch.device("cuda", index) for index in (1, 2, 3)]


@pytest.mark.parametrize(("name", "ranks"), [("cuda:4", 1), ("cuda:3", 2)])
def test_devices_that_do_not_exist_are_refused(
    chosen: list[torch.device], name: str, ranks: int
) -> None:
    member = None if ranks == 1 else MadeUpMember(0, ranks)
    with pytest.raises(ConfigError, match=f"{ranks} CUDA devices, starting at {name}, .* only 4"):
        rank_device(config(name, ranks), member)
    assert not chosen
