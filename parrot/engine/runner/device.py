"""Distinguishes a step that failed from a device that is lost."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parrot.engine.core.plan import DeviceLost


@contextmanager
def noticing_loss(device: torch.device) -> Iterator[None]:
    """Turn an error into `DeviceLost` if nothing can be done with the device any more. After an
    illegal access, for example, every call of the process to the device fails from then on."""
    try:
        yield
    except RuntimeError as error:
        if _is_lost(device):
            raise DeviceLost(str(error).partition("\n")[0]) from error
        raise


def _is_lost(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
