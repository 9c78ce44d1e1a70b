"""Models with random weights, whose matrices may have random codes."""

import pytest
import torch

from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.four_bit import FourBit
from parrot.engine.models.parallel import Part
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tensors import is_matrix

CPU = torch.device("cpu")
UP, EMBED = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


def test_matrices_have_random_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    shape = KNOWN_SHAPES["qwen3-0.6b"] | {"quantization_config": awq}
    monkeypatch.setitem(KNOWN_SHAPES, "qwen3-0.6b", shape)
    checkpoint = open_checkpoint("qwen3-0.6b", dummy=True)
    found = checkpoint.take_packed(UP)
    assert isinstance(found, FourBit)
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


def test_other_models_have_numbers() -> None:
    checkpoint = open_checkpoint("qwen3-0.6b", dummy=True)
    assert checkpoint.take_packed(UP) is None
    assert torch.equal(checkpoint.take(UP), checkpoint.take(UP))
    assert float(checkpoint.take("model.norm.weight").std()) == 0.0
