"""Checkpoints with matrices in e4m3, and matrices that are rounded to e4m3 while loading."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.fp8 import Fp8Linear, Fp8Matrix
from parrot.engine.models.packed import Weights
from parrot.engine.models.parallel import Part
from parrot.engine.runner.load import load_runner
from parrot.utils.config import ConfigError
from tests.support.kernel_cases import relative_error
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def is_rounded(name: str) -> bool:
    return name.endswith("proj.weight")


def per_matrix(name: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = numbers.abs().max() / 448
    codes = (numbers / scale).to(FP8)
    return {name: codes, f"{name}_scale": scale}, codes.float() * scale


def per_row(name: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = numbers.abs().amax(1, keepdim=True) / 448
    codes = (numbers / scale).to(FP8)
    return {name: codes, f"{name}_scale": scale}, codes.float() * scale


def per_block(
    name: str, numbers: torch.Tensor, height: int = 32, width: int = 16
) -> tuple[Tensors, torch.Tensor]:
    """One scale for each block. The last blocks may be smaller."""
    rows, columns = numbers.shape
    scale = torch.rand(-(-rows // height), -(-columns // width)) + 0.01
    whole = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    codes = (numbers / whole).clamp(-448, 448).to(FP8)
    return {name: codes, f"{name}_scale_inv": scale}, codes.float() * whole


FORMATS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "per matrix": (per_matrix, {"quant_method": "fp8", "activation_scheme": "static"}),
    "per row": (per_row, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "per block": (per_block, {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    "per block of 128": (
        partial(per_block, height=128, width=128),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
}
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def make_checkpoints(folder: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint in e4m3, and a checkpoint with the same numbers in float32."""
    torch.manual_seed(0)
    sizes = WHOLE_BLOCKS if kind == "per block of 128" else {}
    rounded = make_tiny_model(folder / "rounded", "llama", overrides=sizes)
    plain = make_tiny_model(folder / "plain", "llama", overrides=sizes)
    rounds, config = FORMATS[kind]
    tensors = load_file(plain / "model.safetensors")
    codes, numbers = dict(tensors), dict(tensors)
    for name in filter(is_rounded, tensors):
        found, numbers[name] = rounds(name, tensors[name])
        codes |= found
    save_file(codes, rounded / "model.safetensors")
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    path = rounded / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return rounded, plain


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (x.transpose(0, 1) for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        )
        return found.transpose(0, 1).flatten(1)

    with torch.inference_mode():
        return decoder.logits(decoder.forward(tokens, torch.arange(len(tokens)), attend))


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_equal_those_of_transformers_on_the_same_numbers(tmp_path: Path, kind: str) -> None:
    rounded, plain = make_checkpoints(tmp_path, kind)
    decoder = load_decoder(open_checkpoint(str(rounded)), torch.float32, CPU)
    tokens = torch.arange(40) * 5
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    assert relative_error(logits_of(decoder, tokens), expected.double()) < 1e-5


@pytest.mark.parametrize("kind", ["per matrix", "per row", "per block of 128"])
def test_matrices_are_kept_in_e4m3(tmp_path: Path, kind: str) -> None:
    rounded, plain = make_checkpoints(tmp_path, kind)
    kept = load_decoder(open_checkpoint(str(rounded)), torch.float32, CPU, weights=Weights.E4M3)
    exact = load_decoder(open_checkpoint(str(plain)), torch.float32, CPU)
    numbers = load_file(plain / "model.safetensors")
    for index, layer in enumerate(kept.layers):
        prefix = f"model.layers.{index}.self_attn"
        qkv = [numbers[f"{prefix}.{x}_proj.weight"] for x in "qkv"]
        assert isinstance(layer.qkv, Fp8Linear)
        assert torch.equal(layer.qkv.matrix.numbers(), torch.cat(qkv))
        assert all(isinstance(linear, Fp8Linear) for linear in layer.linears)
    tokens = torch.arange(40) * 5
    # Only the activations are rounded, by at most 1/16 of each number.
    assert relative_error(logits_of(kept, tokens), logits_of(exact, tokens).double()) < 0.25
    assert kept.num_bytes < exact.num_bytes


def test_a_cpu_keeps_no_matrix_in_e4m3(tmp_path: Path) -> None:
    rounded, _ = make_checkpoints(tmp_path, "per row")
    checkpoint = open_checkpoint(str(rounded))
    decoder = load_decoder(checkpoint, torch.float32, CPU, weights=Weights.KEPT)
    assert not any(isinstance(x, Fp8Linear) for layer in decoder.layers for x in layer.linears)


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_matrices(tmp_path: Path, kind: str) -> None:
    rounded, plain = make_checkpoints(tmp_path, kind)
    checkpoint = open_checkpoint(str(rounded))
    numbers = load_file(plain / "model.safetensors")
    for name in filter(is_rounded, numbers):
        for dim, size in enumerate(numbers[name].shape):
            part = Part(dim, size // 2, size, size)
            expected = part.of(numbers[name])
            assert torch.equal(checkpoint.take(name, CPU, part), expected)
            packed = checkpoint.take_packed(name, CPU, part)
            assert (packed is None) == (kind == "per block")
            if packed is not None:
                assert torch.equal(packed.numbers(), expected)


def test_a_part_that_splits_a_block_is_converted(tmp_path: Path) -> None:
    rounded, _ = make_checkpoints(tmp_path, "per block of 128")
    checkpoint = open_checkpoint(str(rounded))
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.take_packed(name, CPU, Part(0, 64, 192, 512)) is None
    assert checkpoint.take_packed(name, CPU, Part(1, 128, 192, 256)) is None
    assert checkpoint.take(name, CPU, Part(0, 64, 192, 512)).shape == (128, 256)


def test_rounded_numbers_are_exact_in_bfloat16() -> None:
    numbers = torch.randn(30, 200) * torch.logspace(-8, 20, 30)[:, None]
    numbers[7] = 0
    rounded = Fp8Matrix.of(numbers).numbers()
    assert torch.equal(rounded.bfloat16().float(), rounded)
    largest = numbers.abs().amax(1, keepdim=True)
    assert bool(((rounded - numbers).abs() <= numbers.abs() / 16 + largest * 2**-17).all())


def test_a_matrix_without_scales_is_named_in_the_error(tmp_path: Path) -> None:
    rounded, _ = make_checkpoints(tmp_path, "per row")
    path, name = rounded / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != f"{name}_scale"}, path)
    with pytest.raises(ConfigError, match=f"{name}' is in e4m3 and has no"):
        load_decoder(open_checkpoint(str(rounded)), torch.float32, CPU)
    save_file(tensors | {f"{name}_scale": torch.ones(3)}, path)
    with pytest.raises(ConfigError, match=r"weight_scale' has shape \[3\] for"):
        load_decoder(open_checkpoint(str(rounded)), torch.float32, CPU)


@pytest.mark.parametrize("size", [[128], "128", [0, 128], [1.5, 2], [True, "x"]])
def test_invalid_block_sizes_are_refused(tmp_path: Path, size: Any) -> None:
    rounded, _ = make_checkpoints(tmp_path, "per block")
    path = rounded / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = size
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="weight_block_size"):
        open_checkpoint(str(rounded))


def test_a_cpu_cannot_round_to_e4m3(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = BuiltinConfig(model=str(folder), device="cpu", dtype="fp8")
    with pytest.raises(ConfigError, match="`dtype`: fp8 needs Triton and a CUDA device"):
        load_runner(config)
