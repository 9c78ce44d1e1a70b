"""The kernel of `benchmark.kernels.bench_row_chain` computes what one kernel per product does."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from benchmark.kernels import bench_row_chain
from benchmark.kernels.bench_formats import FormatLayer, run_layers
from benchmark.kernels.bench_row_chain import Chain, Options
from parrot.engine.models.fp8 import Fp8Matrix
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.layers import RMSNorm
from tests.support.kernel_cases import relative_error

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or "Interpreted" not in type(bench_row_chain.row_chain_kernel).__name__,
    reason="the kernel was imported for a device; its benchmark compares the results",
)


def test_a_chain_of_products() -> None:
    """With a single program, because the interpreter runs one after the other."""
    generator = torch.Generator().manual_seed(0)
    hidden, heads, inner, qkv = 72, 96, 200, 88

    def weight(outputs: int, inputs: int) -> Fp8Weight:
        numbers = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return Fp8Weight.of(Fp8Matrix.of(numbers), None)

    layers = [
        FormatLayer(
            weight(qkv, hidden),
            weight(hidden, heads),
            weight(2 * inner, hidden),
            weight(hidden, inner),
        )
        for _ in range(2)
    ]
    norm = RMSNorm(torch.rand(hidden, generator=generator) + 0.5, 1e-5)
    first, residual = torch.randn(2, 1, hidden, generator=generator)
    attended, found = torch.randn(1, heads, generator=generator), residual.clone()
    chain = Chain(layers, norm, 1, Options(1, 8, 1), torch.device("cpu"), torch.float32)
    result = chain.run(attended, found)
    expected = layers[0].qkv(run_layers(layers, first, attended, residual, norm))
    assert relative_error(found, residual.double()) < 1e-5
    assert relative_error(result[None], expected.double()) < 1e-5
