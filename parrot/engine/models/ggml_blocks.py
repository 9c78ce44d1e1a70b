"""Reads blocks of quantised numbers from GGUF files.

    Q4_0  scale f16, 16 bytes            number = scale * (four bits - 8)
    Q4_1  scale f16, least f16, 16 bytes number = scale * four bits + least
    Q8_0  scale f16, 32 bytes            number = scale * signed byte

A block is 32 numbers of a row. Byte j of 4-bit numbers holds number j (low half) and j + 16.
`ggml_super_blocks` has the types with blocks of 256 numbers. Other types use the `gguf` package,
whose numpy code takes four to six times as long."""

import math

import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat

BLOCK = 32


class CutOff(Exception):
    """The file ends before the end of the tensor."""


_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = 0, 1, 2, 3, 8, 12, 13, 14
# The types that a GPU multiplies as codes.
GPU_FORMATS = {
    _Q4_0: CodeFormat(4, BLOCK),
    _Q4_1: CodeFormat(4, BLOCK),
    _Q8_0: CodeFormat(8, BLOCK),
    _Q4_K: CodeFormat(4, BLOCK),
    _Q5_K: CodeFormat(8, BLOCK),
    _Q6_K: CodeFormat(8, 16),
}
CPU_TYPES = (_Q4_0, _Q4_1)  # The types that a CPU multiplies as codes.


def coded(data: memoryview, kind: int, shape: tuple[int, ...]) -> CodedMatrix | None:
    """The matrix of codes in `data`; None for other types. Raises `CutOff`.

    `data` starts at the tensor's offset in the file and may be longer than the tensor."""
    if kind not in GPU_FORMATS or len(shape) != 2:
        return None
    if kind in (_Q4_K, _Q5_K, _Q6_K):
        from parrot.engine.models import ggml_super_blocks as super_blocks  # Only files with them.

        read = {_Q4_K: super_blocks.q4_k, _Q5_K: super_blocks.q5_k, _Q6_K: super_blocks.q6_k}[kind]
        size = super_blocks.SIZES[kind]
        return read(_blocks(data, shape, size, super_blocks.BLOCK), shape)
    if kind == _Q8_0:
        blocks = _blocks(data, shape, 2 + BLOCK)
        scales = _halves(blocks[:, :2]).view(shape[0], -1)
        codes = blocks[:, 2:].contiguous().view(torch.int8).view(shape)
        return CodedMatrix(codes, scales, torch.zeros_like(scales))
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
    if kind == _Q8_0:  # `coded` with its offsets takes an eighth longer.
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


def _blocks(
    data: memoryview, shape: tuple[int, ...], block_bytes: int, block: int = BLOCK
) -> torch.Tensor:
    """Bytes [blocks, block_bytes]."""
    if shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} numbers are not whole blocks of {block}")
    num_blocks = math.prod(shape) // block
    return _bytes(data, num_blocks * block_bytes).view(num_blocks, block_bytes)


def _halves(columns: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, 2 n] of float16 -> float32 [rows, n]."""
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
