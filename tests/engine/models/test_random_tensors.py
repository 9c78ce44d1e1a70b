"""Models with random weights, random quantized codes, and the modules that a model imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.parallel import Part
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tensors import is_matrix
from tests.support.gguf_models import Kind, write_gguf
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
UP, EMBED = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def test_quantised_models_get_random_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    shape = KNOWN_SHAPES["qwen3-0.6b"] | {"quantization_config": awq}
    monkeypatch.setitem(KNOWN_SHAPES, "qwen3-0.6b", shape)
    checkpoint = open_checkpoint("qwen3-0.6b", dummy=True)
    found = checkpoint.take_packed(UP)
    assert isinstance(found, CodedMatrix)
    assert found.group == 64
    numbers = found.numbers()
    assert torch.equal(checkpoint.take(UP), numbers)
    assert 0.015 < float(numbers.std()) < 0.03
    part = Part(1, 256, 512, 1024)
    half = checkpoint.take_packed(UP, CPU, part)
    assert half is not None
    assert torch.equal(half.numbers(), part.of(numbers))
    assert torch.equal(checkpoint.take(UP, CPU, part), part.of(numbers))
    assert checkpoint.take_packed(EMBED) is None
    assert is_matrix(UP)
    assert not is_matrix(EMBED)


def test_models_without_quantisation_get_random_numbers() -> None:
    checkpoint = open_checkpoint("qwen3-0.6b", dummy=True)
    assert checkpoint.take_packed(UP) is None
    assert torch.equal(checkpoint.take(UP), checkpoint.take(UP))
    assert float(checkpoint.take("model.norm.weight").std()) == 0.0


PROGRAM = """
import sys
from parrot.engine.models import fused, fused_sums, weights
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.layers import PlainLinear
import torch
for model in sys.argv[1:]:
    load_decoder(open_checkpoint(model), torch.float32, torch.device("cpu"))
weights.weight_of(PlainLinear(torch.zeros(8, 8), None))
print(*sys.modules)
"""


def test_a_model_in_plain_numbers_imports_no_products_of_other_formats(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    write_gguf(tmp_path / "model.gguf", kind=Kind.Q8_0)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "model.gguf")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ends = ("words", "words_kernels", "words_tiles", "words_weights", "fp8_weights")
    models = (*ends[3:], "four_bit_folder", "ggml_super_blocks")
    formats = {f"parrot.engine.models.{end}" for end in models}
    formats |= {f"parrot.engine.kernels.linear.{end}" for end in ends[:3]}
    assert not formats & set(done.stdout.split())
