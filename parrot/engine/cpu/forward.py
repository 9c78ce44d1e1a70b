"""Runs a decoder's layers on a CPU with compiled kernels, once the kernels are loaded.

In torch, the operations between the matrix products take 50 operators per layer and a copy of all
KV, because torch has no attention over pages."""

from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import TorchAttention
from parrot.engine.attention.work_list import StepRows, WorkList
from parrot.engine.cpu import layout, row_layout
from parrot.engine.cpu.attention import (
    HEAD_DIM_MULTIPLE,
    Array,
    PagedAttention,
    PromptAttention,
    address_of,
)
from parrot.engine.cpu.native import Kernels, RowKernel
from parrot.engine.models.decoder import Attend, Decoder
from parrot.engine.models.layers import Norm, RMSNorm
from parrot.engine.models.rope import inverse_frequencies
from parrot.engine.models.spec import LayerSpec, is_default

# Most rows of a step for `FewRowsDecoder`. With more rows the matrix products take most of the
# time, and `ManyRowsDecoder` divides the other operations among torch's threads.
MAX_ROWS = 64

_WIDTH_MULTIPLE = 16  # The kernels need widths that are multiples of this number.

# Steps whose sequences share more KV tokens than this use torch's attention, which reads shared KV
# once. Its speed equals the kernels' for 16 forks of 2,048 tokens, and is 1.4 times for 8,000.
_MAX_SHARED_TOKENS = 1 << 15


# The fields of specs that the kernels handle.
_HANDLED = (
    *("architecture", "vocab_size", "hidden_size", "layers", "max_positions", "norm", "ropes"),
    *("names", "other_names", "tie_embeddings", "final_norm"),
    *("embed_scale", "logit_scale", "logit_softcap"),  # `Decoder` handles these.
)
_HANDLED_BY_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "o_bias"),
)


class CompiledLayers:
    """Runs the layers of a `Decoder`, with compiled kernels once they are loaded."""

    def __init__(
        self,
        kernels: Future[Kernels],
        model: Decoder,
        pool: PooledKV,
        attention: TorchAttention,
    ) -> None:
        """`kernels` must have the model's type. A model that they do not support runs in torch."""
        self._kernels: Future[Kernels] | None = kernels
        self._model = model
        self._pool = pool
        self._attention = attention
        self._few_rows: FewRowsDecoder | None = None
        self._many_rows: ManyRowsDecoder | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: IntArray,
        step: StepRows,
        work: WorkList,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The last layer's output for `rows`, or for all rows if None."""
        self._take_kernels()
        few_rows = self._few_rows if len(token_ids) <= MAX_ROWS else None
        if few_rows is not None and work.num_shared_tokens <= _MAX_SHARED_TOKENS:
            hidden = few_rows.forward(token_ids, step)
            return hidden if rows is None else hidden.index_select(0, rows)
        attend = partial(self._attention.run, plan=self._attention.plan(work, step))
        model = self._many_rows or self._model
        at = torch.from_numpy(positions).long().to(self._model.device)
        return model.forward(token_ids, at, attend, rows)

    def _take_kernels(self) -> None:
        """Start to use the kernels if they are loaded."""
        if self._kernels is None or not self._kernels.done():
            return
        if self._kernels.exception() is None:
            kernels = self._kernels.result()
            self._attention.prompts = PromptAttention(kernels)
            if fits(self._model, self._pool):
                self._few_rows = FewRowsDecoder(self._model, self._pool, kernels)
                self._many_rows = ManyRowsDecoder(self._model, kernels)
        self._kernels = None


def fits(model: Decoder, pool: PooledKV) -> bool:
    """Whether the kernels support this model and this pool."""
    spec = model.spec
    return (
        model.device.type == "cpu"
        and pool.exponents is None
        and is_default(spec, except_for=_HANDLED)
        and is_default(spec.norm, except_for=("eps",))
        and len(spec.ropes) == len(spec.mlp_widths) == 1
        and spec.ropes[0].amplitude == 1.0
        and spec.hidden_size % _WIDTH_MULTIPLE == 0
        and all(map(_fits_layer, spec.layers))
    )


def _fits_layer(layer: LayerSpec) -> bool:
    return (
        is_default(layer, except_for=("attention", "mlp"))
        and is_default(layer.attention, except_for=_HANDLED_BY_ATTENTION)
        and is_default(layer.mlp, except_for=("width", "bias"))
        and layer.attention.qk_norm in ("", "head")
        and layer.attention.head_dim % HEAD_DIM_MULTIPLE == 0
        and layer.mlp.width % _WIDTH_MULTIPLE == 0
    )


class FewRowsDecoder:
    """The forward pass for up to `MAX_ROWS` rows. Shares the weights and the pool. Stateless."""

    def __init__(self, model: Decoder, pool: PooledKV, kernels: Kernels) -> None:
        """`fits` must be true for model and pool. The kernels must have their type."""
        spec = model.spec
        self._kernels = kernels
        self._embedded = model.embedded
        self._layers = model.layers
        self._attention = PagedAttention(
            pool,
            spec.attention.num_heads,
            inverse_frequencies(spec.ropes[0], spec.attention.head_dim),
            [layer.head_norm for layer in model.layers],
            kernels,
            MAX_ROWS,
        )
        self._rows = np.zeros(layout.ROW_FIELDS, dtype=np.int64)
        self._rows[layout.WIDTH] = spec.hidden_size
        (width,) = spec.mlp_widths
        self._rows[layout.GATED_WIDTH] = width
        self._rows.view(np.float32)[2 * layout.EPS] = spec.norm.eps
        self._residual = model.embed.new_empty(MAX_ROWS, spec.hidden_size)
        self._normed = torch.empty_like(self._residual)
        self._gated = model.embed.new_empty(MAX_ROWS, width)
        self._kept: list[object] = []  # Arrays whose addresses are in norms' blocks.
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


class ManyRowsDecoder:
    """The forward pass for any number of rows. Shares the weights of its `Decoder`. Stateless."""

    def __init__(self, model: Decoder, kernels: Kernels) -> None:
        """`fits` must be true for the model. The kernels must have its type."""
        spec = model.spec
        self._kernels = kernels.rows
        self._embedded = model.embedded
        self._layers = model.layers
        self._heads, self._eps = spec.attention, spec.norm.eps
        self._frequencies = inverse_frequencies(spec.ropes[0], spec.attention.head_dim)
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
        """See `Decoder.forward`."""
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        x = self._embedded(token_ids)
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        angles = torch.cat((angles.cos(), angles.sin()), dim=1)
        for layer, (attn_norm, mlp_norm) in zip(self._layers, self._norms, strict=True):
            heads = layer.qkv(self._norm(x, attn_norm))
            heads = heads.view(len(x), -1, self._heads.head_dim)
            rotated, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
            if layer.qk_norm is not None:
                rotated = layer.qk_norm(rotated)
            self._rotate(rotated, angles)
            attended = attend(layer.index, rotated[:, :num_heads], rotated[:, num_heads:], v)
            if rows is not None and layer is self._layers[-1]:
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
            x = layer.out(attended, x)
            x = layer.mlp.down(self._gate(layer.mlp.up(self._norm(x, mlp_norm))), x)
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _run(self._kernels.norm_rows, x, out, weight, x.shape[1], eps=self._eps)
        return out

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[1] // 2
        out = x.new_empty(len(x), width)
        _run(self._kernels.gate_rows, x, out, out, width)
        return out

    def _rotate(self, heads: torch.Tensor, angles: torch.Tensor) -> None:
        assert heads.stride()[1:] == (heads.shape[2], 1), heads.stride()
        _run(self._kernels.rotate_rows, heads, heads, angles, heads.shape[2])


def _weight(norm: Norm | None) -> torch.Tensor:
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
    """Run a kernel on all rows (the first dimension of x) in torch's threads."""
    task = np.zeros(row_layout.ROW_FIELDS, dtype=np.int64)
    task[row_layout.X], task[row_layout.OUT] = x.data_ptr(), out.data_ptr()
    task[row_layout.OTHER], task[row_layout.NUM_ROWS] = other.data_ptr(), len(x)
    task[row_layout.WIDTH], task[row_layout.HEADS] = width, x.shape[1]
    task[row_layout.STRIDE] = x.stride(0) * x.itemsize
    task.view(np.float32)[2 * row_layout.EPS] = eps
    kernel(task.ctypes.data, torch.get_num_threads())
