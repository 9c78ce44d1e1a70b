"""A step as the flat arrays that go to the device (no torch).

The device keeps a block table with a row for each context that runs. A context keeps its row from
step to step, so that only entries that changed are sent: mostly none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.work_list import StepRows
from parrot.engine.core.plan import (
    PENDING,
    SampleSpec,
    SequenceStep,
    StepPlan,
    sample_specs,
)


@dataclass(slots=True, eq=False)
class _Place:
    """A context's row of the table. `version` changes with anything but an addition at the end or
    another last block."""

    row: int
    version: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`versions` names the sequences as `WorkPlanner` wants them named; `rows` are their rows of
    the block table, `table_rows` those of each token. Entries `changed_at` (flat) of that table
    become `changed_to`.

    `samples[i]` is for the logits of token `logit_rows[i]`: of every sequence's if all have one
    token (None where none is asked for), else of those that sample, for each of their drafts once
    more; `sampled` are their contexts.
    Tokens `pending_at` are still `PENDING`: those that contexts `pending` get from the step
    before."""

    versions: tuple[int, ...]
    rows: IntArray
    step: StepRows
    token_ids: IntArray
    positions: IntArray
    table_rows: IntArray
    logit_rows: IntArray
    samples: tuple[SampleSpec | None, ...]
    sampled: tuple[int, ...]
    pending_at: IntArray
    pending: tuple[int, ...]
    changed_at: IntArray
    changed_to: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one token."""
        return len(self.token_ids) == len(self.rows)


class InputBuilder:
    """Keeps the host's copy of the block table: `max_rows` contexts of `max_blocks` blocks.

    A row has one more entry than that, since kernels read one ahead."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int) -> None:
        self.width = max_blocks + 1
        self._block_size = block_size
        self._table = np.zeros((max_rows, self.width), dtype=np.int32)
        self._places: dict[int, _Place] = {}
        self._free = list(range(max_rows - 1, -1, -1))
        self._versions = count(1)

    def forget(self) -> None:
        """The device's table is not what it should be: send everything again."""
        self._free += [place.row for place in self._places.values()]
        self._places.clear()

    def build(self, plan: StepPlan) -> StepInputs:
        sequences = [s for s in plan.sequences if len(s.token_ids)]
        if len(sequences) > len(self._free):
            self._evict({s.context_id for s in sequences})
        changes: list[tuple[int, list[int]]] = []
        places = [self._place(s.context_id, s.block_ids, changes) for s in sequences]
        q_lens = np.array([len(s.token_ids) for s in sequences], dtype=np.int32)
        starts = np.array([s.start for s in sequences], dtype=np.int32)
        rows = np.array([place.row for place in places], dtype=np.int32)
        width = max([len(s.block_ids) for s in sequences], default=0) + 1
        step = StepRows(self._table[rows, :width], starts, q_lens)
        ends = np.cumsum(q_lens, dtype=np.int32)
        only_decodes = len(sequences) == int(q_lens.sum())
        logit_rows, samples, sampled = _asked(sequences, ends, only_decodes)
        token_ids = _token_ids(sequences, only_decodes)
        waiting = np.flatnonzero(token_ids[ends - 1] == PENDING)
        return StepInputs(
            versions=tuple(place.version for place in places),
            rows=rows,
            step=step,
            token_ids=token_ids,
            positions=starts if only_decodes else step.positions,
            table_rows=rows if only_decodes else np.repeat(rows, q_lens),
            logit_rows=logit_rows,
            samples=samples,
            sampled=sampled,
            pending_at=ends[waiting] - 1,
            pending=tuple(sequences[i].context_id for i in waiting.tolist()),
            changed_at=_concat([np.arange(at, at + len(to)) for at, to in changes]),
            changed_to=_concat([np.asarray(to) for _, to in changes]),
        )

    def _place(
        self, context_id: int, block_ids: Sequence[int], changes: list[tuple[int, list[int]]]
    ) -> _Place:
        """The context's place, its row brought up to date; `changes` get (flat index, blocks)."""
        place = self._places.get(context_id)
        if place is None:
            place = self._places[context_id] = _Place(self._free.pop(), next(self._versions), [])
        elif place.blocks == block_ids:
            return place  # mostly: a copy would take longer than all the rest
        blocks = list(block_ids)
        same = max(len(place.blocks) - 1, 0)
        if blocks[:same] != place.blocks[:same]:
            place.version, same = next(self._versions), 0
        place.blocks = blocks
        self._table[place.row, same : len(blocks)] = blocks[same:]
        changes.append((place.row * self.width + same, blocks[same:]))
        return place

    def _evict(self, wanted: set[int]) -> None:
        """Take the rows of contexts that this step does not run."""
        for context_id in [c for c in self._places if c not in wanted]:
            self._free.append(self._places.pop(context_id).row)


def _asked(
    sequences: Sequence[SequenceStep], ends: IntArray, only_decodes: bool
) -> tuple[IntArray, tuple[SampleSpec | None, ...], tuple[int, ...]]:
    """Rows with logits, what they are for, and their contexts."""
    if only_decodes:
        return ends - 1, tuple(s.sample for s in sequences), tuple(s.context_id for s in sequences)
    rows: list[int] = []
    samples: list[SampleSpec] = []
    sampled: list[int] = []
    for sequence, end in zip(sequences, ends.tolist(), strict=True):
        specs = sample_specs(sequence)
        rows += range(end - len(specs), end)
        samples += specs
        sampled += [sequence.context_id] * len(specs)
    return np.array(rows, dtype=np.int32), tuple(samples), tuple(sampled)


def _token_ids(sequences: Sequence[SequenceStep], only_decodes: bool) -> IntArray:
    if only_decodes:
        return np.array([s.token_ids[0] for s in sequences], dtype=np.int32)
    return _concat([np.asarray(s.token_ids, dtype=np.int32) for s in sequences])


def _concat(parts: Sequence[np.ndarray]) -> IntArray:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)
