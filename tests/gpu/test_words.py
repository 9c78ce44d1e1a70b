"""Products with coded weights on the device, and models with such weights."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from parrot.engine.config import BuiltinConfig
from parrot.engine.kernels.linear.words import words_linear, words_numbers
from parrot.engine.models.checkpoint import Checkpoint, load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.forward import make_forward
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.packed import Head
from parrot.engine.models.tensors import head_name
from parrot.engine.models.words_linear import WordsLinear, matrix_of, words_of
from parrot.engine.models.words_weights import WordsWeight, words_product
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.gguf_models import Kind, untie, write_gguf
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu
ROUNDING = 2**-8  # The rounding error of bfloat16.
SIZES = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8}


def matrix(outputs: int, inputs: int, group: int, kind: torch.dtype = torch.float16) -> CodedMatrix:
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    shape = outputs, inputs // group
    scales = (torch.rand(shape, device="cuda") + 0.5) * 0.2 * inputs**-0.5
    return CodedMatrix.with_zeros(codes, scales.to(kind), torch.randint(17, shape, device="cuda"))


def assert_close(found: torch.Tensor, expected: torch.Tensor, inputs: int) -> None:
    # A float32 sum of exact products.
    largest = expected.abs().amax(1, keepdim=True)
    bound = ROUNDING * expected.abs() + 2**-22 * inputs**0.5 * largest + 2**-14 * largest
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), (error / bound).max()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 2080)])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64, 65, 300, 600])
def test_products(outputs: int, inputs: int, rows: int, group: int) -> None:
    if inputs % group:
        pytest.skip("the inputs are not whole groups")
    whole = matrix(outputs, inputs, group)
    words = words_of(whole)
    assert words is not None
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ whole.numbers().double().T
    out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=x.dtype)
    assert_close(words_linear(x, words, out), expected, inputs)
    found = words_product(x, words, None).double()
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 0.004, "products of many rows use bfloat16 weights"


# Each tuple is (bits, group size, has offsets). In order: Q8_0, Q6_K, Q4_1 or Q4_K, Q5_K, and a
# product of Q6_K and Q4_K.
OTHERS = [(8, 32, False), (8, 16, False), (4, 32, True), (8, 32, True), (8, 16, True)]


def other_matrix(bits: int, outputs: int, inputs: int, group: int, has_least: bool) -> CodedMatrix:
    limits, kind = ((0, 16), torch.uint8) if bits == 4 else ((-128, 128), torch.int8)
    codes = torch.randint(*limits, (outputs, inputs), device="cuda").to(kind)
    shape = outputs, inputs // group
    scales = (torch.rand(shape, device="cuda") + 0.5) * 2**-bits * inputs**-0.5
    least = torch.randn(shape, device="cuda") * inputs**-0.5
    least = least.half().float() if has_least else torch.zeros_like(least)
    return CodedMatrix(codes, scales.half().float(), least)


@pytest.mark.parametrize(("bits", "group", "has_least"), OTHERS)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 2080)])
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 65, 300, 600])
def test_products_of_other_codes(
    outputs: int, inputs: int, rows: int, bits: int, group: int, has_least: bool
) -> None:
    whole = other_matrix(bits, outputs, inputs, group, has_least)
    words = words_of(whole)
    assert words is not None
    assert words.has_least == has_least
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ whole.numbers().double().T
    out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=x.dtype)
    assert_close(words_linear(x, words, out), expected, inputs)
    assert torch.equal(words_numbers(words, torch.float32), whole.numbers())
    found = words_product(x, words, None).double()
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 0.004, "products of many rows use bfloat16 weights"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_types(kind: torch.dtype, dtype: torch.dtype) -> None:
    whole = matrix(256, 512, 64, kind)
    words = words_of(whole)
    assert words is not None
    assert torch.equal(matrix_of(words).numbers(), whole.numbers())
    assert torch.equal(words_numbers(words, torch.float32), whole.numbers())
    x = torch.randn(5, 512, device="cuda", dtype=dtype)
    out = torch.full((5, 256), float("nan"), device="cuda", dtype=dtype)
    expected = x.double() @ whole.numbers().double().T
    assert_close(words_linear(x, words, out), expected, 512)


@pytest.mark.parametrize("other", [None, *OTHERS])
@pytest.mark.parametrize("rows", [1, 4, 20, 64, 300])
def test_a_layer_of_products(rows: int, other: tuple[int, int, bool] | None) -> None:
    hidden, inner = 4096, 14336
    matrices = matrix(2 * inner, hidden, 128), matrix(hidden, inner, 128)
    if other is not None:
        bits, group, has_least = other
        shapes = [whole.codes.shape for whole in matrices]
        first, second = (other_matrix(bits, *shape, group, has_least) for shape in shapes)
        matrices = first, second
    x, residual = torch.randn(2, rows, hidden, device="cuda").bfloat16()
    gain, before = torch.rand(hidden, device="cuda").bfloat16() + 0.5, residual.double()
    weights = []
    for whole in matrices:
        words = words_of(whole)
        assert words is not None
        weights.append(WordsWeight.of(words, None))
    middle = weights[0].gated(x, for_e4m3=False)
    weights[1].add_and_norm(middle, residual, RMSNorm(gain, 1e-5), for_e4m3=False)
    gate, up = (x.double() @ matrices[0].numbers().double().T).split(inner, dim=1)
    error = (middle.double() - F.silu(gate) * up).norm() / (F.silu(gate) * up).norm()
    assert float(error) < 0.01
    expected = before + middle.double() @ matrices[1].numbers().double().T
    error = (residual.double() - expected).norm() / expected.norm()
    assert float(error) < 0.004


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized"])
def test_greedy_tokens_of_four_bit_and_bfloat16_weights_are_nearly_equal(
    tmp_path: Path, kind: str, group: int
) -> None:
    """Decodes run in graphs, for one sequence and for several, at once and in chunks."""
    plain = make_tiny_model(tmp_path / "plain", "llama", overrides=SIZES)
    quantise_folder(plain, tmp_path / "model", kind, group)
    packed, packed_memory = outputs(tmp_path / "model", "auto")
    numbers, memory = outputs(tmp_path / "model", "bfloat16")
    assert packed_memory < 0.6 * memory
    pairs = list(zip(packed, numbers, strict=True))
    same = sum(ours[:4] == theirs[:4] for ours, theirs in pairs)
    assert same >= len(pairs) - 2, pairs


@pytest.mark.parametrize(
    "kinds",
    [
        {"blk": Kind.Q8_0},
        {"blk": Kind.Q4_1},
        {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "blk": Kind.Q4_K},
    ],
    ids=str,
)
def test_greedy_tokens_of_gguf_files(tmp_path: Path, kinds: dict[str, Kind]) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 128}
    write_gguf(tmp_path / "model.gguf", kind=kinds, sizes=sizes)
    tokenizer = str(tmp_path / "twin")
    packed, packed_memory = outputs(tmp_path / "model.gguf", "auto", tokenizer)
    numbers, memory = outputs(tmp_path / "model.gguf", "bfloat16", tokenizer)
    assert packed_memory < 0.65 * memory
    pairs = list(zip(packed, numbers, strict=True))
    same = sum(ours[:4] == theirs[:4] for ours, theirs in pairs)
    assert same >= len(pairs) - 2, pairs


def with_head(folder: Path, head: str) -> Checkpoint:
    """A model with a tied or an untied head, or a GGUF file with a head of this type."""
    if head not in ("tied", "untied"):
        path = folder / "model.gguf"
        write_gguf(path, change=untie, kind={"output.weight": Kind[head]}, sizes=HEAD_SIZES)
        return open_checkpoint(str(path))
    overrides = SIZES | {"tie_word_embeddings": head == "tied"}
    return open_checkpoint(str(make_tiny_model(folder, "llama", overrides=overrides)))


HEAD_SIZES = {"hidden_size": 512, "intermediate_size": 768, "head_dim": 256}


@torch.inference_mode()
@pytest.mark.parametrize("head", ["tied", "untied", "Q8_0", "Q6_K"])
def test_logits_of_a_head_in_codes(tmp_path: Path, head: str) -> None:
    """The logits are the products with the rounded numbers, for few rows and for many."""
    checkpoint, device = with_head(tmp_path / "model", head), torch.device("cuda")
    kind = Head.INT8 if head in ("tied", "untied") else Head.KEPT
    model = load_decoder(checkpoint, torch.bfloat16, device, head=kind)
    assert isinstance(model.lm_head, WordsLinear)
    numbers = matrix_of(model.lm_head.matrix).numbers().double()
    stored = checkpoint.take(head_name(checkpoint.spec), device).double()
    assert float((numbers - stored).norm() / stored.norm()) < 0.01
    forward = make_forward(model, 128)
    for rows in (1, 8, 64, 65, 200):
        x = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
        expected = x.double() @ numbers.T
        for found in (model.head(x), forward.head(x)):
            assert float((found.double() - expected).norm() / expected.norm()) < 0.004, rows


@pytest.mark.parametrize("is_tied", [False, True])
def test_greedy_tokens_with_a_head_of_eight_bits(tmp_path: Path, is_tied: bool) -> None:
    """A model whose head has the rounded numbers generates nearly the same tokens."""
    overrides = SIZES | {"tie_word_embeddings": is_tied}
    folder = make_tiny_model(tmp_path / "model", "llama", overrides=overrides)
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    tensors["lm_head.weight"] = CodedMatrix.rounded(tensors[name]).numbers()
    twin = shutil.copytree(folder, tmp_path / "twin")
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    found, _ = outputs(folder, "auto", counts=(1, 8, 64, 200), head_dtype="int8")
    expected, _ = outputs(twin, "auto", counts=(1, 8, 64, 200))
    pairs = list(zip(found, expected, strict=True))
    same = sum(ours[:2] == theirs[:2] for ours, theirs in pairs)
    assert same >= 0.95 * len(pairs), pairs


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q6_K])
def test_an_untied_head_of_a_gguf_file_stays_in_codes(tmp_path: Path, kind: Kind) -> None:
    path, tokenizer = tmp_path / "model.gguf", str(tmp_path / "twin")
    write_gguf(path, change=untie, kind={"output.weight": kind}, sizes=HEAD_SIZES)
    packed, packed_memory = outputs(path, "auto", tokenizer)
    numbers, memory = outputs(path, "bfloat16", tokenizer)
    assert packed_memory < memory
    pairs = list(zip(packed, numbers, strict=True))
    same = sum(ours[:4] == theirs[:4] for ours, theirs in pairs)
    assert same >= len(pairs) - 2, pairs


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


def outputs(
    model: Path, dtype: str, tokenizer: str = "", counts: tuple[int, ...] = (), **instance: str
) -> tuple[list[list[int]], float]:
    """Greedy outputs, and the size of the weights in MiB. `counts`: of sequences in a step."""
    config: dict[str, Any] = {"model": str(model), "device": "cuda", "dtype": dtype}
    config |= {"tokenizer": tokenizer, "instance": {"num_kv_cache_blocks": 512} | instance}
    runner = load_runner(BuiltinConfig.model_validate(config))[0]
    assert isinstance(runner, CudaRunner)
    driver, found = Driver(runner), []
    for prompts, chunk in ((random_prompts(5), None), (random_prompts(5, 35, 170), None),
                           (random_prompts(90, 170), 33)):  # fmt: skip
        found += driver.generate([driver.context(p) for p in prompts], 12, chunk)
    for count in counts:
        prompts = random_prompts(*[5] * count)
        found += driver.generate([driver.context(prompt) for prompt in prompts], 4)
    return found, runner.info.model_mem
