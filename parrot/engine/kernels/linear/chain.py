"""All matrix products between two attentions as one kernel, for one row and weights in e4m3.

With one row, reading weights takes nearly all of a step's time. One kernel per product leaves the
memory idle at the end of each kernel. Here programs ask for their next weights before they wait for
the other programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.chain_kernels import (
    COPIED,
    INPUTS,
    SLICE,
    TILE,
    WARPS,
    chain_kernel,
)
from parrot.engine.kernels.linear.products import UndividedRows

_TILE, _INPUTS, _SLICE, _WARPS = (int(size.value) for size in (TILE, INPUTS, SLICE, WARPS))

# Shared memory of a program. A multiprocessor has 227 KiB, and a program of attention takes 70. So
# each of both can start before the other ends.
_SHARED_BYTES = 153 << 10
_TILE_BYTES = 32 << 10
_STAGES = 3  # Tiles that a program asks for ahead. With 4 or 5, steps are 1 and 3% slower.


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """e4m3 codes [outputs, inputs] with scales float32 [outputs]."""

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm with a weight [hidden]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Following:
    """qkv of the next layer [(heads + 2 kv_heads) * head_dim, hidden], and its angles."""

    qkv: CodedWeight
    bias: torch.Tensor | None
    cos_sin: torch.Tensor


@dataclass(frozen=True)
class ChainLayer:
    """The products of one layer after its attention, up to the next attention."""

    out: CodedWeight
    gate_up: CodedWeight
    down: CodedWeight
    norm: Norm  # Before gate and up.
    next_norm: Norm
    following: Following | None  # None in the last layer.

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the residual, of the heads' results and of the MLP."""
        return len(self.out.codes), self.out.codes.shape[1], self.down.codes.shape[1]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the dimensions of each."""

    queries: int
    keys: int
    dim: int

    @property
    def num_outputs(self) -> int:
        """The outputs of qkv."""
        return (self.queries + 2 * self.keys) * self.dim

    @property
    def fit_tiles(self) -> bool:
        """Whether a head consists of whole tiles."""
        return self.dim % _TILE == 0


class RowChain:
    """The kernels of a decoder's layers. Stateless.

    Their programs wait for each other. So two steps must not run at the same time on a device."""

    def __init__(self, layers: Sequence[ChainLayer], heads: Heads) -> None:
        properties = torch.cuda.get_device_properties(layers[0].out.codes.device)
        self._num_programs = properties.multi_processor_count
        self._layers = [_Launch(layer, heads, self._num_programs) for layer in layers]
        self._sizes = layers[0].sizes

    @property
    def fits(self) -> bool:
        """Whether a program's arrays fit the shared memory."""
        return self._layers[0].shared_bytes <= _SHARED_BYTES

    def start(self, residual: torch.Tensor) -> "ChainStep":
        """A step with the residual [1, hidden], which it updates."""
        hidden, _, inner = self._sizes
        assert residual.shape == (1, hidden), residual.shape
        new = residual.new_empty
        return ChainStep(
            self._layers,
            residual,
            new((2, 1, hidden)),
            new((1, inner)),
            new((2, 1, self._num_programs), dtype=torch.float32),
            # Three counters of each layer, and one so that all addresses are multiples of 16.
            residual.new_zeros((len(self._layers), 4), dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class ChainStep:
    """The arrays of a step. See `chain_kernel`."""

    layers: Sequence["_Launch"]
    residual: torch.Tensor
    rows: torch.Tensor
    inner: torch.Tensor
    squares: torch.Tensor
    counters: torch.Tensor

    def run(
        self, layer: int, attended: torch.Tensor, kv: KVView, table_rows: torch.Tensor
    ) -> torch.Tensor:
        """All products after the attention of a layer [1, heads * head_dim].

        Returns q [1, heads, head_dim] of the next layer, and stores its k and v in `kv`. After the
        last layer, q is undefined and kv unused."""
        return self.layers[layer].run(self, attended, kv, table_rows, self.counters[layer])

    def normed(self) -> UndividedRows:
        """The norm of the residual after the last layer."""
        return UndividedRows(self.rows[1], self.squares[1], self.layers[-1].next_eps)


class _Launch:
    """The kernel of one layer."""

    def __init__(self, layer: ChainLayer, heads: Heads, num_programs: int) -> None:
        self._layer, self._heads, self._num_programs = layer, heads, num_programs
        self._out = grouped_tiles(layer.out.codes, _TILE)
        self._gate_up = halved_tiles(layer.gate_up.codes)
        self._down = grouped_tiles(layer.down.codes, _TILE)
        self._qkv = self._out  # The last layer's kernel does not use it.
        if layer.following is not None:
            self._qkv = grouped_tiles(layer.following.qkv.codes, heads.dim)

    @property
    def next_eps(self) -> float:
        return self._layer.next_norm.eps

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: for tiles, x, and the parts of sums."""
        part_bytes = 4 * _TILE * _WARPS * max(self._num_tiles.values())
        return _STAGES * _TILE_BYTES + self._chunks * _INPUTS + part_bytes

    @cached_property
    def _chunks(self) -> int:
        return -(-max(self._layer.sizes) // _INPUTS)

    @cached_property
    def _num_tiles(self) -> dict[str, int]:
        """Room for the tiles of a program."""
        hidden, _, inner = self._layer.sizes
        outputs = {"T_HIDDEN": hidden, "T_INNER": 2 * inner, "T_QKV": self._heads.num_outputs}
        per_round = _TILE * self._num_programs
        return {
            name: triton.next_power_of_2(triton.cdiv(count, per_round))
            for name, count in outputs.items()
        }

    def run(
        self,
        step: ChainStep,
        attended: torch.Tensor,
        kv: KVView,
        table_rows: torch.Tensor,
        counters: torch.Tensor,
    ) -> torch.Tensor:
        layer, following, shape = self._layer, self._layer.following, self._heads
        hidden, heads, inner = layer.sizes
        assert attended.shape == (1, heads), attended.shape
        assert attended.is_contiguous()
        kv.check()
        assert not kv.is_quantised, "an exponent needs a whole head, and programs have parts"
        q = attended.new_empty((1, shape.queries, shape.dim))
        chain_kernel[(self._num_programs,)](
            attended,
            step.residual,
            self._out,
            layer.out.scales,
            self._gate_up,
            layer.gate_up.scales,
            self._down,
            layer.down.scales,
            self._qkv,
            None if following is None else following.qkv.scales,
            None if following is None else following.bias,
            layer.norm.weight,
            layer.next_norm.weight,
            step.rows,
            step.squares,
            step.inner,
            q,
            kv.positions,
            table_rows,
            kv.tables,
            None if following is None else following.cos_sin,
            kv.k,
            kv.v,
            counters,
            layer.norm.eps,
            layer.next_norm.eps,
            kv.k.stride(0),
            kv.tables.stride(0),
            HIDDEN=hidden,
            HEADS=heads,
            INNER=inner,
            H=shape.queries,
            HKV=shape.keys,
            D=shape.dim,
            PAGE=kv.k.shape[2],
            HAS_QKV=following is not None,
            BIAS=following is not None and following.bias is not None,
            **self._num_tiles,
            X_CHUNKS=self._chunks,
            STAGES=_STAGES,
            NUM=self._num_programs,
            num_warps=_WARPS,
            launch_pdl=True,
        )
        return q


def fits_tiles(codes: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] consists of whole tiles."""
    outputs, inputs = codes.shape
    return outputs % _TILE == 0 and inputs % _SLICE == 0


def grouped_tiles(codes: torch.Tensor, size: int) -> TensorDescriptor:
    """Tiles of groups of `size` outputs: 8 of a group's first half, and 8 of its second half."""
    return _tiles(codes, len(codes) // size, size // 2)


def halved_tiles(codes: torch.Tensor) -> TensorDescriptor:
    """Tiles of 8 outputs of the first half, and 8 of the second half."""
    return _tiles(codes, 1, len(codes) // 2)


def _tiles(codes: torch.Tensor, groups: int, half: int) -> TensorDescriptor:
    """The place of a tile is [its first slice of inputs, group, 0, its first output in each half of
    the group, 0]."""
    inputs = codes.shape[1]
    assert codes.is_contiguous()
    assert fits_tiles(codes), codes.shape
    shape = [inputs // _SLICE, groups, 2, half, _SLICE]
    strides = [_SLICE, 2 * half * inputs, half * inputs, inputs, 1]
    block = [_INPUTS // _SLICE, 1, 2, _TILE // 2, _SLICE]
    return TensorDescriptor(codes, shape, strides, block, COPIED.value)
