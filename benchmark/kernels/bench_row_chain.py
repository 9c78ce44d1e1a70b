"""Time the products between two attentions as one kernel, for one row and weights in e4m3.

    python -m benchmark.kernels.bench_row_chain [--output FILE.json]

The kernel computes out, gate and up, down and the next layer's qkv. Its programs run at the same
time and meet between products. A program loads its next weights before it waits, so that the memory
is busy while others finish. It is compared with the engine's kernels, one per product, in
consecutive layers of Llama-3.1-8B without attention. The floor is the time to read the weights once
at the copy rate of an H200."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import normal
from benchmark.kernels.bench_formats import FormatLayer, in_e4m3, num_bytes, run_layers
from benchmark.kernels.layers import MODELS, Model
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.kernels.e4m3 import coded
from parrot.engine.kernels.launch import early_launch
from parrot.engine.kernels.linear.parts import add_to_residual, gated
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.layers import RMSNorm

_NUM_LAYERS = 6
_REGISTERS = 65_536  # Of a multiprocessor.
_MOST_REGISTERS = 255  # Of a thread.


@dataclass(frozen=True)
class Options:
    programs: int  # Per multiprocessor. All programs run at the same time.
    warps: int
    tile_kib: int  # Weights that a program loads ahead.

    @property
    def registers(self) -> int:
        """The most registers of a thread with which all programs fit."""
        threads = 32 * self.warps * self.programs
        return min(_MOST_REGISTERS, _REGISTERS // threads // 8 * 8)


OPTIONS = [Options(1, 8, 32), Options(1, 16, 32), Options(1, 16, 64), Options(2, 8, 32)]


@triton.jit
def _meet(counter, NUM: tl.constexpr):
    """Wait until all NUM programs have called this as often, and see what they have stored."""
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    target = (ticket // NUM + 1) * NUM
    seen = ticket + 1
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _load_tile(
    weight_ptr,
    scales_ptr,
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
):
    """BN rows of weights, and their scales; zeros after the last tile. With SILU, the first half
    are rows of the gate, and the second half those of up."""
    index = tl.arange(0, BN)
    column = tl.arange(0, BK)
    row = tile * BN + index
    inside = row < N
    if SILU:
        HALF: tl.constexpr = BN // 2
        output = tile * HALF + index % HALF
        row = output + index // HALF * N
        inside = output < N
    at = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    mask = inside[:, None] & (column < K)[None, :]
    weight = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return weight, tl.load(scales_ptr + row, mask=inside, other=0.0)


@triton.jit
def _load_row(
    x_ptr,
    squares_ptr,
    eps,
    K: tl.constexpr,
    BK: tl.constexpr,
    NUM: tl.constexpr,
    NORM: tl.constexpr,
):
    """A row in e4m3 as float32, and its power. With NORM it is divided by its root mean square."""
    column = tl.arange(0, BK)
    x = tl.load(x_ptr + column, mask=column < K, other=0.0, cache_modifier=".cg")
    if NORM:
        part = tl.arange(0, triton.next_power_of_2(NUM))
        squares = tl.load(squares_ptr + part, mask=part < NUM, other=0.0, cache_modifier=".cg")
        x = (x.to(tl.float32) * tl.rsqrt(tl.sum(squares, 0) / K + eps)).to(x.dtype)
    codes, power = coded(x)
    return codes.to(tl.float32), power


@triton.jit
def _row_sums(weight, scale, x, power):
    return tl.sum(weight.to(tl.float32) * x[None, :], 1) * (scale * power)


@triton.jit
def _add_product(
    weight,
    scale,
    x,
    power,
    weight_ptr,
    scales_ptr,
    residual_ptr,
    gain_ptr,
    rows_ptr,
    squares_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NUM: tl.constexpr,
):
    """residual += x weight^T, rows = residual * gain, and the program's sum of squares."""
    program = tl.program_id(0)
    kind = rows_ptr.dtype.element_ty
    squares = tl.full([], 0.0, tl.float32)
    for tile in tl.range(program, (N + BN - 1) // BN, NUM, num_stages=1):
        next_weight, next_scale = _load_tile(
            weight_ptr, scales_ptr, tile + NUM, N, K, BN, BK, False
        )
        output = tile * BN + tl.arange(0, BN)
        inside = output < N
        gain = tl.load(gain_ptr + output, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(residual_ptr + output, mask=inside, other=0.0, cache_modifier=".cg")
        sums = _row_sums(weight, scale, x, power)
        total, parts = add_to_residual(sums, before, residual_ptr + output, inside, kind)
        tl.store(rows_ptr + output, (total * gain).to(kind), mask=inside)
        squares += tl.sum(parts, 0)
        weight = next_weight
        scale = next_scale
    tl.store(squares_ptr + program, squares)


@triton.jit
def row_chain_kernel(
    attended_ptr,
    residual_ptr,
    out_ptr,
    out_scales_ptr,
    gate_up_ptr,
    gate_up_scales_ptr,
    down_ptr,
    down_scales_ptr,
    qkv_ptr,
    qkv_scales_ptr,
    gain_ptr,
    next_gain_ptr,
    rows_ptr,
    squares_ptr,
    hidden_ptr,
    result_ptr,
    counter,
    eps,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    QKV: tl.constexpr,
    BH: tl.constexpr,
    BQ: tl.constexpr,
    BI: tl.constexpr,
    OUT_BN: tl.constexpr,
    BN: tl.constexpr,
    DOWN_BN: tl.constexpr,
    NUM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All of NUM programs: out, gate and up, down, and qkv of the next layer, for one row.

    HIDDEN, HEADS, INNER, QKV  sizes of the residual, the heads, the MLP and the result
    BH, BQ, BI                 the next powers of two of HIDDEN, HEADS and INNER
    OUT_BN, BN, DOWN_BN        rows of weights in a tile: of out, of gate and up and of qkv, of down
    rows, squares              [2, HIDDEN] and [2, NUM], for out and down
    counter                    the number of calls of `_meet`; NUM divides it between launches"""
    program = tl.program_id(0)
    kind = rows_ptr.dtype.element_ty
    weight, scale = _load_tile(out_ptr, out_scales_ptr, program, HIDDEN, HEADS, OUT_BN, BQ, False)
    if DEPENDENT:
        gdc_wait()
    x, power = _load_row(attended_ptr, squares_ptr, eps, HEADS, BQ, NUM, False)
    _add_product(
        weight, scale, x, power, out_ptr, out_scales_ptr, residual_ptr, gain_ptr, rows_ptr,
        squares_ptr, HIDDEN, HEADS, OUT_BN, BQ, NUM,
    )  # fmt: skip
    gates, gate_scale = _load_tile(
        gate_up_ptr, gate_up_scales_ptr, program, INNER, HIDDEN, BN, BH, True
    )
    _meet(counter, NUM)
    x, power = _load_row(rows_ptr, squares_ptr, eps, HIDDEN, BH, NUM, True)
    HALF: tl.constexpr = BN // 2
    for tile in tl.range(program, (INNER + HALF - 1) // HALF, NUM, num_stages=1):
        next_gates, next_scale = _load_tile(
            gate_up_ptr, gate_up_scales_ptr, tile + NUM, INNER, HIDDEN, BN, BH, True
        )
        sums = tl.reshape(_row_sums(gates, gate_scale, x, power), [2, HALF])
        gate, up = tl.split(tl.permute(sums, (1, 0)))
        output = tile * HALF + tl.arange(0, HALF)
        tl.store(hidden_ptr + output, gated(gate, up, kind).to(kind), mask=output < INNER)
        gates = next_gates
        gate_scale = next_scale
    down, down_scale = _load_tile(
        down_ptr, down_scales_ptr, program, HIDDEN, INNER, DOWN_BN, BI, False
    )
    _meet(counter, NUM)
    inner, inner_power = _load_row(hidden_ptr, squares_ptr, eps, INNER, BI, NUM, False)
    _add_product(
        down, down_scale, inner, inner_power, down_ptr, down_scales_ptr, residual_ptr,
        next_gain_ptr, rows_ptr + HIDDEN, squares_ptr + NUM, HIDDEN, INNER, DOWN_BN, BI, NUM,
    )  # fmt: skip
    heads, heads_scale = _load_tile(qkv_ptr, qkv_scales_ptr, program, QKV, HIDDEN, BN, BH, False)
    _meet(counter, NUM)
    if DEPENDENT:
        gdc_launch_dependents()
    x, power = _load_row(rows_ptr + HIDDEN, squares_ptr + NUM, eps, HIDDEN, BH, NUM, True)
    for tile in tl.range(program, (QKV + BN - 1) // BN, NUM, num_stages=1):
        next_heads, next_heads_scale = _load_tile(
            qkv_ptr, qkv_scales_ptr, tile + NUM, QKV, HIDDEN, BN, BH, False
        )
        output = tile * BN + tl.arange(0, BN)
        sums = _row_sums(heads, heads_scale, x, power)
        tl.store(result_ptr + output, sums.to(kind), mask=output < QKV)
        heads = next_heads
        heads_scale = next_heads_scale


class Chain:
    """The kernel's launches. Owns its buffers."""

    def __init__(
        self,
        layers: Sequence[FormatLayer],
        norm: RMSNorm,
        num_programs: int,
        options: Options,
        device: torch.device,
        kind: torch.dtype = torch.bfloat16,
    ) -> None:
        first = layers[0]
        hidden, inner = first.out.num_outputs, first.gate_up.num_outputs // 2
        self._layers, self._norm = layers, norm
        self._num_programs, self._options, self._device = num_programs, options, device
        self._rows = torch.empty(2, hidden, dtype=kind, device=device)
        self._squares = torch.empty(2, num_programs, device=device)
        self._hidden = torch.empty(inner, dtype=kind, device=device)
        self._result = torch.empty(first.qkv.num_outputs, dtype=kind, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)

    def run(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """All layers after their attention. Returns the last qkv [outputs]."""
        following = [*self._layers[1:], self._layers[0]]
        for layer, after in zip(self._layers, following, strict=True):
            weights = layer.out, layer.gate_up, layer.down, after.qkv
            arrays: list[torch.Tensor] = []
            for weight in weights:
                assert isinstance(weight, Fp8Weight)
                arrays += [weight.weight, weight.scales]
            heads, hidden = layer.out.weight.shape[1], layer.out.num_outputs
            inner = layer.down.weight.shape[1]
            padded = [triton.next_power_of_2(n) for n in (hidden, heads, inner)]
            rows = [max(2, (self._options.tile_kib << 10) // n) for n in padded]
            is_cuda = self._device.type == "cuda"
            row_chain_kernel[(self._num_programs,)](
                attended,
                residual,
                *arrays,
                self._norm.weight,
                self._norm.weight,
                self._rows,
                self._squares,
                self._hidden,
                self._result,
                self._counter,
                self._norm.eps,
                HIDDEN=hidden,
                HEADS=heads,
                INNER=inner,
                QKV=after.qkv.num_outputs,
                BH=padded[0],
                BQ=padded[1],
                BI=padded[2],
                OUT_BN=rows[1],
                BN=rows[0],
                DOWN_BN=rows[2],
                NUM=self._num_programs,
                num_warps=self._options.warps,
                **({"maxnreg": self._options.registers} if is_cuda else {}),
                **early_launch(is_cuda),
            )
        return self._result


def bench(model: Model) -> Iterator[dict[str, float]]:
    layers = [FormatLayer.of(model, in_e4m3) for _ in range(_NUM_LAYERS)]
    layer_bytes = sum(map(num_bytes, layers[0].weights))
    norm = RMSNorm(normal(model.hidden, std=0.02) + 1, 1e-5)
    attended, residual = normal(1, model.heads * 128), normal(1, model.hidden)
    first = normal(1, model.hidden)
    device = torch.device("cuda")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    expected = residual.clone()
    after = layers[0].qkv(run_layers(layers, first, attended, expected, norm))
    kernels = partial(run_layers, layers, first, attended, residual.clone(), norm)
    known = {
        "floor_us": layer_bytes / MEMORY_RATE * 1e6,
        "kernels_us": time_graph(kernels, per_run=_NUM_LAYERS),
    }
    for options in OPTIONS:
        chain = Chain(layers, norm, options.programs * multiprocessors, options, device)
        found = residual.clone()
        qkv = chain.run(attended, found)
        whole = partial(chain.run, attended, residual.clone())
        yield {
            **asdict(options),
            **known,
            "chain_us": time_graph(whole, per_run=_NUM_LAYERS),
            "residual_error": float((found - expected).norm() / expected.norm()),
            "qkv_error": float((qkv - after[0]).norm() / after.norm()),
        }


def arguments(_: argparse.ArgumentParser) -> None:
    """No options."""


def measure(_: argparse.Namespace, report: Report) -> None:
    model = "Llama-3.1-8B"
    report.uses(model, asdict(MODELS[model]))
    for row in bench(MODELS[model]):
        report.add("rows", {"model": model} | row)


if __name__ == "__main__":
    run(__name__)
