"""The devices of one host's ranks: whether they can share memory, and of which kind they are."""

import ctypes

import torch

_DRIVER = "libcuda.so.1"
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def reaches_all(rank: int, size: int, device: torch.device) -> bool:
    """Whether a rank's device can read and write the memory of the other ranks' devices, and has
    atomics on it: ranks signal what they have written by atomics, since Triton has no other
    operation with release semantics. NVLink has them; PCIe mostly does not. The ranks' devices have
    indices that follow each other."""
    first = device.index - rank
    others = [other for other in range(first, first + size) if other != device.index]
    return all(
        torch.cuda.can_device_access_peer(device.index, other) and _has_atomics(device.index, other)
        for other in others
    )


def _has_atomics(index: int, other: int) -> bool:
    """Whether a device has atomics on the memory of another. torch does not tell, so the driver is
    asked, which has been loaded for torch. False if it does not know, either."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        devices = [ctypes.c_int(), ctypes.c_int()]
        for device, number in zip(devices, (index, other), strict=True):
            if driver.cuDeviceGet(ctypes.byref(device), number):
                return False
        found = ctypes.c_int()
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices)
    except (OSError, AttributeError):
        return False
    return not failed and found.value == 1


def device_kind(device: torch.device) -> str:
    """Everything that decides which kernels, graphs and tiles a rank uses, and so in which order it
    meets the others. Its memory does not: all ranks have as many blocks of KV as the one with the
    fewest."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    capability = f"compute capability {found.major}.{found.minor}"
    return f"{found.name} with {found.multi_processor_count} multiprocessors and {capability}"
