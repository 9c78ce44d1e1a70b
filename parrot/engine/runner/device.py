"""Reads of the final hidden states of a step, and detection of a lost device."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.core.steps import (
    DeviceLost,
    PoolSpec,
    ScoreSpec,
    SequenceStep,
    StateRead,
    StateSum,
)
from parrot.engine.runner.log_probabilities import as_logprobs, score_tokens

_SLICE = 64  # Largest number of rows of prompt logits in memory at once.

Head = Callable[[torch.Tensor], torch.Tensor]
"""Final states [rows, width] -> logits [rows, vocab]."""


def device_name(device: torch.device) -> str:
    """A name that is equal for devices of the same speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({os.cpu_count()} cores)"


@dataclass(frozen=True, slots=True)
class HostSum:
    """A `StateSum` in CPU memory: float32 [hidden]."""

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
    """The final hidden states of a step that are pooled or scored, and the results.

    The results are in flight to CPU memory after `take`."""

    # Each spec comes with the first row of its sequence among the step's tokens.
    pools: list[tuple[int, PoolSpec]] = field(default_factory=list)
    scored: list[tuple[int, ScoreSpec]] = field(default_factory=list)
    sums: torch.Tensor | None = None  # float32 [pools, hidden].
    scores: torch.Tensor | None = None  # The result of `score_tokens` for all targets.

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep]) -> "StepReads | None":
        """None if no sequence is pooled or scored."""
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
        """Compute the results from the final `states` [step's tokens, width].

        On CUDA the call only launches the work on the current stream."""
        if self.pools:
            sums = [
                states[i + s.start : i + s.end].sum(0, dtype=torch.float32) for i, s in self.pools
            ]
            self.sums = _to_host(torch.stack(sums))
        if self.scored:
            self.scores = _to_host(self._score(states, head))

    def _score(self, states: torch.Tensor, head: Head) -> torch.Tensor:
        """`score_tokens` for all targets, `_SLICE` rows at a time."""
        # All logits of a long prompt would take gigabytes.
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
        """The results by job id. The device must have finished the step."""
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


@contextmanager
def detect_device_loss(device: torch.device) -> Iterator[None]:
    """Convert an error to `DeviceLost` if the device is unusable.

    After an illegal memory access, for example, every CUDA call of the process fails."""
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
