"""The way of a step's numbers to the device: one pinned buffer, one copy."""

from collections.abc import Sequence

import torch

from parrot.engine.cuda.inputs import IntArray


class Stage:
    """`send` puts arrays one after the other at the beginning of a device buffer, so arrays of the
    same lengths always arrive at the same addresses."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_cuda)
        self._numbers = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[IntArray]) -> list[torch.Tensor]:
        """Valid on the current stream until the next `send`. `sent` must follow."""
        if self._done is not None:
            self._done.synchronize()
        end = 0
        ends = []
        for part in parts:
            self._numbers[end : end + len(part)] = part
            end += len(part)
            ends.append(end)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        return [self._device[e - len(p) : e] for e, p in zip(ends, parts, strict=True)]

    def at(self, start: int, length: int) -> torch.Tensor:
        return self._device[start : start + length]

    def sent(self) -> None:
        """All copies from pinned memory that belong to this step are under way."""
        if self._done is not None:
            self._done.record()


class Landing:
    """Pinned memory in which one step's tokens arrive."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def receive(self, tokens: torch.Tensor) -> None:
        self._host[: len(tokens)].copy_(tokens, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self, count: int) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        numbers: list[int] = self._host[:count].tolist()
        return numbers
