"""A decoder's forward pass over few rows on a CPU, in compiled kernels between the products.

In torch what lies between them is 50 operators a layer and a copy of all KV, since no operator of
torch attends over pages."""

import numpy as np
import torch

from parrot.engine.attention.paged_attention import (
    HEAD_DIM_MULTIPLE,
    Array,
    PagedAttention,
    address_of,
)
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.work_list import StepRows
from parrot.engine.kernels.cpu import layout
from parrot.engine.kernels.cpu.native import Kernels
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.layers import RMSNorm, inverse_frequencies

MAX_ROWS = 64
"""The most rows of a step. With more, products take most of the time in any case, and torch's
threads share what is between them, too."""

_WIDTH_MULTIPLE = 16


def fits(model: Decoder, pool: PooledKV) -> bool:
    """Whether the kernels compute this model, with its KV in such a pool."""
    spec = model.spec
    return (
        model.device.type == "cpu"
        and pool.exponents is None
        and spec.rope is not None
        and spec.norm == "rms"
        and spec.gated
        and spec.activation == "silu"
        and spec.pre_norm
        and spec.embed_dim is None
        and not spec.names.positions
        and spec.head_dim % HEAD_DIM_MULTIPLE == 0
        and spec.hidden_size % _WIDTH_MULTIPLE == 0
        and spec.intermediate_size % _WIDTH_MULTIPLE == 0
    )


class FewRowsDecoder:
    """Shares all weights with the `Decoder` that it is made from, and the pool with its owner.
    Holds no state of any context."""

    def __init__(self, model: Decoder, pool: PooledKV, kernels: Kernels) -> None:
        """`fits` must be true of model and pool, whose type is that of the kernels."""
        spec = model.spec
        assert spec.rope is not None
        self._kernels = kernels
        self._embedded = model.embedded
        self._layers = model.layers
        self._attention = PagedAttention(
            pool,
            spec.num_heads,
            inverse_frequencies(spec.rope, spec.head_dim),
            [layer.head_norm for layer in model.layers],
            kernels,
            MAX_ROWS,
        )
        self._rows = np.zeros(layout.ROW_FIELDS, dtype=np.int64)
        self._rows[layout.WIDTH] = spec.hidden_size
        self._rows[layout.GATED_WIDTH] = spec.intermediate_size
        self._rows.view(np.float32)[2 * layout.EPS] = spec.norm_eps
        self._residual = model.embed.new_empty(MAX_ROWS, spec.hidden_size)
        self._normed = torch.empty_like(self._residual)
        self._gated = model.embed.new_empty(MAX_ROWS, spec.intermediate_size)
        self._kept: list[object] = []  # what is in norms by address
        self._norms = [
            (self._norm(layer.attn_norm), self._norm(layer.mlp_norm)) for layer in model.layers
        ]

    def forward(self, token_ids: torch.Tensor, step: StepRows) -> torch.Tensor:
        """token_ids [rows], at most `MAX_ROWS` -> the last layer's output [rows, hidden]."""
        num_rows = len(token_ids)
        self._attention.prepare(step)
        self._rows[layout.NUM_ROWS] = num_rows
        kernels, rows = self._kernels, address_of(self._rows)
        normed, gated = self._normed[:num_rows], self._gated[:num_rows]
        x = residual = self._residual[:num_rows]
        residual.copy_(self._embedded(token_ids))
        added, gated_address = 0, gated.data_ptr()
        for layer, (attn_norm, mlp_norm) in zip(self._layers, self._norms, strict=True):
            kernels.add_rms_norm(added, rows, attn_norm)
            x = layer.out(self._attention.run(layer.index, layer.qkv(normed)))
            kernels.add_rms_norm(x.data_ptr(), rows, mlp_norm)
            x = layer.mlp.up(normed)
            kernels.silu_multiply(x.data_ptr(), rows, gated_address)
            x = layer.mlp.down(gated)
            added = x.data_ptr()
        return residual + x

    def _norm(self, norm: object) -> int:
        """The address of the norm's block."""
        assert isinstance(norm, RMSNorm), norm
        block: Array = np.zeros(layout.NORM_FIELDS, dtype=np.int64)
        weight = norm.weight.float().contiguous()
        block[layout.RESIDUAL] = self._residual.data_ptr()
        block[layout.WEIGHT] = weight.data_ptr()
        block[layout.NORMED] = self._normed.data_ptr()
        self._kept += block, weight
        return address_of(block)
