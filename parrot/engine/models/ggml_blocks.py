"""Reads blocks of quantised numbers from GGUF files.

    Q4_0  scale f16, 16 bytes            number = scale * (four bits - 8)
    Q4_1  scale f16, least f16, 16 bytes number = scale * four bits + least
    Q8_0  scale f16, 32 bytes            number = scale * signed byte

A block is 32 numbers of a row. Byte j of 4-bit numbers holds number j (low half) and j + 16. Other
types use the `gguf` package, whose numpy code takes four to six times as long."""

import math

import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat

BLOCK = 32


class CutOff(Exception):
    """The file ends before the end of the tensor."""


_F32, _F16, _Q4_0, _Q4_1, _Q8_0 = 0, 1, 2, 3, 8
# The types that a GPU multiplies as codes.
GPU_FORMATS = {_Q4_0: CodeFormat(4, BLOCK)}


def coded(data: memoryview, kind: int, shape: tuple[int, ...]) -> CodedMatrix | None:
    """The 4-bit matrix in `data`; None for other types. Raises `CutOff`.

    `data` starts at the tensor's offset in the file and may be longer than the tensor."""
    if kind not in (_Q4_0, _Q4_1) or len(shape) != 2:
        return None
    num_scales = kind - _Q4_0 + 1
    blocks = _blocks(data, shape, 2 * num_scales + BLOCK // 2)
    scales = _halves(blocks[:, : 2 * num_scales]).view(shape[0], -1, num_scales)
    scale = scales[:, :, 0].contiguous()
    least = scale * -8 if kind == _Q4_0 else scales[:, :, 1].contiguous()
    pairs = blocks[:, 2 * num_scales :].contiguous()
    codes = torch.stack((pairs.bitwise_and(15), pairs.bitwise_right_shift(4)), 1)
    return CodedMatrix(codes.view(shape), scale, least)


def dequantise(data: memoryview, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor in `data`, float32. Raises `CutOff`, and `NotImplementedError` for other types."""
    if kind == _F32:
        return _whole(data, shape, 4, torch.float32)
    if kind == _F16:
        return _whole(data, shape, 2, torch.float16).float()
    if kind == _Q8_0:
        blocks = _blocks(data, shape, 2 + BLOCK)
        numbers = blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))
        return numbers.view(shape)
    if (matrix := coded(data, kind, shape)) is not None:
        return matrix.numbers()
    return _by_gguf(data, kind, shape)


def _bytes(data: memoryview, size: int) -> torch.Tensor:
    if size > len(data):
        raise CutOff
    return torch.frombuffer(data, dtype=torch.uint8, count=size)


def _whole(
    data: memoryview, shape: tuple[int, ...], item_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Read an unquantised tensor. A copy, because it may be unaligned in the mapped file."""
    return _bytes(data, math.prod(shape) * item_size).clone().view(dtype).view(shape)


def _blocks(data: memoryview, shape: tuple[int, ...], block_bytes: int) -> torch.Tensor:
    """Bytes [blocks, block_bytes]."""
    num_blocks = math.prod(shape) // BLOCK
    return _bytes(data, num_blocks * block_bytes).view(num_blocks, block_bytes)


def _halves(columns: torch.Tensor) -> torch.Tensor:
    return columns.contiguous().view(torch.float16).float()


def _by_gguf(data: memoryview, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    import gguf  # Takes 0.2 s to import, and is rarely needed.
    import numpy as np

    if kind not in set(gguf.GGMLQuantizationType):
        raise NotImplementedError(str(kind))
    known = gguf.GGMLQuantizationType(kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[known]
    *outer, inner = shape
    row_bytes = inner // per_block * block_bytes
    raw = _bytes(data, math.prod(outer) * row_bytes).numpy().reshape(*outer, row_bytes)
    try:
        numbers = gguf.dequantize(raw, known)
    except NotImplementedError:
        raise NotImplementedError(known.name) from None
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
