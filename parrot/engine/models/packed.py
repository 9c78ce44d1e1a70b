"""Weights in the format of their checkpoint, and the products with them."""

from collections.abc import Sequence
from enum import Enum

import torch

from parrot.engine.kernels.linear.words_layout import block_of
from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.fp8 import Fp8Linear, Fp8Matrix
from parrot.engine.models.layers import FourBitLinear, Linear
from parrot.engine.models.quantisation import group_size, stays_e4m3
from parrot.engine.models.spec import HFConfig
from parrot.engine.models.words_linear import WordsLinear, words_of

Packed = CodedMatrix | Fp8Matrix
_FACTOR_BYTES = 4  # Of the factors of a group on a GPU.


class Weights(Enum):
    """How a decoder keeps the matrices of its layers."""

    PLAIN = "in the decoder's type"
    KEPT = "as in the checkpoint, where the device has a kernel for the format"
    E4M3 = "in e4m3; other matrices are rounded"

    def matrix_bytes(self, config: HFConfig, device: torch.device) -> float | None:
        """Bytes of a number of a model's matrices on a device; None for those of its type."""
        if self is Weights.E4M3:
            return 1.0
        if self is Weights.PLAIN or device.type != "cuda":
            return None
        if (group := group_size(config)) is not None:
            return code_bytes(CodeFormat(4, group))
        return 1.0 if stays_e4m3(config) else None


class Head(Enum):
    """How a decoder keeps the matrix that computes logits."""

    PLAIN = "in the decoder's type"
    KEPT = "in the codes of the checkpoint"
    INT8 = "rounded to eight bits"


def code_bytes(code_format: CodeFormat) -> float:
    """Bytes of a code on a GPU, with its part of the factors of its group."""
    bits, group = code_format.bits, code_format.group
    return bits / 8 + _FACTOR_BYTES / min(group, block_of(bits, group))


def packed_linear(parts: Sequence[Packed], bias: torch.Tensor | None) -> Linear | None:
    """A product with the rows of all parts; None if there is no kernel for it."""
    coded = [part for part in parts if isinstance(part, CodedMatrix)]
    fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
    if fp8 and not coded:
        same = len({part.is_blocked for part in fp8}) == 1
        return Fp8Linear(Fp8Matrix.joined(fp8), bias) if same else None
    if fp8 or not coded:
        return None
    whole = CodedMatrix.joined(coded)
    if whole.codes.device.type == "cuda":
        words = words_of(whole)
        return None if words is None else WordsLinear(words, bias)
    return FourBitLinear(whole, bias) if FourBitLinear.takes(whole) else None
