"""Weights in the format of their checkpoint, and the products with them."""

from collections.abc import Sequence
from enum import Enum

import torch

from parrot.engine.models.four_bit import FourBit
from parrot.engine.models.fp8 import Fp8Linear, Fp8Matrix
from parrot.engine.models.layers import FourBitLinear, Linear
from parrot.engine.models.quantisation import has_row_factors
from parrot.engine.models.spec import HFConfig

Packed = FourBit | Fp8Matrix


class Weights(Enum):
    """How a decoder keeps the matrices of its layers."""

    PLAIN = "in the decoder's type"
    KEPT = "as in the checkpoint, where the device has a kernel for the format"
    E4M3 = "in e4m3; other matrices are rounded"

    def in_e4m3(self, config: HFConfig, device: torch.device) -> bool:
        """Whether a model's matrices are in e4m3 on a device."""
        if self is Weights.KEPT:
            return device.type == "cuda" and has_row_factors(config)
        return self is Weights.E4M3


def packed_linear(parts: Sequence[Packed], bias: torch.Tensor | None) -> Linear | None:
    """A product with the rows of all parts; None if there is no kernel for it."""
    four_bit = [part for part in parts if isinstance(part, FourBit)]
    fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
    if fp8 and not four_bit:
        return Fp8Linear(Fp8Matrix.joined(fp8), bias)
    whole = FourBit.joined(four_bit) if four_bit and not fp8 else None
    return FourBitLinear(whole, bias) if whole is not None and FourBitLinear.takes(whole) else None
