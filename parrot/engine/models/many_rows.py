"""A decoder's forward pass over many rows on a CPU, in compiled kernels between the products."""

import numpy as np
import torch

from parrot.engine.kernels.cpu import row_layout as layout
from parrot.engine.kernels.cpu.native import Kernels, RowKernel
from parrot.engine.models.decoder import Attend, Decoder
from parrot.engine.models.layers import Norm, RMSNorm, inverse_frequencies


class ManyRowsDecoder:
    """Shares all weights with the `Decoder` that it is made from, and computes what it does."""

    def __init__(self, model: Decoder, kernels: Kernels) -> None:
        """`few_rows.fits` must be true of the model, whose type is that of the kernels."""
        spec = model.spec
        assert spec.rope is not None
        self._kernels = kernels.rows
        self._embedded = model.embedded
        self._layers = model.layers
        self._spec = spec
        self._frequencies = inverse_frequencies(spec.rope, spec.head_dim)
        self._norms = [
            (_weight(layer.attn_norm), _weight(layer.mlp_norm)) for layer in model.layers
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `Decoder.forward`."""
        num_heads, num_kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        x = self._embedded(token_ids)
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        angles = torch.cat((angles.cos(), angles.sin()), dim=1)
        for layer, (attn_norm, mlp_norm) in zip(self._layers, self._norms, strict=True):
            heads = layer.qkv(self._norm(x, attn_norm))
            heads = heads.view(len(x), -1, self._spec.head_dim)
            turned, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
            if layer.qk_norm is not None:
                turned = layer.qk_norm(turned)
            self._turn(turned, angles)
            attended = attend(layer.index, turned[:, :num_heads], turned[:, num_heads:], v)
            if rows is not None and layer is self._layers[-1]:
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
            x = layer.out(attended, x)
            x = layer.mlp.down(self._gate(layer.mlp.up(self._norm(x, mlp_norm))), x)
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _run(self._kernels.norm_rows, x, out, weight, x.shape[1], eps=self._spec.norm_eps)
        return out

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[1] // 2
        out = x.new_empty(len(x), width)
        _run(self._kernels.gate_rows, x, out, out, width)
        return out

    def _turn(self, heads: torch.Tensor, angles: torch.Tensor) -> None:
        assert heads.stride()[1:] == (heads.shape[2], 1), heads.stride()
        _run(self._kernels.turn_rows, heads, heads, angles, heads.shape[2])


def _weight(norm: Norm) -> torch.Tensor:
    assert isinstance(norm, RMSNorm), norm
    return norm.weight.float().contiguous()


def _run(
    kernel: RowKernel,
    x: torch.Tensor,
    out: torch.Tensor,
    other: torch.Tensor,
    width: int,
    *,
    eps: float = 0.0,
) -> None:
    """Compute all rows, the first dimension of x, in torch's threads."""
    task = np.zeros(layout.ROW_FIELDS, dtype=np.int64)
    task[layout.X], task[layout.OUT] = x.data_ptr(), out.data_ptr()
    task[layout.OTHER], task[layout.NUM_ROWS] = other.data_ptr(), len(x)
    task[layout.WIDTH], task[layout.HEADS] = width, x.shape[1]
    task[layout.STRIDE] = x.stride(0) * x.itemsize
    task.view(np.float32)[2 * layout.EPS] = eps
    kernel(task.ctypes.data, torch.get_num_threads())
