"""The tokens that constraints leave, as arrays (numpy only)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.core.plan import SampleSpec
from parrot.engine.grammar.constraint import Constraint, fill_masks


@dataclass(frozen=True, slots=True)
class Masks:
    """`words` int32 [rows, words]: bit i of word j is token 32 j + i. `rows` int32: of the logits.
    Other rows may be any token."""

    rows: IntArray
    words: IntArray


class MaskedRow(NamedTuple):
    """A row of the logits, and its spec. `place` of the token among the output; `pending_of`: the
    context of which the token before is still on its way, if it is."""

    row: int
    spec: SampleSpec
    place: int
    pending_of: int | None


def masked_rows(
    specs: Sequence[SampleSpec | None], pending_of: Sequence[int | None]
) -> list[MaskedRow]:
    """The rows with constraints. To be asked while no step's tokens are being entered."""
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
    """None if every row may be any token. `landed`, asked if tokens are pending, waits for them: by
    context, -1 of one that failed."""
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
