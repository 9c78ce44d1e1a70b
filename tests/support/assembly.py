"""Evaluates the PTX instructions that unpack codes, which Triton's interpreter cannot run."""

import re
from collections.abc import Callable

import torch


def computed(source: str, registers: dict[str, torch.Tensor]) -> torch.Tensor:
    """The 32 bits of $0 after lines of assembly, as int64. `registers`: the same of the others."""
    for line in re.findall(r"^\s*(shr|and|lop3|mov|fma)\S* (.*);$", source, re.MULTILINE):
        name, into, *operands = line[0], *re.split(r", *", line[1])
        values = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in operands]
        registers[into] = _INSTRUCTIONS[name](*values)
    return registers["$0"]


def pair_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The register with two numbers of 16 bits."""
    return low & 0xFFFF | (high & 0xFFFF) << 16


def halves(bits: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The two numbers of 16 bits in a register, in float64."""
    parts = (bits & 0xFFFF, bits >> 16 & 0xFFFF)
    return [part.to(torch.int16).view(dtype).double() for part in parts]


def _fma(*operands: torch.Tensor) -> torch.Tensor:
    """Of two numbers in bfloat16."""
    pairs = zip(*(halves(bits, torch.bfloat16) for bits in operands), strict=True)
    found = [(x * y + z).bfloat16().view(torch.int16).long() for x, y, z in pairs]
    return pair_of(*found)


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    assert int(table) == 0xEA, "the table must be (a and b) or c"
    return a & b | c


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "shr": lambda a, count: a >> count,
    "and": lambda a, b: a & b,
    "lop3": _lop3,
    "mov": lambda a: a,
    "fma": _fma,
}
