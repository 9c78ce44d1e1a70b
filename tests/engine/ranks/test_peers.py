"""Devices that ranks cannot use together, on a machine with made-up devices."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parrot.engine.runner.ranks.group import device_kind, reaches_all


class Driver:
    """A driver that knows four devices. `joined` has the pairs that support atomics on each other's
    memory."""

    def __init__(self, joined: set[frozenset[int]]) -> None:
        self._joined = joined

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return int(number > 3)

    def cuDeviceGetP2PAttribute(self, found: Any, which: int, a: Any, b: Any) -> int:
        assert which == 3
        found._obj.value = frozenset((a.value - 10, b.value - 10)) in self._joined
        return 0


@pytest.mark.parametrize(
    ("driver", "want"),
    [
        (Driver({frozenset((1, 2)), frozenset((2, 3)), frozenset((1, 3))}), True),
        (Driver({frozenset((1, 2)), frozenset((1, 3))}), False),
        (Driver(set()), False),
        (SimpleNamespace(), False),  # An old driver without this query.
    ],
)
def test_memory_is_shared_only_with_atomics(
    monkeypatch: pytest.MonkeyPatch, driver: object, want: bool
) -> None:
    """Devices over PCIe can read each other's memory without atomics, but their writes may be
    torn."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    found = [reaches_all(rank, 3, torch.device("cuda", 1 + rank)) for rank in range(3)]
    assert all(found) == want


def test_devices_that_do_not_reach_each_other_share_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver({frozenset((0, 1))}))
    assert not reaches_all(0, 2, torch.device("cuda", 0))


def test_a_machine_without_the_driver_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert not reaches_all(0, 2, torch.device("cuda", 0))


def test_the_kind_of_a_device_is_what_selects_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the memory is not part of the kind. Ranks use the smallest memory of all
    devices."""
    devices = [
        SimpleNamespace(name="A", major=9, minor=0, multi_processor_count=132, total_memory=1),
        SimpleNamespace(name="A", major=9, minor=0, multi_processor_count=132, total_memory=2),
        SimpleNamespace(name="A", major=9, minor=0, multi_processor_count=114, total_memory=1),
        SimpleNamespace(name="B", major=9, minor=0, multi_processor_count=132, total_memory=1),
        SimpleNamespace(name="A", major=8, minor=9, multi_processor_count=132, total_memory=1),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: devices[device.index])
    first, same, *others = (device_kind(torch.device("cuda", i)) for i in range(len(devices)))
    assert first == same == "A with 132 multiprocessors and compute capability 9.0"
    assert len({first, *others}) == 4
