"""The adjustments of a job, updated token by token, equal a new count."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.steps import SampleSpec
from parrot.engine.kernels.sampling_layout import (
    BIAS,
    COUNT,
    END,
    FIRST,
    FREQUENCY,
    NUM_FIELDS,
    PENDING_AT,
    PRESENCE,
    REPETITION,
    ROW,
    TOKEN,
)
from parrot.engine.runner.inputs import (
    AdjustedRow,
    AdjustedTokens,
    adjustments_of,
)
from parrot.protocol.sampling import ResolvedSampling

COUNTED: dict[str, Any] = {"frequency_penalty": 0.5}
MARKED: dict[str, Any] = {"repetition_penalty": 1.2}
BIASED: dict[str, Any] = {"logit_bias": {3: -1.5, 400: 2.25}}


def spec_of(
    config: ResolvedSampling, output: list[int], context: list[int], resumed: Sequence[int] = ()
) -> SampleSpec:
    return SampleSpec(1, config, 0, len(context), output, context, resumed_ids=resumed)


def counts_of(entries: IntArray) -> dict[int, int]:
    assert len(np.unique(entries[:, TOKEN])) == len(entries)
    return dict(zip(entries[:, TOKEN].tolist(), entries[:, COUNT].tolist(), strict=True))


def expected(spec: SampleSpec) -> dict[int, int]:
    config = spec.sampling
    counts = dict.fromkeys(config.logit_bias or {}, -1)
    if config.repetition_penalty not in (0.0, 1.0):
        counts |= dict.fromkeys(spec.context_ids, 0)
    if config.presence_penalty or config.frequency_penalty:
        counts |= Counter([*spec.resumed_ids, *spec.output_ids])
    return counts


@pytest.mark.parametrize(
    "fields",
    [COUNTED, {"presence_penalty": 1.0}, MARKED, BIASED, COUNTED | MARKED | BIASED],
    ids=str,
)
@given(
    prompt=st.lists(st.integers(0, 9), max_size=12),
    resumed=st.lists(st.integers(0, 9), max_size=4),
    parts=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6),
)
def test_entries_follow_the_output(
    fields: dict[str, Any], prompt: list[int], resumed: list[int], parts: list[list[int]]
) -> None:
    config = ResolvedSampling.model_validate(fields)
    tokens = AdjustedTokens(1, config)
    output: list[int] = []
    for part in parts:
        output += part
        spec = spec_of(config, output, prompt + resumed + output, resumed)
        assert counts_of(tokens.update(spec).reshape(-1, NUM_FIELDS)) == expected(spec)


def test_biases_are_bits_of_floats() -> None:
    config = ResolvedSampling.model_validate(BIASED | MARKED)
    flat = AdjustedTokens(1, config).update(spec_of(config, [], [3, 8]))
    entries = flat.reshape(-1, NUM_FIELDS)
    floats = entries.view(np.float32)[:, BIAS].tolist()
    assert dict(zip(entries[:, TOKEN].tolist(), floats, strict=True)) == {3: -1.5, 400: 2.25, 8: 0}


def test_rows_and_their_entries() -> None:
    configs = [ResolvedSampling.model_validate(f) for f in (COUNTED, MARKED, BIASED)]
    specs = [spec_of(c, [5, 5], [4, 5, 5]) for c in configs]
    found = adjustments_of(
        [
            AdjustedRow(row, at, AdjustedTokens(1, spec.sampling), spec)
            for row, at, spec in zip((0, 2, 5), (-1, 7, 9), specs, strict=True)
        ]
    )
    rows = found.rows
    assert rows[:, ROW].tolist() == [0, 2, 5]
    assert rows[:, PENDING_AT].tolist() == [-1, 7, 9]
    assert rows[:, FIRST].tolist() == [0, 1, 3]
    assert rows[:, END].tolist() == [1, 3, 5] == [1, 3, len(found.entries)]
    floats = rows.view(np.float32)
    assert floats[:, PRESENCE].tolist() == [0, 0, 0]
    assert floats[:, FREQUENCY].tolist() == [0.5, 0, 0]
    assert floats[:, REPETITION].tolist() == [1, np.float32(1.2), 1]
    spans = rows[:, [FIRST, END]].tolist()
    assert [counts_of(found.entries[a:b]) for a, b in spans] == [expected(s) for s in specs]


def test_nothing_is_adjusted_before_the_first_token() -> None:
    config = ResolvedSampling.model_validate(COUNTED)
    row = AdjustedRow(0, -1, AdjustedTokens(1, config), spec_of(config, [], [1, 2]))
    found = adjustments_of([row])
    assert found.entries.shape == (0, 3)
    assert found.rows[0, END] == 0
