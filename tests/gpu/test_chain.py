"""All products between two attentions in one kernel, against float64 products of the same numbers.

Each result is compared with the one that follows from the kernel's own intermediate results, so
that a number which is rounded up instead of down has no effect."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
import torch.nn.functional as F

from parrot.engine.core.steps import PoolSpec
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.chain import (
    ChainLayer,
    ChainStep,
    ChainWeight,
    CodedWeight,
    Following,
    Heads,
    Norm,
    RowChain,
)
from parrot.engine.kernels.linear.chain_tiles import num_early_chunks, tile_inputs
from parrot.engine.kernels.linear.words import words_numbers
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.fp8 import Fp8Matrix
from parrot.engine.models.fused import FusedDecoder
from parrot.engine.models.packed import Weights
from parrot.engine.models.words_linear import words_of
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.protocol.sampling import Logprobs
from tests.support import e4m3_cases
from tests.support.e4m3_cases import random_matrix
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu
ROUNDING = 2**-7  # Of results that are rounded to bfloat16 up to three times.
PAGE = 16
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    dim: int = 128

    @property
    def shape(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.dim)

    @property
    def qkv(self) -> int:
        return self.shape.num_outputs


SIZES = {
    "8B": Sizes(4096, 32, 8, 14336),
    "13B": Sizes(5120, 40, 40, 13824),
    "small": Sizes(896, 14, 2, 4864, dim=64),
}


def coded(outputs: int, inputs: int) -> CodedWeight:
    found = random_matrix(outputs, inputs)
    return CodedWeight(found.codes, found.scales)


def words(outputs: int, inputs: int, kind: torch.dtype = torch.float16) -> Words:
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    shape = outputs, inputs // 128
    scales = (torch.rand(shape, device="cuda") + 0.5) * 0.2 * inputs**-0.5
    zeros = torch.randint(17, shape, device="cuda")
    found = words_of(CodedMatrix.with_zeros(codes, scales.to(kind), zeros))
    assert found is not None
    return found


MakeWeight = Callable[[int, int], ChainWeight]
FORMATS: dict[str, MakeWeight] = {
    "e4m3": coded,
    "four bits": words,
    "four bits, scales in bfloat16": partial(words, kind=torch.bfloat16),
}


def norm(size: int, eps: float = EPS) -> Norm:
    return Norm((torch.rand(size, device="cuda") + 0.5).bfloat16(), eps)


def layer(sizes: Sizes, weight: MakeWeight = coded, *, bias: bool = True) -> ChainLayer:
    angles = torch.rand(64, sizes.dim, device="cuda")
    return ChainLayer(
        out=weight(sizes.hidden, sizes.heads * sizes.dim),
        gate_up=weight(2 * sizes.inner, sizes.hidden),
        down=weight(sizes.hidden, sizes.inner),
        norm=norm(sizes.hidden),
        next_norm=norm(sizes.hidden, 3e-4),
        following=Following(
            weight(sizes.qkv, sizes.hidden),
            torch.randn(sizes.qkv, device="cuda").bfloat16() if bias else None,
            angles,
        ),
    )


def product(x: torch.Tensor, matrix: ChainWeight) -> torch.Tensor:
    if isinstance(matrix, CodedWeight):
        return e4m3_cases.product(x, Fp8Matrix(matrix.codes, matrix.scales))
    return x.double() @ words_numbers(matrix, torch.float32).double().T


def product_of_parts(x: torch.Tensor, matrix: ChainWeight) -> torch.Tensor:
    """down: the early and the late part of x are rounded to e4m3 separately."""
    has_words = isinstance(matrix, Words)
    chunks: int = num_early_chunks(x.shape[1], has_words)
    first: int = chunks * tile_inputs(has_words)
    early, late = x.clone(), x.clone()
    early[:, first:] = 0
    late[:, :first] = 0
    return product(early, matrix) + product(late, matrix)


def product_of_norm(
    rows: torch.Tensor, squares: torch.Tensor, eps: float, matrix: ChainWeight
) -> torch.Tensor:
    """The product with rows that are divided by their root mean squares.

    Rows are rounded to bfloat16 after the division if they are rounded to e4m3 next."""
    factor = torch.rsqrt(squares[: len(rows)].sum(1, keepdim=True) / rows.shape[1] + eps)
    if isinstance(matrix, CodedWeight):
        return product((rows.float() * factor).bfloat16(), matrix)
    return product(rows, matrix) * factor.double()


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor | None = None
) -> None:
    """`size`: of the numbers that are rounded to bfloat16; None for `expected`."""
    largest = expected.abs().amax(-1, keepdim=True)
    bound = ROUNDING * (expected if size is None else size).abs() + 2**-12 * largest
    error = (found.double() - expected).abs() / bound
    assert bool((error <= 1).all()), error.max()


def pool(sizes: Sizes) -> tuple[KVView, torch.Tensor]:
    """Pages of zeros, block tables, a row's position and its table."""
    k, v = torch.zeros(2, 16, sizes.kv_heads, PAGE, sizes.dim, device="cuda").bfloat16()
    tables = torch.randperm(16, device="cuda").int().view(4, 4)
    positions = torch.randint(0, 63, (1,), device="cuda").int()
    return KVView(k, v, tables, positions), torch.tensor([2], device="cuda").int()


def check_out_gate_and_up(
    step: ChainStep, weights: ChainLayer, attended: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """Returns the residual after out."""
    total = before.double() + product(attended, weights.out)
    assert_close(step.rows[0], total * weights.norm.weight.double())
    torch.testing.assert_close(
        step.squares[0].sum(1), total.square().sum(1).float(), rtol=0.01, atol=0
    )
    both = product_of_norm(step.rows[0], step.squares[0], EPS, weights.gate_up)
    gate, up = both.bfloat16().double().chunk(2, dim=1)
    # gate and up may both be rounded to the other side.
    assert_close(step.inner, F.silu(gate) * up, 2 * gate * up)
    return total


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer(name: str, kind: str) -> None:
    sizes = SIZES[name]
    weights = layer(sizes, FORMATS[kind], bias=name != "13B")
    chain = RowChain([weights], sizes.shape)
    assert chain.fits
    attended = torch.randn(1, sizes.heads * sizes.dim, device="cuda").bfloat16()
    before = torch.randn(1, sizes.hidden, device="cuda").bfloat16()
    residual = before.clone()
    kv, table_rows = pool(sizes)
    step = chain.start(residual)
    q = step.run(0, attended, kv, table_rows)
    total = check_out_gate_and_up(step, weights, attended, before)
    down = product_of_parts(step.inner, weights.down)
    assert_close(residual, total + down, total.abs() + down.abs())
    assert_close(step.rows[1], residual.double() * weights.next_norm.weight.double())
    following = weights.following
    assert following is not None
    qkv = product_of_norm(step.rows[1], step.squares[1], 3e-4, following.qkv)
    if following.bias is not None:
        qkv += following.bias.double()
    heads = qkv.bfloat16().double().view(1, -1, sizes.dim)
    angles = following.cos_sin[kv.positions.long()].double()[:, None]
    cos, sin = angles.chunk(2, dim=2)
    first, second = heads.chunk(2, dim=2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), 2)
    both = (first.abs() + second.abs()).repeat(1, 1, 2)
    assert_close(
        q.flatten(1), turned[:, : sizes.heads].flatten(1), both[:, : sizes.heads].flatten(1)
    )
    pages = kv.tables[table_rows.long(), kv.positions.long() // PAGE].long()
    places = kv.positions.long() % PAGE
    last = sizes.heads + sizes.kv_heads
    stored, keys = kv.k[pages, :, places], slice(sizes.heads, last)
    assert_close(stored.flatten(1), turned[:, keys].flatten(1), both[:, keys].flatten(1))
    assert_close(kv.v[pages, :, places].flatten(1), heads[:, last:].flatten(1))
    kv.k[pages, :, places] = 0
    kv.v[pages, :, places] = 0
    assert not kv.k.any()
    assert not kv.v.any()


def test_the_last_layer_has_no_qkv() -> None:
    sizes = SIZES["small"]
    weights = [layer(sizes), replace(layer(sizes), following=None)]
    chain = RowChain(weights, sizes.shape)
    attended = torch.randn(1, sizes.heads * sizes.dim, device="cuda").bfloat16()
    before = torch.randn(1, sizes.hidden, device="cuda").bfloat16()
    residual = before.clone()
    step = chain.start(residual)
    kv, table_rows = pool(sizes)
    step.run(1, attended, kv, table_rows)
    total = check_out_gate_and_up(step, weights[1], attended, before)
    down = product_of_parts(step.inner, weights[1].down)
    assert_close(residual, total + down, total.abs() + down.abs())
    assert not kv.k.any()
    found = step.normed()
    assert torch.equal(found.rows, step.rows[1])
    torch.testing.assert_close(
        found.squares.sum(1), residual.float().square().sum(1), rtol=1e-3, atol=0
    )


def test_padding_is_not_stored() -> None:
    sizes = SIZES["small"]
    chain = RowChain([layer(sizes)], sizes.shape)
    attended = torch.randn(1, sizes.heads * sizes.dim, device="cuda").bfloat16()
    kv, table_rows = pool(sizes)
    step = chain.start(torch.randn(1, sizes.hidden, device="cuda").bfloat16())
    step.run(0, attended, kv, table_rows - 3)
    torch.cuda.synchronize()
    assert not kv.k.any()
    assert not kv.v.any()


def test_numbers_that_are_not_finite_stay_so() -> None:
    sizes = SIZES["small"]
    chain = RowChain([layer(sizes)], sizes.shape)
    attended = torch.randn(1, sizes.heads * sizes.dim, device="cuda").bfloat16()
    attended[0, 3] = float("nan")
    residual = torch.randn(1, sizes.hidden, device="cuda").bfloat16()
    kv, table_rows = pool(sizes)
    q = chain.start(residual).run(0, attended, kv, table_rows)
    assert residual.isnan().all()
    assert q.isnan().all()


@pytest.mark.parametrize("kind", ["e4m3", "four bits"])
def test_many_steps_give_the_same_result(kind: str) -> None:
    """Programs that would not wait for each other would read old numbers."""
    sizes = SIZES["8B"]
    chain = RowChain([layer(sizes, FORMATS[kind]) for _ in range(3)], sizes.shape)
    attended = torch.randn(1, sizes.heads * sizes.dim, device="cuda").bfloat16()
    before = torch.randn(1, sizes.hidden, device="cuda").bfloat16()
    kv, table_rows = pool(sizes)

    def run() -> torch.Tensor:
        residual = before.clone()
        step = chain.start(residual)
        for index in range(3):
            q = step.run(index, attended, kv, table_rows)
        return torch.cat((residual.flatten(), q.flatten()))

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(200):
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("form", ["e4m3", "four bits"])
def test_hidden_states_equal_those_of_one_kernel_per_product(
    family: str, form: str, tmp_path: Path
) -> None:
    """Steps of one row, in graphs and eagerly, after a prompt."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 640}
    folder, weights = make_tiny_model(tmp_path / family, family, overrides=sizes), Weights.E4M3
    if form == "four bits":
        quantise_folder(folder, tmp_path / form, "awq", group=128)
        folder, weights = tmp_path / form, Weights.KEPT
    checkpoint = open_checkpoint(str(folder))
    tokens = random.Random(0).choices(range(250), k=40)
    found = []
    for is_chained in (True, False):
        device = torch.device("cuda")
        model = load_decoder(checkpoint, torch.bfloat16, device, weights=weights)
        runner = CudaRunner(model, 64, 64, CudaOptions(max_rows=4))
        forward = runner.computer._forward
        assert isinstance(forward, FusedDecoder)
        assert forward._chain is not None
        if not is_chained:
            forward._chain = None
        runner.warm_up()
        driver = Driver(runner)
        context = driver.context(tokens[:33])
        driver.step([(context, 33)])
        generated = []
        for token in tokens[33:]:  # In graphs: the next token is known, whatever was sampled.
            context.tokens.append(token)
            generated.append(driver.step([(context, 1)]).tokens[context.context_id])
        states = []
        for token in tokens:  # Reading hidden states is eager.
            context.tokens.append(token)
            spec = PoolSpec(context.context_id, 0, 1)
            result = driver.step([(context, 1)], read={context.context_id: spec})
            read = result.read[context.context_id]
            assert not isinstance(read, Logprobs)
            states.append(np.frombuffer(read.unit() or b"", dtype="<f4"))
        found.append((generated, np.stack(states)))
    (generated, result_states), (expected_tokens, expected) = found
    error = np.linalg.norm(result_states - expected) / np.linalg.norm(expected)
    assert error < 0.02, error
    same = sum(map(int.__eq__, generated, expected_tokens))
    assert same >= len(generated) - 1, (generated, expected_tokens)
