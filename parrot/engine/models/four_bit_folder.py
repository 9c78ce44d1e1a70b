"""Reads matrices of four bits from safetensors: AWQ, GPTQ, and compressed-tensors.

    AWQ                 qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    GPTQ                qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], and
                        g_idx [in], the group of each input
    compressed-tensors  weight_packed [out, in / 8], weight_scale [out, groups], and optionally
                        weight_zero_point [out / 8, groups] and weight_g_idx [in]

The packed tensors are int32 with eight codes each, the first in the lowest bits. AWQ stores eight
outputs in the order `_AWQ_ORDER`. GPTQ's format `gptq` stores zeros minus one; a zero of 0 borrows
from the next code, so one is added to the whole word. A number is (code - zero) * scale."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.parallel import Part
from parrot.engine.models.quantisation import FourBitFormat
from parrot.engine.models.safetensors_folder import SafetensorsFolder
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ONES = 0x11111111  # One in each of eight codes.
_SYMMETRIC_ZERO = 8
_CODES = {
    FourBitFormat.AWQ: "qweight",
    FourBitFormat.GPTQ: "qweight",
    FourBitFormat.GPTQ_V2: "qweight",
    FourBitFormat.PACKED: "weight_packed",
}


@dataclass(frozen=True, slots=True)
class _Found:
    """A matrix, and the group of each input if groups are not consecutive inputs."""

    matrix: CodedMatrix
    order: torch.Tensor | None  # The inputs in the order of the matrix's columns.

    def numbers(self) -> torch.Tensor:
        numbers = self.matrix.numbers()
        if self.order is None:
            return numbers
        found = torch.empty_like(numbers)
        found[:, self.order] = numbers
        return found


class FourBitFolder:
    """The tensors of a folder in which modules have codes of four bits instead of a weight."""

    def __init__(self, folder: SafetensorsFolder, kind: FourBitFormat, group: int) -> None:
        """`group`: inputs with one scale, as the configuration names them."""
        self._folder = folder
        self._group = group
        self._kind = kind
        self._end = f".{_CODES[kind]}"

    def __contains__(self, name: str) -> bool:
        return name in self._folder or self._has_codes(name)

    def get(self, name: str, device: torch.device, part: Part | None = None) -> torch.Tensor:
        if not self._has_codes(name):
            return self._folder.get(name, device, part)
        whole = self._read(name, device).numbers()
        fits = part is not None and whole.shape[part.dim] == part.size
        return part.of(whole) if part is not None and fits else whole

    def packed(
        self, name: str, device: torch.device, part: Part | None = None
    ) -> CodedMatrix | None:
        """The matrix if its groups are consecutive inputs, and the part splits none."""
        if not self._has_codes(name):
            return None
        found = self._read(name, device)
        if found.order is not None:
            logger.warning("%s has groups in another order (desc_act): it is dequantised", name)
            return None
        matrix = found.matrix
        if part is None or matrix.codes.shape[part.dim] != part.size:
            return matrix
        return part.of_codes(matrix)

    def gpu_formats(self, names: Iterable[str]) -> dict[str, CodeFormat]:
        """The formats, on a GPU, of the matrices that have codes."""
        return {name: CodeFormat(4, self._group) for name in names if self._has_codes(name)}

    def _has_codes(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") + self._end in self._folder

    def _read(self, name: str, device: torch.device) -> _Found:
        module = name.removesuffix(".weight")

        def take(part: str) -> torch.Tensor | None:
            own = f"{module}.{part}"
            return self._folder.get(own, device) if own in self._folder else None

        read = _packed if self._kind is FourBitFormat.PACKED else _awq
        if self._kind in (FourBitFormat.GPTQ, FourBitFormat.GPTQ_V2):
            read = _gptq if self._kind is FourBitFormat.GPTQ else _gptq_v2
        try:
            codes, scales, zeros, groups = read(take)
            return _in_order(codes, scales, zeros, groups)
        except ConfigError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{module!r} is not a matrix of four bits in the format {self._kind.value}: "
                f"{error!s:.300}"
            ) from None


_Take = Callable[[str], torch.Tensor | None]
# Codes [out, in], scales and zeros [out, groups], and the group of each input or None.
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _needed(take: _Take, name: str) -> torch.Tensor:
    found = take(name)
    if found is None:
        raise TypeError(f"it has no {name}")
    return found


def _awq(take: _Take) -> _Parts:
    places = torch.tensor(_AWQ_ORDER).argsort()

    def columns(name: str) -> torch.Tensor:
        words = _nibbles(_needed(take, name))
        return words[..., places.to(words.device)].flatten(-2).t()

    return columns("qweight"), _needed(take, "scales").t(), columns("qzeros"), None


def _gptq(take: _Take, added: int = _ONES) -> _Parts:
    codes = _nibbles(_needed(take, "qweight")).transpose(0, 1).flatten(-2)
    scales = _needed(take, "scales").t()
    zeros = _nibbles(_needed(take, "qzeros") + added).flatten(-2).t()
    return codes, scales, zeros, take("g_idx")


def _gptq_v2(take: _Take) -> _Parts:
    return _gptq(take, added=0)


def _packed(take: _Take) -> _Parts:
    codes = _nibbles(_needed(take, "weight_packed")).flatten(-2)
    shape = take("weight_shape")
    if shape is not None and shape.tolist() != list(codes.shape):
        codes = codes[: int(shape[0]), : int(shape[1])]  # Words at the end may be padded.
    scales, words = _needed(take, "weight_scale"), take("weight_zero_point")
    if words is None:
        zeros = torch.full_like(scales, _SYMMETRIC_ZERO)
    else:
        zeros = _nibbles(words).transpose(1, 2).flatten(0, 1)[: len(scales)]
    return codes, scales, zeros, take("weight_g_idx")


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> the codes uint8 [..., n, 8], lowest bits first."""
    if words.dtype != torch.int32:
        raise TypeError(f"codes are packed in {words.dtype}, not in int32")
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _in_order(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor | None
) -> _Found:
    """The matrix with its columns in the order of groups."""
    (num_rows, num_columns), num_groups = codes.shape, scales.shape[1]
    size = num_columns // num_groups
    expected = (num_rows, num_groups)
    if num_columns % num_groups or scales.shape != expected or zeros.shape != expected:
        raise TypeError(
            f"codes {list(codes.shape)} do not fit scales {list(scales.shape)} and zeros "
            f"{list(zeros.shape)}"
        )
    order = None
    if groups is not None:
        consecutive = torch.arange(num_columns, device=groups.device) // size
        if not torch.equal(groups.long(), consecutive):
            order = groups.argsort(stable=True)
            if not torch.equal(groups[order].long(), consecutive):
                raise TypeError("its groups differ in size")
            codes = codes[:, order]
    matrix = CodedMatrix.with_zeros(codes.contiguous(), scales.contiguous(), zeros.contiguous())
    return _Found(matrix, order)
