"""Sending a step's numbers to the device, receiving its tokens and what is made of its final hidden
states (sums, log probabilities of prompts), and noticing that it is lost."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.steps import (
    DeviceLost,
    PoolSpec,
    ScoreSpec,
    SequenceStep,
    StateRead,
    StateSum,
)
from parrot.engine.runner.log_probabilities import as_logprobs, score_tokens
from parrot.protocol.sampling import MAX_LOGPROBS

_ALIGNMENT = 32  # kernels are compiled for aligned arrays, and again for others
_SLICE = 64  # rows of logits that are there at once

Head = Callable[[torch.Tensor], torch.Tensor]
"""Final states [rows, width] -> logits [rows, vocab]."""


def make_of(device: torch.device) -> str:
    """The name that devices of the same speed share."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({os.cpu_count()} cores)"


class Mark:
    """A place in the stream of work: the device has passed it, or not yet."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def put(self) -> None:
        """Set the mark behind all that was launched up to now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has passed the place where the mark was put last."""
        if self._event is not None:
            self._event.synchronize()


class Stage:
    """Sends a step's numbers: one pinned buffer, one copy.

    `send` puts arrays one after the other at the beginning of a device buffer, so arrays of the
    same lengths always arrive at the same addresses, which are multiples of 128 bytes."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._done = Mark(device)
        self._allocate(capacity, device)

    def _allocate(self, capacity: int, device: torch.device) -> None:
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def make_room(self, lengths: Sequence[int]) -> None:
        """Make room for arrays of these lengths. If the buffer must grow, their places change."""
        wanted = _starts(lengths)[-1]
        if wanted > len(self._numbers):
            self._allocate(2 * wanted, self._device.device)

    def send(self, parts: Sequence[IntArray]) -> list[torch.Tensor]:
        """Valid on the current stream until the next `send`. `sent` must follow."""
        self._done.wait()
        starts = _starts([len(part) for part in parts])
        for start, part in zip(starts, parts, strict=False):
            self._numbers[start : start + len(part)] = part
        self._device[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        return self._views(starts, [len(part) for part in parts])

    def places(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The places where `send` puts arrays of these lengths."""
        return self._views(_starts(lengths), lengths)

    def _views(self, starts: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        return [self._device[a : a + n] for a, n in zip(starts, lengths, strict=False)]

    def sent(self) -> None:
        """Say that all copies from pinned memory that belong to this step are under way."""
        self._done.put()


class Landing:
    """Pinned memory in which one step's tokens arrive, and their log probabilities."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
        size = capacity * 2 * (1 + MAX_LOGPROBS)
        self._scores = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._done = Mark(device)

    def receive(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> None:
        """`scores`: as `score_tokens` gives them."""
        self._host[: len(tokens)].copy_(tokens, non_blocking=True)
        if scores is not None:
            self._scores[: scores.numel()].copy_(scores.view(-1), non_blocking=True)
        self._done.put()

    def wait(self, count: int) -> list[int]:
        self._done.wait()
        numbers: list[int] = self._host[:count].tolist()
        return numbers

    def scores(self, count: int, num_top: int) -> npt.NDArray[np.int32]:
        """The first `count` rows. Only what `wait` has waited for is there."""
        width = 2 * (1 + num_top)
        return self._scores[: count * width].numpy().reshape(count, width)


@dataclass(frozen=True, slots=True)
class HostSum:
    """A `StateSum` in the host's memory: float32 [hidden]."""

    values: npt.NDArray[np.float32]

    def plus(self, other: StateSum) -> "HostSum":
        assert isinstance(other, HostSum), other
        return HostSum(self.values + other.values)

    def unit(self) -> bytes | None:
        length = np.linalg.norm(self.values.astype(np.float64))
        if not np.isfinite(length) or length == 0:
            return None
        return (self.values / length).astype("<f4").tobytes()


@dataclass(slots=True)
class StepReads:
    """The states that a step's sequences want read: each with its first row among the step's
    tokens. `sums` [pools, hidden] and `scores` (as `score_tokens` gives them, for the targets of
    all) are on their way to the host, once they are computed."""

    pools: list[tuple[int, PoolSpec]] = field(default_factory=list)
    scored: list[tuple[int, ScoreSpec]] = field(default_factory=list)
    sums: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep]) -> "StepReads | None":
        """None if they want nothing."""
        if not any(sequence.read for sequence in sequences):
            return None
        reads, first = cls(), 0
        for sequence in sequences:
            if isinstance(spec := sequence.read, PoolSpec):
                reads.pools.append((first, spec))
            elif spec is not None:
                reads.scored.append((first, spec))
            first += len(sequence.token_ids)
        return reads

    def take(self, states: torch.Tensor, head: Head) -> None:
        """states [step's tokens, width]: the final ones. On CUDA the results are there when the
        stream has come to this place."""
        if self.pools:
            sums = [
                states[i + s.start : i + s.end].sum(0, dtype=torch.float32) for i, s in self.pools
            ]
            self.sums = _to_host(torch.stack(sums))
        if self.scored:
            self.scores = _to_host(self._score(states, head))

    def _score(self, states: torch.Tensor, head: Head) -> torch.Tensor:
        """A slice of the rows at a time, since all logits of a long prompt are gigabytes."""
        firsts = [(first + spec.start, spec.targets) for first, spec in self.scored]
        rows = [row for first, ids in firsts for row in range(first, first + len(ids))]
        targets = [token_id for _, ids in firsts for token_id in ids]
        wanted = torch.tensor([rows, targets], pin_memory=states.is_cuda)
        wanted = wanted.to(states.device, torch.long, non_blocking=True)
        num_top = max(spec.num_top for _, spec in self.scored)
        parts = [torch.empty((0, 2 * (1 + num_top)), dtype=torch.int32, device=states.device)]
        for begin in range(0, len(rows), _SLICE):
            some_rows, some_targets = wanted[:, begin : begin + _SLICE]
            logits = head(states.index_select(0, some_rows))
            parts.append(score_tokens(logits, some_targets, num_top))
        return torch.cat(parts)

    def landed(self) -> dict[int, StateRead]:
        """By job; the results must have landed."""
        found: dict[int, StateRead] = {}
        if self.sums is not None:
            for sums, (_, pool) in zip(self.sums.numpy(), self.pools, strict=True):
                found[pool.job_id] = HostSum(sums.copy())
        if self.scores is not None:
            rows, first = self.scores.numpy(), 0
            for _, spec in self.scored:
                stop = first + len(spec.targets)
                found[spec.job_id] = as_logprobs(rows[first:stop], spec.num_top)
                first = stop
        return found


def _to_host(computed: torch.Tensor) -> torch.Tensor:
    landed = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=computed.is_cuda)
    return landed.copy_(computed, non_blocking=True)


def _starts(lengths: Sequence[int]) -> list[int]:
    """Begin of each array, and end of the last."""
    sizes = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    return [0, *accumulate(sizes)]


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
