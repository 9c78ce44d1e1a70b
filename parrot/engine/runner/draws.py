"""The settings by which the tokens of a step are chosen on the device (numpy only)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.plan import PENDING, SampleSpec
from parrot.engine.kernels.noise import noise_keys
from parrot.engine.kernels.sampling_layout import (
    FLOOR,
    INVERSE_TEMPERATURE,
    KEY_0,
    KEY_1,
    NUM_SETTINGS,
    TOP_K,
    TOP_P,
)
from parrot.engine.runner.adjustments import (
    AdjustedRow,
    AdjustedTokens,
    Adjustments,
    adjustments_of,
)
from parrot.engine.runner.inputs import StepInputs
from parrot.engine.runner.sampling import MIN_TEMPERATURE
from parrot.protocol.sampling import SamplingConfig

DRAWN, LIMITED, ADJUSTED = 1, 2, 4
"""Bits of a choice; 0 takes the largest logit. DRAWN: noise is added. LIMITED: top-k or top-p
apply. ADJUSTED: logits are changed before."""


@dataclass(frozen=True, slots=True)
class Draws:
    """`choice`: the bits of all samples of a step. `settings` int32 [samples, NUM_SETTINGS],
    empty unless some are drawn; `adjustments` None unless some are adjusted."""

    choice: int
    settings: IntArray
    adjustments: Adjustments | None


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
        self._settings = np.zeros((max_rows, NUM_SETTINGS), dtype=np.int32)
        self._choices: list[_Choice | None] = [None] * max_rows

    def build(self, inputs: StepInputs) -> Draws:
        rows = inputs.table_rows[inputs.logit_rows]
        choices = [
            None if spec is None else self._choice(row, spec.sampling)
            for row, spec in zip(rows.tolist(), inputs.samples, strict=True)
        ]
        choice = 0
        for found in choices:
            if found is not None:
                choice |= found.takes
        settings = self._settings[:0]
        if choice & DRAWN:
            settings = self._draws(rows, inputs.samples)
        adjustments = _adjustments(choices, inputs) if choice & ADJUSTED else None
        return Draws(choice, settings, adjustments)

    def _choice(self, row: int, config: SamplingConfig) -> _Choice:
        """The choice for a row, worked out anew when its configuration changes."""
        choice = self._choices[row]
        if choice is None or choice.sampling is not config:
            choice = self._choices[row] = _Choice(config, _takes(config))
            self._settings[row] = draw_settings(config)
        return choice

    def _draws(self, rows: IntArray, samples: Sequence[SampleSpec | None]) -> IntArray:
        settings = self._settings[rows]
        keys = [(0, 0) if spec is None else (spec.seed, spec.position) for spec in samples]
        settings[:, KEY_0 : KEY_1 + 1] = noise_keys(*zip(*keys, strict=True))
        settings[[i for i, spec in enumerate(samples) if spec is None]] = 0
        return settings


def draw_settings(config: SamplingConfig) -> IntArray:
    """A row of settings, but for the keys."""
    row = np.zeros(NUM_SETTINGS, dtype=np.int32)
    if config.takes_the_largest:
        return row
    floats = row.view(np.float32)
    floats[INVERSE_TEMPERATURE] = 1.0 / max(config.temperature, MIN_TEMPERATURE)
    floats[FLOOR] = math.log(config.min_p) if config.min_p else -math.inf
    row[TOP_K] = config.top_k or 0
    floats[TOP_P] = config.top_p
    return row


def _takes(config: SamplingConfig) -> int:
    adjusted = ADJUSTED if config.adjusts_logits else 0
    if config.takes_the_largest:
        return adjusted
    return adjusted | DRAWN | (LIMITED if config.top_k is not None or config.top_p < 1.0 else 0)


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
