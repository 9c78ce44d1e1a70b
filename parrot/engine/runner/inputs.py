"""Builds the flat arrays of a step that are sent to the GPU, including its sampling settings.

- **Block table.** The GPU keeps a table with a row per running context. A context keeps its row
  between steps, so only changed entries are sent; most steps have none.
- **Penalties and biases.** Each job has a list of the tokens whose logits change. The list is
  updated every step and sent as a whole. A token that the previous step is still sampling is
  `PENDING`: the kernel finds it in GPU memory and counts it.
- **Constraints.** Masks are computed when the sampler is launched, because they may depend on the
  tokens of the previous step.
"""

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.work_list import StepRows
from parrot.engine.core.steps import (
    PENDING,
    SampleSpec,
    SequenceStep,
    StepPlan,
    sample_specs,
)
from parrot.engine.grammar.constraint import Constraint, fill_masks
from parrot.engine.kernels import sampling_layout as layout
from parrot.engine.kernels.noise import noise_keys
from parrot.protocol.sampling import ResolvedSampling

MIN_TEMPERATURE = 1e-6  # Lower temperatures above 0 are raised to this value.


@dataclass(slots=True, eq=False)
class _TableRow:
    """A context's row of the block table."""

    row: int
    version: int  # Unchanged while blocks are only appended or the last block is replaced.
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step, in CPU memory."""

    versions: tuple[int, ...]  # Per sequence: the `context_ids` of `WorkPlanner.plan`.
    rows: IntArray  # Per sequence: its row of the block table.
    step: StepRows
    token_ids: IntArray
    positions: IntArray
    table_rows: IntArray  # Per token: its sequence's row of the block table.
    logit_rows: IntArray  # Per sample: the token whose logits it uses.
    # In a decode-only step every sequence has an entry, None if it does not sample. In other steps
    # only sequences that sample have entries: one, and one more per draft.
    samples: tuple[SampleSpec | None, ...]
    sampled: tuple[int, ...]  # Per sample: its context.
    pending_at: IntArray  # Indices of tokens that are still `PENDING`.
    pending: tuple[int, ...]  # Per pending token: the context whose newest token it is.
    changed_at: IntArray  # Flat indices of the block table's changed entries.
    changed_to: IntArray  # The new values of these entries.

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one token."""
        return len(self.token_ids) == len(self.rows)


class InputBuilder:
    """Owns the CPU copy of the block table: `max_rows` contexts of `max_blocks` blocks."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int) -> None:
        self.width = max_blocks + 1  # Kernels prefetch one entry after the last block.
        self._block_size = block_size
        self._table = np.zeros((max_rows, self.width), dtype=np.int32)
        self._places: dict[int, _TableRow] = {}
        self._free = list(range(max_rows - 1, -1, -1))
        self._versions = itertools.count(1)

    def forget(self) -> None:
        """Send all rows again, because the table in GPU memory may be stale after an error."""
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
        logit_rows, samples, sampled = _samples_of(sequences, ends, only_decodes)
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
    ) -> _TableRow:
        """The context's row, updated. Appends (flat index, blocks) to `changes`."""
        place = self._places.get(context_id)
        if place is None:
            place = self._places[context_id] = _TableRow(self._free.pop(), next(self._versions), [])
        elif place.blocks == block_ids:
            return place  # The common case. Copying the list would take longer than the comparison.
        blocks = list(block_ids)
        same = max(len(place.blocks) - 1, 0)
        if blocks[:same] != place.blocks[:same]:
            place.version, same = next(self._versions), 0
        place.blocks = blocks
        self._table[place.row, same : len(blocks)] = blocks[same:]
        changes.append((place.row * self.width + same, blocks[same:]))
        return place

    def _evict(self, wanted: set[int]) -> None:
        """Free the rows of all contexts that are not in this step."""
        for context_id in [c for c in self._places if c not in wanted]:
            self._free.append(self._places.pop(context_id).row)


def _samples_of(
    sequences: Sequence[SequenceStep], ends: IntArray, only_decodes: bool
) -> tuple[IntArray, tuple[SampleSpec | None, ...], tuple[int, ...]]:
    """`logit_rows`, `samples` and `sampled` of `StepInputs`."""
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


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens of the rows with constraints."""

    rows: IntArray  # int32 [masked rows]: rows of the logits.
    words: IntArray  # int32 [masked rows, words]: bit i of word j is token 32 j + i.


class MaskedRow(NamedTuple):
    """A row of the logits with a constraint."""

    row: int
    spec: SampleSpec
    place: int  # The index of the token in the output.
    pending_of: int | None  # The context, if its previous token is still pending.


def masked_rows(
    specs: Sequence[SampleSpec | None], pending_of: Sequence[int | None]
) -> list[MaskedRow]:
    """The rows with constraints. No other thread may append tokens to outputs meanwhile."""
    return [
        MaskedRow(row, spec, _place(spec) + (context_id is not None), context_id)
        for row, (spec, context_id) in enumerate(zip(specs, pending_of, strict=True))
        if spec is not None and spec.constraint is not None
    ]


def _place(spec: SampleSpec) -> int:
    return len(spec.output_ids) + len(spec.drafts)


def masks_of(
    rows: Sequence[MaskedRow], landed: Callable[[], Mapping[int, int]] = dict
) -> Masks | None:
    """The masks of `rows`; None if no row needs a mask.

    `landed` is called if tokens are pending. It waits for the previous step and returns its tokens
    by context, -1 for a failed context."""
    tokens = landed() if any(row.pending_of is not None for row in rows) else {}
    found: list[tuple[int, Constraint]] = []
    for row, spec, place, pending_of in rows:
        assert spec.constraint is not None, spec
        before = None if pending_of is None else tokens[pending_of]
        if before is not None and before < 0:
            continue
        if spec.constraint.is_masked(place, before):
            found.append((row, spec.constraint))
    if not found:
        return None
    constraints = [constraint for _, constraint in found]
    words = np.zeros((len(found), constraints[0].vocabulary.num_words), dtype=np.int32)
    fill_masks(constraints, words)
    return Masks(np.array([row for row, _ in found], dtype=np.int32), words)


# Bits of a sampling choice; 0 is greedy.
DRAWN = 1  # Noise is added to the scores.
LIMITED = 2  # Top-k or top-p applies.
ADJUSTED = 4  # Penalties or biases change the logits.
SCORED = 8  # Log probabilities are requested.


class AdjustedTokens:
    """The entries of one job. An update costs time for new tokens only."""

    def __init__(self, job_id: int, config: ResolvedSampling) -> None:
        self.job_id = job_id
        self.penalties = (
            config.presence_penalty,
            config.frequency_penalty,
            config.repetition_penalty or 1.0,
        )
        self._counts_output = bool(config.presence_penalty or config.frequency_penalty)
        self._marks_context = config.repetition_penalty not in (0.0, 1.0)
        self._num_counted: int | None = None  # None before the first update.
        self._num_marked = 0
        self._entries = array("i")
        self._place_of: dict[int, int] = {}
        bias = config.logit_bias or {}
        bits = np.array([*bias.values()], dtype=np.float32).view(np.int32).tolist()
        for token, value in zip(bias, bits, strict=True):
            self._place_of[token] = len(self._entries)
            self._entries.extend((token, -1, value))

    def update(self, spec: SampleSpec) -> IntArray:
        """The entries, flat. The array is a view: drop it before the next call."""
        if self._marks_context:
            new = spec.context_ids[self._num_marked :]
            self._add(dict.fromkeys(new, 0))
            self._num_marked = len(spec.context_ids)
        if self._counts_output:
            if self._num_counted is None:
                self._add(Counter(spec.resumed_ids))
            new = spec.output_ids[self._num_counted :]
            self._add(Counter(new) if len(new) > 1 else dict.fromkeys(new, 1))
            self._num_counted = len(spec.output_ids)
        if spec.drafts:
            return self._with_drafts(spec.drafts)
        return np.frombuffer(self._entries, dtype=np.int32)

    def _with_drafts(self, drafts: Sequence[int]) -> IntArray:
        """The entries after `drafts`, without changing this object."""
        ahead = copy(self)
        ahead._entries, ahead._place_of = self._entries[:], dict(self._place_of)
        if self._marks_context:
            ahead._add(dict.fromkeys(drafts, 0))
        if self._counts_output:
            ahead._add(Counter(drafts))
        return np.frombuffer(ahead._entries, dtype=np.int32)

    def _add(self, counts: Mapping[int, int]) -> None:
        entries, place_of = self._entries, self._place_of
        for token, count in counts.items():
            place = place_of.get(token)
            if place is None:
                place_of[token] = len(entries)
                entries.extend((token, count, 0))
            else:
                entries[place + layout.COUNT] = max(entries[place + layout.COUNT], 0) + count


class AdjustedRow(NamedTuple):
    """A row of the logits with penalties or biases."""

    row: int
    pending_at: int  # See PENDING_AT in `sampling_layout`.
    tokens: AdjustedTokens
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Penalties and biases of a step, in the layout of `sampling_layout`."""

    rows: IntArray  # int32 [adjusted rows, NUM_COLUMNS].
    entries: IntArray  # int32 [entries of all rows, NUM_FIELDS].


def adjustments_of(adjusted: Sequence[AdjustedRow]) -> Adjustments:
    entries = [a.tokens.update(a.spec) for a in adjusted]
    ends = np.cumsum([len(part) for part in entries]) // layout.NUM_FIELDS
    rows = np.zeros((len(adjusted), layout.NUM_COLUMNS), dtype=np.int32)
    rows[:, layout.ROW] = [a.row for a in adjusted]
    rows[:, layout.PENDING_AT] = [a.pending_at for a in adjusted]
    rows[1:, layout.FIRST] = ends[:-1]
    rows[:, layout.END] = ends
    rows.view(np.float32)[:, layout.PRESENCE : layout.REPETITION + 1] = [
        a.tokens.penalties for a in adjusted
    ]
    return Adjustments(rows, np.concatenate(entries).reshape(-1, layout.NUM_FIELDS))


class Scored(NamedTuple):
    """The samples with log probabilities."""

    rows: IntArray  # int32: indices among the step's samples.
    num_top: int  # The largest number of alternative tokens of a sample.


_NOT_SCORED = Scored(np.empty(0, dtype=np.int32), 0)


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampling settings of a step."""

    choice: int  # The union of the bits of all samples.
    settings: IntArray  # int32 [samples, NUM_SETTINGS]; empty without DRAWN.
    adjustments: Adjustments | None  # None without ADJUSTED.
    masks: Callable[[], Masks | None]  # Computes the masks. May wait for the previous step.
    scored: Scored = _NOT_SCORED  # Empty without SCORED.


def no_masks() -> None:
    """All tokens are allowed for all samples."""


NO_DRAWS = Draws(0, np.empty(0, dtype=np.int32), None, no_masks)


@dataclass(slots=True)
class _Choice:
    """The last sampling settings of a row of the block table."""

    sampling: ResolvedSampling
    flags: int  # The bits of these settings.
    adjusted: AdjustedTokens | None = None  # None until logits are adjusted.


class DrawBuilder:
    """Builds the `Draws` of steps. Caches the settings of each row of the block table."""

    def __init__(self, max_rows: int) -> None:
        self._settings = np.zeros((max_rows, layout.NUM_SETTINGS), dtype=np.int32)
        self._choices: list[_Choice | None] = [None] * max_rows

    def build(self, inputs: StepInputs, landed: Callable[[], Mapping[int, int]] = dict) -> Draws:
        """`landed` waits for the previous step and returns its tokens by context."""
        rows = inputs.table_rows[inputs.logit_rows]
        choices: list[_Choice | None] = []
        choice, has_masks = 0, False
        for row, spec in zip(rows.tolist(), inputs.samples, strict=True):
            found = None
            if spec is not None:
                found = self._choices[row]
                if found is None or found.sampling is not spec.sampling:
                    found = self._choose(row, spec.sampling)
                choice |= found.flags
                has_masks = has_masks or spec.constraint is not None
            choices.append(found)
        settings = self._settings[:0]
        if choice & DRAWN:
            settings = self._draws(rows, inputs.samples)
        adjustments = _adjustments(choices, inputs) if choice & ADJUSTED else None
        masks = _masks(inputs, landed) if has_masks else no_masks
        scored = _scored(inputs.samples) if choice & SCORED else _NOT_SCORED
        return Draws(choice, settings, adjustments, masks, scored)

    def _choose(self, row: int, config: ResolvedSampling) -> _Choice:
        """Cache the settings of a row whose settings have changed."""
        choice = self._choices[row] = _Choice(config, _flags_of(config))
        self._settings[row] = draw_settings(config)
        return choice

    def _draws(self, rows: IntArray, samples: Sequence[SampleSpec | None]) -> IntArray:
        settings = self._settings[rows]
        keys = [(0, 0) if spec is None else (spec.seed, spec.position) for spec in samples]
        settings[:, layout.KEY_0 : layout.KEY_1 + 1] = noise_keys(*zip(*keys, strict=True))
        settings[[i for i, spec in enumerate(samples) if spec is None]] = 0
        return settings


def _masks(
    inputs: StepInputs, landed: Callable[[], Mapping[int, int]]
) -> Callable[[], Masks | None]:
    pending = set(inputs.pending)
    pending_of = [c if c in pending else None for c in inputs.sampled]
    return partial(masks_of, masked_rows(inputs.samples, pending_of), landed)


def draw_settings(config: ResolvedSampling) -> IntArray:
    """A row of settings without the noise keys."""
    row = np.zeros(layout.NUM_SETTINGS, dtype=np.int32)
    if config.takes_the_largest:
        return row
    floats = row.view(np.float32)
    floats[layout.INVERSE_TEMPERATURE] = 1.0 / max(config.temperature, MIN_TEMPERATURE)
    floats[layout.FLOOR] = math.log(config.min_p) if config.min_p else -math.inf
    row[layout.TOP_K] = config.top_k or 0
    floats[layout.TOP_P] = config.top_p
    return row


def _flags_of(config: ResolvedSampling) -> int:
    flags = ADJUSTED if config.adjusts_logits else 0
    flags |= SCORED if config.logprobs is not None else 0
    if config.takes_the_largest:
        return flags
    return flags | DRAWN | (LIMITED if config.top_k is not None or config.top_p < 1.0 else 0)


def _scored(samples: Sequence[SampleSpec | None]) -> Scored:
    wanted = [None if spec is None else spec.sampling.logprobs for spec in samples]
    rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
    return Scored(np.array(rows, dtype=np.int32), max(filter(None, wanted), default=0))


def _adjustments(choices: Sequence[_Choice | None], inputs: StepInputs) -> Adjustments:
    is_pending = inputs.token_ids[inputs.logit_rows] == PENDING
    pending_at = np.where(is_pending, inputs.logit_rows, -1).tolist()
    adjusted = []
    for i, (choice, spec) in enumerate(zip(choices, inputs.samples, strict=True)):
        if choice is None or spec is None or not choice.flags & ADJUSTED:
            continue
        if choice.adjusted is None or choice.adjusted.job_id != spec.job_id:
            choice.adjusted = AdjustedTokens(spec.job_id, spec.sampling)
        adjusted.append(AdjustedRow(i, pending_at[i], choice.adjusted, spec))
    return adjustments_of(adjusted)
