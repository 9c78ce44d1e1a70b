"""Reads super-blocks of 256 quantised numbers from GGUF files.

    Q4_K  d f16, d_least f16, 12 bytes of factors, 128 bytes            codes of 4 bits
    Q5_K  d f16, d_least f16, 12 bytes of factors, 32 bytes, 128 bytes  codes of 5 bits
    Q6_K  128 bytes, 64 bytes, 16 signed bytes of factors, d f16        codes of 6 bits, minus 32

A number of Q4_K and Q5_K is d * scale * code - d_least * least. Each 32 numbers have a scale and a
least of 6 bits in the factors. A number of Q6_K is d * scale * (code - 32). Each 16 numbers have a
scale. Codes of 5 and of 6 bits become codes of 8 bits."""

import torch

from parrot.engine.models.codes import CodedMatrix

BLOCK = 256
SIZES = {12: 144, 13: 176, 14: 210}  # Bytes of a super-block, by type.

Shape = tuple[int, ...]


def q4_k(blocks: torch.Tensor, shape: Shape) -> CodedMatrix:
    """The matrix [rows, columns] of super-blocks uint8 [blocks, 144]."""
    return _matrix(_low_codes(blocks[:, 16:]), blocks, shape)


def q5_k(blocks: torch.Tensor, shape: Shape) -> CodedMatrix:
    """The matrix [rows, columns] of super-blocks uint8 [blocks, 176]."""
    # Bit i of byte j is the highest bit of number j of the i-th 32 numbers.
    high = torch.stack([blocks[:, 16:48] >> bit & 1 for bit in range(8)], 1)
    codes = _low_codes(blocks[:, 48:]) | high << 4
    return _matrix(codes.to(torch.int8), blocks, shape)


def q6_k(blocks: torch.Tensor, shape: Shape) -> CodedMatrix:
    """The matrix [rows, columns] of super-blocks uint8 [blocks, 210]."""
    # Each half of a super-block has 128 numbers in four parts of 32. A byte of `low` has four bits
    # of two parts, and a byte of `high` has two bits of all parts.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), 2)
    high = torch.cat([high >> 2 * part & 3 for part in range(4)], 2)
    codes = (low | high << 4).view(torch.int8) - 32
    d = blocks[:, 208:].contiguous().view(torch.float16).float()
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    scales = (scales * d).view(shape[0], -1)
    return CodedMatrix(codes.view(shape), scales, torch.zeros_like(scales))


def _low_codes(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 128] -> codes of four bits [blocks, 8, 32]."""
    pairs = octets.reshape(-1, 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 8, 32)


def _matrix(codes: torch.Tensor, blocks: torch.Tensor, shape: Shape) -> CodedMatrix:
    """The matrix of the codes of Q4_K or Q5_K, and of the factors in `blocks`."""
    # Two bits of each of the last factors are the highest bits of the first.
    first, second, mixed = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), 1).float()
    least = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), 1).float()
    d = blocks[:, :4].contiguous().view(torch.float16).float()
    scales = (scales * d[:, :1]).view(shape[0], -1)
    least = (least * -d[:, 1:]).view(shape[0], -1)
    return CodedMatrix(codes.view(shape), scales, least)
