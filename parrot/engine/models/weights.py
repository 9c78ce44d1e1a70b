"""Chooses the products of the Triton kernels for a weight."""

from dataclasses import replace

from parrot.engine.models.fp8 import Fp8Linear
from parrot.engine.models.fused_weights import LayerWeight, Weight
from parrot.engine.models.layers import Linear, PlainLinear
from parrot.engine.models.parallel import SummedLinear
from parrot.engine.models.words_linear import WordsLinear


def weight_of(linear: Linear, slot: int = 0) -> LayerWeight:
    """The products with a weight of a layer, or with the head.

    `slot`: of symmetric memory, for sums over ranks."""
    if isinstance(linear, SummedLinear):
        return replace(weight_of(linear.linear), ranks=linear.ranks, slot=slot)
    if isinstance(linear, Fp8Linear):
        from parrot.engine.models.fp8_weights import Fp8Weight  # Only models in e4m3.

        return Fp8Weight.of(linear.matrix, linear.bias)
    if isinstance(linear, WordsLinear):
        from parrot.engine.models.words_weights import WordsWeight  # Only models with them.

        return WordsWeight.of(linear.matrix, linear.bias)
    assert isinstance(linear, PlainLinear), "fused kernels need weights as they are"
    return Weight(linear.weight, linear.bias)
