"""Checkpoints with four bits in the formats of AWQ, GPTQ and compressed-tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.layers import FourBitLinear
from parrot.engine.models.packed import Weights
from parrot.engine.models.parallel import Part
from parrot.engine.runner.load import load_runner
from parrot.utils.config import ConfigError
from tests.support.four_bit_checkpoints import (
    FORMATS,
    Rounded,
    Tensors,
    awq,
    gptq,
    quantise_folder,
    rounded,
)
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "plain", "llama", overrides=SIZES)


def of_kind(
    plain: Path, folder: Path, kind: str, *, symmetric: bool = False
) -> tuple[Path, Tensors]:
    numbers = quantise_folder(plain, folder / "model", kind, GROUP, symmetric=symmetric)
    return folder / "model", numbers


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_loaded_numbers_equal_those_of_the_checkpoint(
    plain: Path, tmp_path: Path, kind: str, symmetric: bool
) -> None:
    folder, numbers = of_kind(plain, tmp_path, kind, symmetric=symmetric)
    checkpoint = open_checkpoint(str(folder))
    assert len(checkpoint.plans) == len(numbers)
    for name, expected in numbers.items():
        assert torch.equal(checkpoint.take(name, CPU).float(), expected), name
        matrix = checkpoint.take_packed(name, CPU)
        assert (matrix is not None) == name.endswith("proj.weight")
        if matrix is not None:
            assert torch.equal(matrix.numbers(), expected), name


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_matrices(plain: Path, tmp_path: Path, kind: str) -> None:
    folder, numbers = of_kind(plain, tmp_path, kind)
    checkpoint = open_checkpoint(str(folder))
    name = f"{UP}.weight"
    for dim, size in enumerate(numbers[name].shape):
        part = Part(dim, size // 2, size, size)
        expected = part.of(numbers[name])
        assert torch.equal(checkpoint.take(name, CPU, part), expected)
        matrix = checkpoint.take_packed(name, CPU, part)
        assert matrix is not None
        assert torch.equal(matrix.numbers(), expected)
    assert checkpoint.take_packed(name, CPU, Part(1, 0, GROUP // 2, 64)) is None, (
        "the part splits a group"
    )


def test_the_order_of_codes_in_packed_words() -> None:
    """The words must be those that the packers of AutoAWQ and AutoGPTQ write."""
    codes = np.arange(8)[:, None].repeat(8, 1)  # Output i has code i.
    one = Rounded(codes, torch.ones(8, 1).half(), np.full((8, 1), 8))
    assert awq("m", one)["m.qweight"][0].tolist() == [0x75316420]
    assert awq("m", one)["m.qzeros"].tolist() == [[-0x77777778]]  # 0x88888888
    assert gptq("m", one)["m.qzeros"].tolist() == [[0x77777777]]
    ascending = Rounded(codes.T.copy(), one.scales, one.zeros)
    assert gptq("m", ascending)["m.qweight"][:, 0].tolist() == [0x76543210]


def test_a_zero_of_0_in_gptq_borrows_from_the_next_code(plain: Path, tmp_path: Path) -> None:
    folder, numbers = of_kind(plain, tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    one = rounded(torch.rand(128, 64), GROUP, symmetric=False)
    assert not one.zeros.any()
    save_file(tensors | gptq(UP, one), folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert torch.equal(checkpoint.take(f"{UP}.weight", CPU), one.numbers())
    assert len(numbers) == len(checkpoint.plans)


def test_groups_in_another_order_are_dequantised(plain: Path, tmp_path: Path) -> None:
    folder, numbers = of_kind(plain, tmp_path, "gptq")
    path, name = folder / "model.safetensors", f"{UP}.weight"
    tensors, order = load_file(path), torch.randperm(64)
    one = rounded(numbers[name], GROUP, symmetric=False)
    shuffled = Rounded(one.codes[:, order.numpy()], one.scales, one.zeros)
    changed = gptq(UP, shuffled) | {f"{UP}.g_idx": tensors[f"{UP}.g_idx"][order]}
    save_file(tensors | changed, path)
    checkpoint = open_checkpoint(str(folder))
    assert torch.equal(checkpoint.take(name, CPU), one.numbers()[:, order])
    assert checkpoint.take_packed(name, CPU) is None
    save_file(tensors | changed | {f"{UP}.g_idx": torch.zeros(64, dtype=torch.int32)}, path)
    with pytest.raises(ConfigError, match="groups differ in size"):
        open_checkpoint(str(folder)).take(name, CPU)


@pytest.mark.parametrize(
    ("end", "changed", "message"),
    [
        ("scales", None, "it has no scales"),
        ("qzeros", torch.zeros(1, 16, dtype=torch.int32), "do not fit"),
        ("qweight", torch.zeros(64, 16, dtype=torch.int64), "packed in torch.int64"),
        ("qweight", torch.zeros(64, dtype=torch.int32), "four bits in the format awq"),
        ("qweight", torch.zeros(32, 16, dtype=torch.int32), "has shape"),
    ],
)
def test_a_damaged_matrix_is_named_in_the_error(
    plain: Path, tmp_path: Path, end: str, changed: torch.Tensor | None, message: str
) -> None:
    folder, _ = of_kind(plain, tmp_path, "awq")
    path, name = folder / "model.safetensors", f"{UP}.{end}"
    tensors = load_file(path)
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"mlp.up_proj.*{message}|{message}"):
        load_decoder(open_checkpoint(str(folder)), torch.float32, CPU)


def test_a_quantised_head_and_a_plain_matrix(plain: Path, tmp_path: Path) -> None:
    folder, numbers = of_kind(plain, tmp_path, "awq")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = rounded(torch.randn(264, 64), GROUP, symmetric=False)
    kept = {k: v for k, v in tensors.items() if not k.startswith((UP, "lm_head"))}
    save_file(kept | awq("lm_head", head) | {f"{UP}.weight": numbers[f"{UP}.weight"]}, path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 264}))
    extra = {"model.embed_tokens.weight": torch.randn(264, 64)}
    save_file(load_file(path) | extra, path)
    checkpoint = open_checkpoint(str(folder))
    assert torch.equal(checkpoint.take("lm_head.weight", CPU), head.numbers())
    assert torch.equal(checkpoint.take(f"{UP}.weight", CPU), numbers[f"{UP}.weight"])


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX512"
)
@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized"])
def test_a_cpu_multiplies_four_bits(plain: Path, tmp_path: Path, kind: str) -> None:
    folder, _ = of_kind(plain, tmp_path, kind)
    checkpoint = open_checkpoint(str(folder))
    decoder = load_decoder(checkpoint, torch.bfloat16, CPU, weights=Weights.KEPT)
    linears = [linear for layer in decoder.layers for linear in layer.linears]
    assert all(isinstance(linear, FourBitLinear) for linear in linears)


@pytest.mark.parametrize("kind", FORMATS)
def test_greedy_outputs_equal_those_of_dequantised_weights(
    plain: Path, tmp_path: Path, kind: str
) -> None:
    folder, numbers = of_kind(plain, tmp_path, kind)
    shutil.copytree(plain, tmp_path / "numbers")
    save_file(numbers, tmp_path / "numbers" / "model.safetensors", {"format": "pt"})
    found = []
    for path in (folder, tmp_path / "numbers"):
        config = BuiltinConfig(model=str(path), device="cpu", dtype="float32")
        driver = Driver(load_runner(config).runner)
        prompts = [list(range(5)), list(range(100, 140))]
        contexts = [driver.context(prompt) for prompt in prompts]
        outputs = driver.generate(contexts, 6)
        fork = driver.fork(contexts[1], 20)
        fork.tokens += [7, 8]
        found.append([*outputs, *driver.generate([fork], 4, chunk=7)])
    assert found[0] == found[1]
