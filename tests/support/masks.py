"""The masks of constraints, as lists of tokens."""

from collections.abc import Sequence

import numpy as np

from parrot.engine.grammar.constraint import Constraint, fill_masks


def allowed_together(constraints: Sequence[Constraint]) -> list[list[int]]:
    """The allowed next tokens of each constraint. All constraints must be masked."""
    num_words = constraints[0].vocabulary.num_words
    words = np.zeros((len(constraints), num_words), dtype=np.int32)
    fill_masks(constraints, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def allowed(constraint: Constraint, position: int, before: int | None = None) -> list[int] | None:
    """The allowed tokens at a position of the output, or None if the output has ended."""
    if not constraint.is_masked(position, before):
        return None
    (tokens,) = allowed_together([constraint])
    return tokens
