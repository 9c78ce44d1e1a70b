"""The parts of decoders: linear layers, norms, MLP and rotations.

All of them run under `torch.inference_mode`."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.rope import amplitudes, inverse_frequencies
from parrot.engine.models.spec import RopeSpec

# Number of rows for which oneDNN chooses the blocked layout of a packed weight. For all other
# numbers of rows the layout is at most 2% slower than the best layout.
_PACK_FOR_ROWS = 16
# Most rows for the kernel for 4-bit weights. It reads 1/4 of the bytes but dequantises them again
# for every four rows: it is 2.7 times as fast as bfloat16 for one row, 1.4 for four, 0.9 for eight.
_FEW_ROWS = 4
_FOUR_BIT_ROWS = 64  # The kernel needs a multiple of this number of outputs.
_FOUR_BIT_GROUPS = (32, 64, 128, 256)  # Numbers of inputs with one scale that the kernel supports.
# Fewer rows are padded to this number, because oneDNN's kernels for one or two rows are slower.
_MIN_ROWS = 4


class Linear(Protocol):
    """x [rows, in] -> x @ weight.T + bias (+ residual) [rows, out]."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor: ...


class PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out.add_(residual)


class PackedLinear:
    """A product on a CPU with the weight in oneDNN's blocked layout.

    For few rows it is 2 to 4 times as fast as `F.linear`, which reorders the weight in every call.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._fused = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        if rows < _MIN_ROWS:
            padded = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
            out: torch.Tensor = self._plain(padded, self._weight, self._bias, "none", [], "")[:rows]
            return out if residual is None else out.add_(residual)
        if residual is None:
            return self._plain(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return self._fused(x, residual, self._weight, self._bias, "add")  # type: ignore[no-any-return]


class FourBitLinear:
    """A product with a 4-bit weight, for few rows on a CPU with AVX512. `x` must be bfloat16.

    More rows use the same weight in bfloat16. The scales are rounded to bfloat16. So a weight
    differs from `matrix` by at most 1/160 of the largest number that its group can hold."""

    def __init__(self, matrix: CodedMatrix, bias: torch.Tensor | None) -> None:
        self._wide = make_linear(matrix.numbers().to(torch.bfloat16), bias)
        self._bias = bias
        self._group = matrix.group
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.codes.int(), 1)
        middle = matrix.scales * 8 + matrix.least  # The kernel's offset is the number of code 8.
        scales = torch.stack((matrix.scales, middle), 2).transpose(0, 1)
        self._scales = scales.to(torch.bfloat16).contiguous()
        self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @staticmethod
    def takes(matrix: CodedMatrix) -> bool:
        """Whether this CPU has the kernel, and the kernel supports the matrix's shape."""
        fits = matrix.codes.shape[0] % _FOUR_BIT_ROWS == 0 and matrix.group in _FOUR_BIT_GROUPS
        return matrix.bits == 4 and fits and torch.backends.cpu.get_cpu_capability() == "AVX512"

    @property
    def num_bytes(self) -> int:
        """Bytes in addition to the weight in bfloat16."""
        return sum(part.numel() * part.itemsize for part in (self._codes, self._scales))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] > _FEW_ROWS:
            return self._wide(x, residual)
        out: torch.Tensor = self._product(x, self._codes, self._group, self._scales)
        if self._bias is not None:
            out.add_(self._bias)
        return out if residual is None else out.add_(residual)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if weight.device.type == "cpu" and torch._C._has_mkldnn and _can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports the type on this CPU. bfloat16 needs AVX512 or newer."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    # On a CPU this is a third faster than `F.rms_norm` and as accurate: x / sqrt(|x|^2 + n eps)
    # needs fewer passes. The weight contains the factor sqrt(n).

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.numel()
        self.weight = weight
        self.eps = eps
        self._scaled_weight = weight.float() * size**0.5
        self._eps = torch.full((1, 1), eps * size, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length).rsqrt_()
        return x.mul(scale).mul_(self._scaled_weight).to(x.dtype)


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


Norm = RMSNorm | LayerNorm
Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP:
    """down(act(gate) * up) with gate and up in one product, or down(act(up))."""

    def __init__(self, up: Linear, down: Linear, activation: Activation, *, gated: bool) -> None:
        """`gated`: `up` returns [gate | up]."""
        self.up = up
        self.down = down
        self._activation = activation
        self._gated = gated

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self._gated:
            return self.down(self._activation(self.up(x)), residual)
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(self._activation(gate).mul_(up), residual)


class Rope:
    """Rotary positions that pair dimension i with i + head_dim / 2, as Hugging Face does."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._amplitudes: torch.Tensor | None = None
        if spec.amplitude != 1.0:
            self._amplitudes = amplitudes(spec, head_dim).to(device)

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [rows, 1, head_dim], for all layers of a step."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._amplitudes is not None:
            cos, sin = cos * self._amplitudes, sin * self._amplitudes
        return (
            torch.cat((cos, cos), dim=1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=1).to(dtype).unsqueeze(1),
        )


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate heads [rows, heads, head_dim] in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)
