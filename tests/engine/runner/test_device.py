"""After an error, the device is queried to distinguish a failed step from a lost device."""

import pytest
import torch

from parrot.engine.core.steps import DeviceLost
from parrot.engine.runner.device import detect_device_loss

CUDA = torch.device("cuda")


def fail(device: torch.device) -> None:
    with detect_device_loss(device):
        raise RuntimeError("an illegal memory access\nmore about it")


def test_a_device_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(RuntimeError, match="illegal"):
        fail(CUDA)
    with pytest.raises(RuntimeError, match="illegal"):
        fail(torch.device("cpu"))


def test_a_device_that_fails_every_call_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(DeviceLost, match=r"^an illegal memory access$"):
        fail(CUDA)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(KeyError), detect_device_loss(CUDA):
        raise KeyError("x")
