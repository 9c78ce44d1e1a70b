"""Which layers use the kernel that copies KV early. The kernel itself needs a GPU."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule
from parrot.engine.kernels.early_kernels import supports

USUAL = AttentionShape(32, 8, 128, 64)


def test_the_heads_of_most_models_are_supported() -> None:
    for shape in (USUAL, AttentionShape(16, 16, 64, 64), AttentionShape(16, 1, 128, 128)):
        assert supports(shape, ScoreRule(0.1)), shape


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (AttentionShape(32, 8, 96, 64), ScoreRule(0.1)),
        (AttentionShape(8, 4, 256, 64), ScoreRule(0.1)),
        (AttentionShape(32, 8, 128, 16), ScoreRule(0.1)),
        (AttentionShape(71, 1, 64, 64), ScoreRule(0.1)),
        (USUAL, ScoreRule(0.1, window=512)),
        (USUAL, ScoreRule(0.1, softcap=50.0)),
    ],
    ids=str,
)
def test_other_heads_and_scores_are_not(shape: AttentionShape, rule: ScoreRule) -> None:
    assert not supports(shape, rule)
