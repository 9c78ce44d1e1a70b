"""The settings by which the tokens of a step are chosen on the device (numpy only).

Penalties and biases are lists: each job has one of the tokens whose logits change, kept up to date
from step to step; the whole list goes to the device. The token that the step before samples for the
job is not on it yet: that one is `PENDING`, and the kernel finds it on the device."""

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
from parrot.engine.core.plan import PENDING, SampleSpec
from parrot.engine.kernels import sampling_layout as layout
from parrot.engine.kernels.noise import noise_keys
from parrot.engine.runner.inputs import StepInputs
from parrot.engine.runner.masks import Masks, masked_rows, masks_of
from parrot.engine.runner.sampling import MIN_TEMPERATURE
from parrot.protocol.sampling import SamplingConfig

DRAWN, LIMITED, ADJUSTED, SCORED = 1, 2, 4, 8
"""Bits of a choice; 0 takes the largest logit. DRAWN: noise is added. LIMITED: top-k or top-p
apply. ADJUSTED: logits are changed before. SCORED: log probabilities are wanted."""


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
        self._num_counted: int | None = None  # before the first update
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
            if self._num_counted is None:
                self._add(Counter(spec.resumed_ids))
            new = spec.output_ids[self._num_counted :]
            self._add(Counter(new) if len(new) > 1 else dict.fromkeys(new, 1))
            self._num_counted = len(spec.output_ids)
        if spec.drafts:
            return self._with_drafts(spec.drafts)
        return np.frombuffer(self._entries, dtype=np.int32)

    def _with_drafts(self, drafts: Sequence[int]) -> IntArray:
        """The entries as they would be behind these tokens."""
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
    """The samples of which log probabilities are wanted, of `num_top` likely tokens at most.
    `rows` int32: their places among the step's samples."""

    rows: IntArray
    num_top: int


_NOT_SCORED = Scored(np.empty(0, dtype=np.int32), 0)


@dataclass(frozen=True, slots=True)
class Draws:
    """`choice`: the bits of all samples of a step. `settings` int32 [samples, NUM_SETTINGS],
    empty unless some are drawn; `adjustments` None unless some are adjusted. `masks` makes those of
    the constrained samples, and may wait for the step before. `scored`: empty unless log
    probabilities are wanted."""

    choice: int
    settings: IntArray
    adjustments: Adjustments | None
    masks: Callable[[], Masks | None]
    scored: Scored = _NOT_SCORED


def no_masks() -> None:
    """Every sample may be any token."""


NO_DRAWS = Draws(0, np.empty(0, dtype=np.int32), None, no_masks)


@dataclass(slots=True)
class _Choice:
    """The bits of a configuration, and its entries for one job once logits are adjusted."""

    sampling: SamplingConfig
    takes: int
    adjusted: AdjustedTokens | None = None


class DrawBuilder:
    """Builds the draws of steps; remembers the last configuration of each row of the block
    table."""

    def __init__(self, max_rows: int) -> None:
        self._settings = np.zeros((max_rows, layout.NUM_SETTINGS), dtype=np.int32)
        self._choices: list[_Choice | None] = [None] * max_rows

    def build(self, inputs: StepInputs, landed: Callable[[], Mapping[int, int]] = dict) -> Draws:
        """`landed` waits for the tokens of the step before, by context."""
        rows = inputs.table_rows[inputs.logit_rows]
        choices: list[_Choice | None] = []
        choice, has_masks = 0, False
        for row, spec in zip(rows.tolist(), inputs.samples, strict=True):
            found = None
            if spec is not None:
                found = self._choices[row]
                if found is None or found.sampling is not spec.sampling:
                    found = self._choose(row, spec.sampling)
                choice |= found.takes
                has_masks = has_masks or spec.constraint is not None
            choices.append(found)
        settings = self._settings[:0]
        if choice & DRAWN:
            settings = self._draws(rows, inputs.samples)
        adjustments = _adjustments(choices, inputs) if choice & ADJUSTED else None
        masks = _masks(inputs, landed) if has_masks else no_masks
        scored = _scored(inputs.samples) if choice & SCORED else _NOT_SCORED
        return Draws(choice, settings, adjustments, masks, scored)

    def _choose(self, row: int, config: SamplingConfig) -> _Choice:
        """The choice for a row whose configuration has changed."""
        choice = self._choices[row] = _Choice(config, _takes(config))
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


def draw_settings(config: SamplingConfig) -> IntArray:
    """A row of settings, but for the keys."""
    row = np.zeros(layout.NUM_SETTINGS, dtype=np.int32)
    if config.takes_the_largest:
        return row
    floats = row.view(np.float32)
    floats[layout.INVERSE_TEMPERATURE] = 1.0 / max(config.temperature, MIN_TEMPERATURE)
    floats[layout.FLOOR] = math.log(config.min_p) if config.min_p else -math.inf
    row[layout.TOP_K] = config.top_k or 0
    floats[layout.TOP_P] = config.top_p
    return row


def _takes(config: SamplingConfig) -> int:
    takes = ADJUSTED if config.adjusts_logits else 0
    takes |= SCORED if config.logprobs is not None else 0
    if config.takes_the_largest:
        return takes
    return takes | DRAWN | (LIMITED if config.top_k is not None or config.top_p < 1.0 else 0)


def _scored(samples: Sequence[SampleSpec | None]) -> Scored:
    wanted = [None if spec is None else spec.sampling.logprobs for spec in samples]
    rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
    return Scored(np.array(rows, dtype=np.int32), max(filter(None, wanted), default=0))


def _adjustments(choices: Sequence[_Choice | None], inputs: StepInputs) -> Adjustments:
    is_pending = inputs.token_ids[inputs.logit_rows] == PENDING
    pending_at = np.where(is_pending, inputs.logit_rows, -1).tolist()
    adjusted = []
    for i, (choice, spec) in enumerate(zip(choices, inputs.samples, strict=True)):
        if choice is None or spec is None or not choice.takes & ADJUSTED:
            continue
        if choice.adjusted is None or choice.adjusted.job_id != spec.job_id:
            choice.adjusted = AdjustedTokens(spec.job_id, spec.sampling)
        adjusted.append(AdjustedRow(i, pending_at[i], choice.adjusted, spec))
    return adjustments_of(adjusted)
