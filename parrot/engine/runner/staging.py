"""Transfers of a step's arrays to the GPU, and of its tokens to the CPU."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.kernels.small_copies import copy_numbers
from parrot.protocol.sampling import MAX_LOGPROBS

# Arrays start at multiples of 32 int32 numbers (128 bytes). Triton compiles a kernel again for
# other alignments.
_ALIGNMENT = 32


class Mark:
    """A CUDA event. Without CUDA it does nothing."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """Record the event after all work that was launched on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block until the device has passed the last `put`."""
        if self._event is not None:
            self._event.synchronize()


class Stage:
    """Sends a step's arrays through one pinned buffer with one copy.

    `send` packs the arrays from the start of a buffer in GPU memory. So arrays of the same lengths
    always arrive at the same addresses, as CUDA graphs require."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._done = Mark(device)
        self._allocate(capacity, device)

    def _allocate(self, capacity: int, device: torch.device) -> None:
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def make_room(self, lengths: Sequence[int]) -> None:
        """Grow the buffers if arrays of `lengths` do not fit. Growing changes the addresses."""
        wanted = _starts(lengths)[-1]
        if wanted > len(self._numbers):
            self._done.wait()  # The kernel that reads the pinned buffer may still run.
            self._allocate(2 * wanted, self._device.device)

    def send(
        self, parts: Sequence[IntArray], known: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Send arrays. The results are valid on the current stream until the next `send`.

        `known`: tokens in GPU memory. A number n < 0 in the first array arrives as known[-1 - n].
        Call `sent` afterwards."""
        self._done.wait()
        lengths = [len(part) for part in parts]
        starts = _starts(lengths)
        for start, part in zip(starts, parts, strict=False):
            self._numbers[start : start + len(part)] = part
        copy_numbers(self._host, self._device, starts[-1], known, lengths[0])
        return self._views(starts, lengths)

    def places(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors to which `send` writes arrays of `lengths`."""
        return self._views(_starts(lengths), lengths)

    def _views(self, starts: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        return [self._device[a : a + n] for a, n in zip(starts, lengths, strict=False)]

    def sent(self) -> None:
        """Mark that all of the step's copies from pinned memory are launched."""
        self._done.put()


class Landing:
    """Pinned memory that receives one step's tokens and their log probabilities."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
        size = capacity * 2 * (1 + MAX_LOGPROBS)
        self._scores = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._done = Mark(device)

    def receive(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> None:
        """Start copying `tokens` and `scores` (a result of `score_tokens`) to the CPU."""
        copy_numbers(tokens, self._host, len(tokens))
        if scores is not None:
            copy_numbers(scores, self._scores, scores.numel())
        self._done.put()

    def wait(self, count: int) -> list[int]:
        self._done.wait()
        numbers: list[int] = self._host[:count].tolist()
        return numbers

    def scores(self, count: int, num_top: int) -> npt.NDArray[np.int32]:
        """The first `count` rows of the scores. Call `wait` before."""
        width = 2 * (1 + num_top)
        return self._scores[: count * width].numpy().reshape(count, width)


def _starts(lengths: Sequence[int]) -> list[int]:
    """The start of each array in the buffer, and the end of the last array."""
    sizes = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    return [0, *accumulate(sizes)]
