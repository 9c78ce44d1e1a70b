"""All matrix products between two attentions as one kernel, for one row and quantised weights.

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
from parrot.engine.kernels.linear.chain_kernels import chain_kernel
from parrot.engine.kernels.linear.chain_tiles import (
    COPIED_CODES,
    COPIED_FACTORS,
    COPIED_WORDS,
    FACTOR_BYTES,
    SLICE,
    TILE,
    TILE_BYTES,
    WARPS,
    num_chunks,
    num_early_chunks,
    num_late_chunks,
    num_rounds,
    tile_inputs,
)
from parrot.engine.kernels.linear.products import UndividedRows
from parrot.engine.kernels.linear.words_layout import Words

_TILE, _WARPS, _SLICE = (int(size.value) for size in (TILE, WARPS, SLICE))
_TILE_BYTES, _FACTOR_BYTES = int(TILE_BYTES.value), int(FACTOR_BYTES.value)

# Shared memory of a program. A multiprocessor has 227 KiB, and a program of attention takes 35. So
# each of both can start before the other ends.
_SHARED_BYTES = 190 << 10
# Registers of a thread when a program starts. The warps that multiply then take most registers of
# the four warps to which the copying one belongs.
MAX_REGISTERS = 104
_STAGES = (5, 4, 3)  # Tiles in the ring of a program: the first number that fits.
# Halves of tiles that a program copies at the same time. With 2, the memory is not always busy.
# With 4, the loads of attention wait behind more copies. While programs wait for each other, their
# stores, counters and loads of x wait behind these copies too, so there are fewer.
_AHEAD, _AHEAD_WAITING = 3, 2


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """e4m3 codes [outputs, inputs] with scales float32 [outputs]."""

    codes: torch.Tensor
    scales: torch.Tensor


ChainWeight = CodedWeight | Words


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm with a weight [hidden]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Following:
    """qkv of the next layer [(heads + 2 kv_heads) * head_dim, hidden], and its angles."""

    qkv: ChainWeight
    bias: torch.Tensor | None
    cos_sin: torch.Tensor


@dataclass(frozen=True)
class ChainLayer:
    """The products of one layer after its attention, up to the next attention."""

    out: ChainWeight
    gate_up: ChainWeight
    down: ChainWeight
    norm: Norm  # Before gate and up.
    next_norm: Norm
    following: Following | None  # None in the last layer.

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the residual, of the heads' results and of the MLP."""
        (hidden, heads), (_, inner) = size_of(self.out), size_of(self.down)
        return hidden, heads, inner

    @property
    def has_words(self) -> bool:
        return isinstance(self.out, Words)

    @property
    def has_half_scales(self) -> bool:
        return isinstance(self.out, Words) and self.out.has_half_scales

    @property
    def kinds(self) -> set[object]:
        """The sizes and types of the weights. One kernel needs one of each."""
        following = () if self.following is None else (self.following.qkv,)
        weights = (self.out, self.gate_up, self.down, *following)
        return {(self.sizes, type(w), isinstance(w, Words) and w.has_half_scales) for w in weights}


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
        properties = torch.cuda.get_device_properties(layers[0].norm.weight.device)
        self._num_programs = properties.multi_processor_count
        self._layers = [_Launch(layer, heads, self._num_programs) for layer in layers]
        self._sizes = layers[0].sizes

    @property
    def fits(self) -> bool:
        """Whether a program's arrays fit the shared memory."""
        return self._layers[0].stages is not None

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
            # Four counters of each layer.
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
        self._out = Tiles.grouped(layer.out, _TILE)
        self._gate_up = Tiles.halved(layer.gate_up)
        self._down = Tiles.grouped(layer.down, _TILE)
        self._qkv = self._out  # The last layer's kernel does not use it.
        if layer.following is not None:
            self._qkv = Tiles.grouped(layer.following.qkv, heads.dim)

    @property
    def next_eps(self) -> float:
        return self._layer.next_norm.eps

    @cached_property
    def stages(self) -> int | None:
        """The number of tiles in a ring, or None if not enough of them fit."""
        return next((n for n in _STAGES if self._shared_bytes(n) <= _SHARED_BYTES), None)

    def _shared_bytes(self, stages: int) -> int:
        """The shared memory of a program: for tiles, x, and the parts of sums."""
        has_words = self._layer.has_words
        hidden, heads, inner = self._layer.sizes
        early, late = num_early_chunks(inner, has_words), num_late_chunks(inner, has_words)
        chunks = max(num_chunks(max(hidden, heads), has_words), early, late)
        num_inputs: int = chunks * tile_inputs(has_words)
        tile_bytes, x_bytes = _TILE_BYTES, num_inputs
        if has_words:
            tile_bytes += _FACTOR_BYTES
            x_bytes = 2 * num_inputs + 8 * num_inputs // _SLICE  # 16 bits; two numbers of a slice.
        part_bytes = 4 * _TILE * _WARPS * max(self._num_tiles.values())
        return stages * tile_bytes + x_bytes + part_bytes

    @cached_property
    def _num_tiles(self) -> dict[str, int]:
        """Room for the tiles of a program."""
        hidden, _, inner = self._layer.sizes
        num, has_words = self._num_programs, self._layer.has_words
        early_inner = num_early_chunks(inner, has_words) * tile_inputs(has_words)
        early = num_rounds(early_inner, num)
        tiles = {
            "T_HIDDEN": triton.cdiv(hidden, _TILE * num),
            "T_EARLY": early,
            "T_LATE": num_rounds(inner, num) - early,
            "T_QKV": triton.cdiv(self._heads.num_outputs, _TILE * num),
        }
        return {name: triton.next_power_of_2(max(count, 1)) for name, count in tiles.items()}

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
            self._out.codes,
            self._out.scales,
            self._gate_up.codes,
            self._gate_up.scales,
            self._down.codes,
            self._down.scales,
            self._qkv.codes,
            self._qkv.scales,
            self._out.factors,
            self._gate_up.factors,
            self._down.factors,
            self._qkv.factors,
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
            WORDS=layer.has_words,
            HALF_SCALES=layer.has_half_scales,
            STAGES=self.stages,
            AHEAD=_AHEAD,
            AHEAD_WAITING=_AHEAD_WAITING,
            NUM=self._num_programs,
            num_warps=_WARPS,
            maxnreg=MAX_REGISTERS,
            launch_pdl=True,
        )
        return q


def size_of(weight: ChainWeight) -> tuple[int, int]:
    """Outputs and inputs."""
    if isinstance(weight, Words):
        return weight.outputs, weight.inputs
    outputs, inputs = weight.codes.shape
    return outputs, inputs


def fits_tiles(weight: ChainWeight) -> bool:
    """Whether a weight consists of whole tiles. Words must have four bits in groups of 128."""
    outputs, inputs = size_of(weight)
    if isinstance(weight, Words):
        kind = weight.bits, weight.group, weight.has_least, weight.shift
        if kind != (4, _SLICE, False, 0):
            return False
    return outputs % _TILE == 0 and inputs % _SLICE == 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a weight.

    A weight has groups of outputs. A tile has 8 outputs of the first half of a group, and 8 of the
    second. Its place is [its first slice of inputs, group, 0, its first output in each half, 0]."""

    codes: TensorDescriptor
    scales: torch.Tensor | None  # Of e4m3.
    factors: TensorDescriptor | None  # Of words. They have no last dimension.

    @classmethod
    def grouped(cls, weight: ChainWeight, size: int) -> "Tiles":
        """With groups of `size` outputs."""
        return cls._of(weight, size_of(weight)[0] // size, size // 2)

    @classmethod
    def halved(cls, weight: ChainWeight) -> "Tiles":
        """With one group."""
        return cls._of(weight, 1, size_of(weight)[0] // 2)

    @classmethod
    def _of(cls, weight: ChainWeight, groups: int, half: int) -> "Tiles":
        assert fits_tiles(weight)
        if isinstance(weight, CodedWeight):
            return cls(_tiles_of_codes(weight.codes, groups, half), weight.scales, None)
        words, factors = weight.words, weight.factors
        return cls(_tiles_of_words(words, groups, half), None, _factors(factors, groups, half))


def _tiles_of_codes(codes: torch.Tensor, groups: int, half: int) -> TensorDescriptor:
    assert codes.is_contiguous()
    inputs = codes.shape[1]
    shape = [inputs // _SLICE, groups, 2, half, _SLICE]
    strides = [_SLICE, 2 * half * inputs, half * inputs, inputs, 1]
    block = [_TILE_BYTES // (2 * _TILE * _SLICE), 1, 2, _TILE // 2, _SLICE]
    return TensorDescriptor(codes, shape, strides, block, COPIED_CODES.value)


def _tiles_of_words(words: torch.Tensor, groups: int, half: int) -> TensorDescriptor:
    assert words.is_contiguous()
    blocks, outputs, width = words.shape
    shape = [blocks, groups, 2, half, width]
    strides = [outputs * width, 2 * half * width, half * width, width, 1]
    block = [_TILE_BYTES // (4 * _TILE * width), 1, 2, _TILE // 2, width]
    return TensorDescriptor(words, shape, strides, block, COPIED_WORDS.value)


def _factors(factors: torch.Tensor, groups: int, half: int) -> TensorDescriptor:
    assert factors.is_contiguous()
    blocks, outputs = factors.shape
    strides = [outputs, 2 * half, half, 1]
    block = [_FACTOR_BYTES // (4 * _TILE), 1, 2, _TILE // 2]
    return TensorDescriptor(
        factors, [blocks, groups, 2, half], strides, block, COPIED_FACTORS.value
    )
