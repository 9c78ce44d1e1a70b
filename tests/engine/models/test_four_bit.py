"""Weights of four bits: the formats of files, and products that use the codes without a dequantized
copy."""

from functools import reduce
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.ggml_blocks import GPU_FORMATS, CutOff, coded, dequantise
from parrot.engine.models.layers import FourBitLinear
from parrot.engine.models.packed import Weights
from parrot.engine.models.words_linear import matrix_of, words_of
from tests.support.gguf_models import Kind, random_super_blocks, write_gguf

CPU = torch.device("cpu")
KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q5_1", "F16", "F32")]
needs_kernel = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX512"
)


@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_dequantised_numbers_equal_those_of_the_gguf_package(
    kind: gguf.GGMLQuantizationType, rows: int, blocks: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed).normal(size=(rows, 32 * blocks)).astype(np.float32)
    raw = gguf.quantize(numbers, kind)
    want = gguf.dequantize(raw, kind)
    data = memoryview(bytearray(raw.tobytes() + b"after it"))
    assert torch.equal(dequantise(data, kind.value, numbers.shape), torch.from_numpy(want))
    with pytest.raises(CutOff):
        dequantise(data[:-9], kind.value, numbers.shape)
    is_coded = kind.name in ("Q4_0", "Q4_1", "Q8_0")
    assert (coded(data, kind.value, numbers.shape) is not None) == is_coded


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks(name: str) -> None:
    """The numbers equal the gguf package's. The words of a GPU are within the bound of
    `words_of`."""
    kind, rows, columns = gguf.GGMLQuantizationType[name], 9, 512
    raw = random_super_blocks(kind, (rows, columns), seed=1)
    want = torch.from_numpy(gguf.dequantize(raw, kind))
    data = memoryview(bytearray(raw.tobytes() + b"after it"))
    assert torch.equal(dequantise(data, kind.value, (rows, columns)), want)
    with pytest.raises(CutOff):
        coded(data[:-9], kind.value, (rows, columns))
    matrix = coded(data, kind.value, (rows, columns))
    assert matrix is not None
    assert GPU_FORMATS[kind.value] == CodeFormat(matrix.bits, matrix.group)
    assert torch.equal(matrix.numbers(), want)
    words = words_of(matrix)
    assert words is not None
    largest = 15 if matrix.bits == 4 else 128
    most = matrix.scales.abs() * largest + matrix.least.abs()
    bound = 2**-11 * most.repeat_interleave(matrix.group, 1)
    assert bool(((matrix_of(words).numbers() - want).abs() <= bound).all())


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    for kind, columns, block in ((Kind.Q4_K, 64, 256), (Kind.Q8_0, 16, 32)):
        with pytest.raises(ValueError, match=f"rows of {columns} numbers .* blocks of {block}"):
            dequantise(memoryview(bytearray(4096)), kind.value, (8, columns))


def test_a_product_of_matrices_in_several_types() -> None:
    """The joined matrix uses the widest codes and the smallest groups, so that it holds the numbers
    of all its parts."""
    kinds = ["Q4_K", "Q8_0", "Q6_K"]
    parts = []
    for name in kinds:
        kind = gguf.GGMLQuantizationType[name]
        raw = random_super_blocks(kind, (8, 512), seed=2)
        matrix = coded(memoryview(bytearray(raw.tobytes())), kind.value, (8, 512))
        assert matrix is not None
        parts.append(matrix)
    whole = CodedMatrix.joined(parts)
    formats = [GPU_FORMATS[gguf.GGMLQuantizationType[name].value] for name in kinds]
    assert reduce(CodeFormat.joined, formats) == CodeFormat(whole.bits, whole.group)
    assert (whole.bits, whole.group) == (8, 16)
    assert torch.equal(whole.numbers(), torch.cat([part.numbers() for part in parts]))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_words_of_a_gpu_hold_the_exact_numbers_of_a_file(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quantize(np.random.default_rng(0).normal(size=(70, 160)).astype(np.float32), kind)
    matrix = coded(memoryview(bytearray(raw.tobytes())), kind.value, (70, 160))
    assert matrix is not None
    words = words_of(matrix)
    assert words is not None
    assert words.has_least == (name == "Q4_1")
    assert torch.equal(matrix_of(words).numbers(), matrix.numbers())


def test_a_cpu_keeps_only_codes_that_its_kernel_supports(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", kind={"attn_q": Kind.Q8_0, "attn_k": Kind.Q4_1})
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert checkpoint.take_packed(name.format("q")) is None
    assert checkpoint.take_packed(name.format("k")) is not None
    assert checkpoint.gpu_format(name.format("q")) == CodeFormat(8, 32)
    assert checkpoint.gpu_format(name.format("o")) is None


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="12345"):
        dequantise(memoryview(bytearray(64)), 12345, (1, 32))


def some_matrix(rows: int, columns: int, offset: float) -> CodedMatrix:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // 32, generator=generator) * 0.02 + 0.001
    return CodedMatrix(codes, scales, scales * -offset)


@needs_kernel
@pytest.mark.parametrize("offset", [0.0, 7.5, 15.0])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (192, 96), (576, 1536)])
def test_the_kernels_weight_is_within_its_bound(rows: int, columns: int, offset: float) -> None:
    matrix = some_matrix(rows, columns, offset)
    assert FourBitLinear.takes(matrix)
    linear = FourBitLinear(matrix, None)
    with torch.inference_mode():
        eye = torch.eye(columns, dtype=torch.bfloat16)
        weight = torch.cat([linear(part) for part in eye.split(4)]).T.float()
    most = torch.maximum(matrix.least.abs(), (matrix.least + 15 * matrix.scales).abs())
    # The second term is the rounding of the output.
    bound = (most * (1 / 160 + 2**-9)).repeat_interleave(32, 1)
    assert ((weight - matrix.numbers()).abs() <= bound).all()


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 40])
def test_products_with_bias_and_residual(num_rows: int) -> None:
    matrix = some_matrix(128, 96, 7.5)
    bias, x, residual = torch.randn(128), torch.randn(num_rows, 96), torch.randn(num_rows, 128)
    want = x.bfloat16().double() @ matrix.numbers().double().T + bias.double() + residual.double()
    with torch.inference_mode():
        got = FourBitLinear(matrix, bias.bfloat16())(x.bfloat16(), residual.bfloat16())
    error = (got.double() - want).norm() / want.norm()
    assert error < 0.01


def test_shapes_that_the_kernel_does_not_support() -> None:
    assert not FourBitLinear.takes(some_matrix(96, 32, 0.0))


def log_probabilities(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Log probabilities of the next token at each position, with plain causal attention."""

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        heads = (x.transpose(0, 1) for x in (q, *(t.repeat_interleave(group, 1) for t in (k, v))))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return out.transpose(0, 1).reshape(len(q), -1)

    with torch.inference_mode():
        ids = torch.tensor(token_ids)
        hidden = model.forward(ids, torch.arange(len(ids)), attend)
        return model.logits(hidden).log_softmax(-1)


@needs_kernel
def test_the_embedded_model_predicts_nearly_the_same_with_four_bits() -> None:
    checkpoint = open_checkpoint("embedded")
    exact = load_decoder(checkpoint, torch.float32, CPU)
    rounded = load_decoder(checkpoint, torch.bfloat16, CPU)
    packed = load_decoder(checkpoint, torch.bfloat16, CPU, weights=Weights.KEPT)
    assert all(isinstance(x, FourBitLinear) for layer in packed.layers for x in layer.linears)
    assert packed.num_bytes < 1.3 * rounded.num_bytes
    divergences: dict[str, list[float]] = {"rounded": [], "packed": []}
    for first in range(0, 16, 2):
        ids = [504, 9804 + first, 314, 253 + 37 * first]
        want = log_probabilities(exact, ids)
        for name, model in (("rounded", rounded), ("packed", packed)):
            got = log_probabilities(model, ids)
            divergences[name] += (want.exp() * (want - got)).sum(-1).tolist()
    means = {name: sum(found) / len(found) for name, found in divergences.items()}
    assert means["packed"] < 1.2 * means["rounded"] < 0.006, means
    assert max(divergences["packed"]) < 0.05, means
