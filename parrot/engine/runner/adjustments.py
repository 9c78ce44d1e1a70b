"""Penalties and biases as lists for the device (numpy only).

Each job has a list of the tokens whose logits change, kept up to date from step to step; the whole
list goes to the device. The token that the step before samples for the job is not on it yet: that
one is `PENDING`, and the kernel finds it on the device."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.plan import SampleSpec
from parrot.engine.kernels.sampling_layout import (
    COUNT,
    END,
    FIRST,
    NUM_COLUMNS,
    NUM_FIELDS,
    PENDING_AT,
    PRESENCE,
    REPETITION,
    ROW,
)
from parrot.protocol.sampling import SamplingConfig


class AdjustedTokens:
    """The entries of one job; updating them takes time for new tokens only."""

    def __init__(self, job_id: int, config: SamplingConfig) -> None:
        self.job_id = job_id
        self.penalties = (
            config.presence_penalty,
            config.frequency_penalty,
            config.repetition_penalty or 1.0,
        )
        self._counts_output = bool(config.presence_penalty or config.frequency_penalty)
        self._marks_context = config.repetition_penalty not in (0.0, 1.0)
        self._num_counted = 0
        self._num_marked = 0
        self._entries = array("i")
        self._place_of: dict[int, int] = {}
        bias = config.logit_bias or {}
        bits = np.array([*bias.values()], dtype=np.float32).view(np.int32).tolist()
        for token, value in zip(bias, bits, strict=True):
            self._place_of[token] = len(self._entries)
            self._entries.extend((token, -1, value))

    def update(self, spec: SampleSpec) -> IntArray:
        """The entries, flat; valid until the next call and to be dropped before it."""
        if self._marks_context:
            new = spec.context_ids[self._num_marked :]
            self._add(dict.fromkeys(new, 0))
            self._num_marked = len(spec.context_ids)
        if self._counts_output:
            new = spec.output_ids[self._num_counted :]
            self._add(Counter(new) if len(new) > 1 else dict.fromkeys(new, 1))
            self._num_counted = len(spec.output_ids)
        return np.frombuffer(self._entries, dtype=np.int32)

    def _add(self, counts: Mapping[int, int]) -> None:
        entries, place_of = self._entries, self._place_of
        for token, count in counts.items():
            place = place_of.get(token)
            if place is None:
                place_of[token] = len(entries)
                entries.extend((token, count, 0))
            else:
                entries[place + COUNT] = max(entries[place + COUNT], 0) + count


class AdjustedRow(NamedTuple):
    """A row of the logits, as it is with `spec`; `pending_at` as in PENDING_AT."""

    row: int
    pending_at: int
    tokens: AdjustedTokens
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class Adjustments:
    """`rows` int32 [adjusted rows, NUM_COLUMNS], `entries` int32 [entries of all, NUM_FIELDS]."""

    rows: IntArray
    entries: IntArray


def adjustments_of(adjusted: Sequence[AdjustedRow]) -> Adjustments:
    entries = [a.tokens.update(a.spec) for a in adjusted]
    ends = np.cumsum([len(part) for part in entries]) // NUM_FIELDS
    rows = np.zeros((len(adjusted), NUM_COLUMNS), dtype=np.int32)
    rows[:, ROW] = [a.row for a in adjusted]
    rows[:, PENDING_AT] = [a.pending_at for a in adjusted]
    rows[1:, FIRST] = ends[:-1]
    rows[:, END] = ends
    rows.view(np.float32)[:, PRESENCE : REPETITION + 1] = [a.tokens.penalties for a in adjusted]
    return Adjustments(rows, np.concatenate(entries).reshape(-1, NUM_FIELDS))
