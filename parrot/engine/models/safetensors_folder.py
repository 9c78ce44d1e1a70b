"""Reads the tensors of a folder of *.safetensors files."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from parrot.engine.models.codes import CodeFormat
from parrot.engine.models.fp8 import BLOCK, Fp8Matrix
from parrot.engine.models.parallel import Part
from parrot.engine.models.reading import usable
from parrot.utils.config import ConfigError

_E4M3 = "F8_E4M3"  # The name of the type in a file's header.
_SCALES = ("_scale", "_scale_inv")  # Ends of the names of a matrix's factors in e4m3.


class SafetensorsFolder:
    """The tensors of all *.safetensors files of a folder.

    A matrix `NAME.weight` in e4m3 has its factors in `NAME.weight_scale` or
    `NAME.weight_scale_inv`: one for the matrix, one per row, or one per block of rows and columns.
    Factors of activations are not read, because each row of activations gets its own."""

    def __init__(self, folder: Path, block: tuple[int, int] | None = None) -> None:
        """`block`: rows and columns with one factor (`quantisation.block_size`)."""
        self._block = block
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if not path.is_file():
                continue  # Opening a pipe would block.
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: not a usable safetensors file: {error}") from None
        if not self._file_of:
            has_pickle = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
            reason = (
                "only pickled weights, which can run code when loaded; convert them to safetensors"
                if has_pickle
                else "no *.safetensors files"
            )
            raise ConfigError(f"{folder}: {reason}")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, device: torch.device, part: Part | None = None) -> torch.Tensor:
        tensor = self._read(name, device, part)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        scales = self._scales_of(name, device)
        factors = _row_factors(scales, len(tensor), part)
        if factors is None:
            factors = self._block_factors(name, scales, tensor, part)
        return tensor.float().mul_(factors)

    def packed(self, name: str, device: torch.device, part: Part | None = None) -> Fp8Matrix | None:
        """The matrix if it is in e4m3 with one factor, one per row, or one per whole block."""
        # The header and the factors tell whether it is. Other matrices are only read by `get`.
        shape = self._e4m3_shape(name, part)
        if shape is None:
            return None
        scales = self._scales_of(name, device)
        factors = _row_factors(scales, shape[0], part)
        if factors is not None:
            return Fp8Matrix(self._read(name, device, part), factors.flatten().contiguous())
        blocks = self._whole_blocks(scales, shape, part)
        return None if blocks is None else Fp8Matrix(self._read(name, device, part), blocks)

    def gpu_formats(self, names: Iterable[str]) -> dict[str, CodeFormat]:
        """Empty: its matrices are plain numbers, or in e4m3."""
        return {}

    def _whole_blocks(
        self, scales: torch.Tensor, shape: tuple[int, ...], part: Part | None
    ) -> torch.Tensor | None:
        """The factors of the blocks of a matrix or of a part of it; None if it splits a block."""
        if self._block != (BLOCK, BLOCK) or scales.dim() != 2 or any(x % BLOCK for x in shape):
            return None
        if part is None:
            return scales.contiguous()
        if part.start % BLOCK or scales.shape[part.dim] * BLOCK != part.size:
            return None
        first, count = part.start // BLOCK, shape[part.dim] // BLOCK
        return scales.narrow(part.dim, first, count).contiguous()

    def _e4m3_shape(self, name: str, part: Part | None) -> tuple[int, ...] | None:
        """The shape of a matrix in e4m3 or of a part of it; None for other types."""
        path = self._file_of[name]
        with usable(str(path)), safe_open(path, framework="pt") as file:
            found = file.get_slice(name)
            whole = tuple(found.get_shape())
            if found.get_dtype() != _E4M3 or len(whole) != 2:
                return None
        return whole if part is None or whole[part.dim] != part.size else part.shape(whole)

    def _read(self, name: str, device: torch.device, part: Part | None) -> torch.Tensor:
        path = self._file_of[name]
        with usable(str(path)), safe_open(path, framework="pt", device=str(device)) as file:
            tensor: torch.Tensor
            if part is None or file.get_slice(name).get_shape()[part.dim] != part.size:
                tensor = file.get_tensor(name)
            else:
                where = (slice(None),) * part.dim + (slice(part.start, part.stop),)
                tensor = file.get_slice(name)[where].contiguous()
        return tensor

    def _scales_of(self, name: str, device: torch.device) -> torch.Tensor:
        """The factors of a matrix as they are in the file, float32."""
        return self._read(self._name_of_scales(name), device, None).float()

    def _name_of_scales(self, name: str) -> str:
        scales = next((name + end for end in _SCALES if name + end in self), None)
        if scales is None:
            raise ConfigError(f"tensor {name!r} is in e4m3 and has no {name}{_SCALES[0]}")
        return scales

    def _block_factors(
        self, name: str, scales: torch.Tensor, tensor: torch.Tensor, part: Part | None
    ) -> torch.Tensor:
        """The factor of each number of a matrix or of a part of it, from those of blocks."""
        if self._block is None or scales.dim() != 2:
            found = self._name_of_scales(name)
            raise ConfigError(f"tensor {found!r} has shape {list(scales.shape)} for {name!r}")
        first = (0, 0) if part is None else (part.start, 0) if part.dim == 0 else (0, part.start)
        for dim, size in enumerate(tensor.shape):
            places = torch.arange(first[dim], first[dim] + size, device=scales.device)
            scales = scales.index_select(dim, places // self._block[dim])
        return scales


def _row_factors(scales: torch.Tensor, num_rows: int, part: Part | None) -> torch.Tensor | None:
    """The factor of each row [rows, 1] of a matrix or of a part of it; None if blocks have
    factors."""
    if scales.numel() == 1:
        return scales.view(1, 1).expand(num_rows, 1)
    is_rows = part is not None and part.dim == 0
    if scales.numel() != (part.size if part is not None and is_rows else num_rows):
        return None
    found = scales.view(-1, 1)
    return part.of(found) if part is not None and is_rows else found
