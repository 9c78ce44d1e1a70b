"""Reads the tensors of a folder of *.safetensors files."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from parrot.engine.models.fp8 import Fp8Matrix
from parrot.engine.models.parallel import Part
from parrot.engine.models.reading import usable
from parrot.utils.config import ConfigError

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
        return tensor.float().mul_(self._factors(name, tensor, part))

    def packed(self, name: str, device: torch.device, part: Part | None = None) -> Fp8Matrix | None:
        """The matrix if it is in e4m3 with one factor, or one per row."""
        tensor = self._read(name, device, part)
        if tensor.dtype != torch.float8_e4m3fn or tensor.dim() != 2:
            return None
        factors = self._factors(name, tensor, part)
        if factors.shape[1] != 1:
            return None
        return Fp8Matrix(tensor, factors.flatten().contiguous())

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

    def _factors(self, name: str, tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
        """Factors of a matrix or of a part of it, float32 [rows, 1] or [rows, columns]."""
        scales = next((name + end for end in _SCALES if name + end in self), None)
        if scales is None:
            raise ConfigError(f"tensor {name!r} is in e4m3 and has no {name}{_SCALES[0]}")
        found = self._read(scales, tensor.device, None).float()
        rows, columns = tensor.shape
        whole_rows = rows if part is None or part.dim else part.size
        if found.numel() == 1:
            return found.view(1, 1).expand(rows, 1)
        if found.numel() == whole_rows:
            found = found.view(-1, 1)
            return part.of(found) if part is not None and part.dim == 0 else found
        if self._block is None or found.dim() != 2:
            raise ConfigError(f"tensor {scales!r} has shape {list(found.shape)} for {name!r}")
        first = (0, 0) if part is None else (part.start, 0) if part.dim == 0 else (0, part.start)
        for dim, size in enumerate((rows, columns)):
            places = torch.arange(first[dim], first[dim] + size, device=found.device)
            found = found.index_select(dim, places // self._block[dim])
        return found
