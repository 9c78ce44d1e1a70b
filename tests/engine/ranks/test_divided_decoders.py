"""A decoder that is divided among ranks computes the logits of the whole decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parrot.engine.models import gguf_file
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.ggml_blocks import GPU_FORMATS
from parrot.engine.models.parallel import Part, Partition, require_divisible
from parrot.engine.models.tensors import OWN, is_matrix
from parrot.engine.runner.ranks.group import RankGroup
from parrot.utils.config import ConfigError
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.gguf_models import Kind, write_gguf
from tests.support.rank_threads import on_ranks
from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

CPU = torch.device("cpu")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "opt": {"num_attention_heads": 4},
    "cohere": {"num_attention_heads": 8, "num_key_value_heads": 2, "use_qk_norm": True},
    "gemma3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gemma4": {"num_key_value_heads": 2},
    "gpt_neox": {"num_attention_heads": 4},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 2},
}


def attend_to_all(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of every row to every row. These tests need no other kind."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("family", SIZES)
def test_every_rank_computes_the_logits_of_the_whole_model(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path / "model", family, overrides=SIZES[family])
    checkpoint = open_checkpoint(str(folder))
    tokens, positions = torch.tensor([0, 258, 77, 64, 65, 130]), torch.arange(6)
    with torch.inference_mode():
        whole = load_decoder(checkpoint, torch.float32, CPU)
        want = whole.logits(whole.forward(tokens, positions, attend_to_all))

    def compute(ranks: RankGroup) -> tuple[torch.Tensor, int]:
        shard = Partition(checkpoint.spec, ranks)
        model = load_decoder(checkpoint, torch.float32, CPU, shard=shard)
        return model.logits(model.forward(tokens, positions, attend_to_all)), model.num_bytes

    for size in (2, 4):
        found = on_ranks(size, compute)
        for logits, num_bytes in found:
            torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-4)
            assert num_bytes < whole.num_bytes * (0.5 / size + 0.5)


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized"])
def test_ranks_divide_matrices_of_four_bits(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    plain = make_tiny_model(tmp_path / "plain", "llama", overrides=sizes)
    numbers = quantise_folder(plain, tmp_path / "model", kind, 32)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    tokens, positions = torch.tensor([0, 258, 77, 64, 65, 130]), torch.arange(6)
    with torch.inference_mode():
        whole = load_decoder(checkpoint, torch.float32, CPU)
        want = whole.logits(whole.forward(tokens, positions, attend_to_all))

    def compute(ranks: RankGroup) -> torch.Tensor:
        shard = Partition(checkpoint.spec, ranks)
        for name in filter(is_matrix, checkpoint.plans):
            part = shard.part(name)
            matrix = checkpoint.take_packed(name, CPU, part)
            assert part is not None
            assert isinstance(matrix, CodedMatrix)
            assert torch.equal(matrix.numbers(), part.of(numbers[name]))
        model = load_decoder(checkpoint, torch.float32, CPU, shard=shard)
        return model.logits(model.forward(tokens, positions, attend_to_all))

    for logits in on_ranks(2, compute):
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("ranks", "is_split"), [(2, False), (4, True)])
def test_ranks_divide_codes_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, is_split: bool
) -> None:
    """If a part splits a group of 32 inputs, the loader returns plain numbers instead of codes."""
    monkeypatch.setattr(gguf_file, "CPU_TYPES", GPU_FORMATS)
    sizes = {"hidden_size": 256, "intermediate_size": 64}
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q8_0, "blk": Kind.Q4_K}
    write_gguf(tmp_path / "model.gguf", kind={"attn_output": Kind.Q4_0, **kinds}, sizes=sizes)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    layer = OWN.layer.format(i=1)
    for module in (OWN.q, OWN.v, OWN.o, OWN.gate, OWN.down):
        name = f"{layer}.{module}.weight"
        for rank in range(ranks):
            size = checkpoint.plans[name].shape[module in (OWN.o, OWN.down)]
            part = Part(int(module in (OWN.o, OWN.down)), rank * size // ranks, 0, size)
            part = replace(part, stop=part.start + size // ranks)
            matrix = checkpoint.take_packed(name, CPU, part)
            assert (matrix is None) == (is_split and part.dim == 1)
            if matrix is not None:
                assert torch.equal(matrix.numbers(), checkpoint.take(name, CPU, part))
            assert torch.equal(checkpoint.take(name, CPU, part), part.of(checkpoint.take(name)))


@pytest.mark.parametrize("kind", ["embedded", "dummy"])
def test_the_parts_of_all_ranks_make_up_the_tensors(kind: str) -> None:
    """Checks a GGUF file and random weights. The GGUF file has 3 KV heads, one for each of 3
    ranks."""
    checkpoint = open_checkpoint(
        "embedded" if kind == "embedded" else "qwen3-0.6b", dummy=kind == "dummy", seed=3
    )
    size = 3 if kind == "embedded" else 4
    layer = OWN.layer.format(i=1)
    undivided = [(OWN.final_norm, None)]
    by_rows = [(f"{layer}.{name}", 0) for name in (OWN.q, OWN.k, OWN.up)]
    by_columns = [(f"{layer}.{name}", 1) for name in (OWN.o, OWN.down)]
    if kind == "embedded":
        by_rows.append((OWN.embed, 0))
    for module, dim in [*undivided, *by_rows, *by_columns]:
        name = f"{module}.weight"
        parts = [
            Partition(checkpoint.spec, RankGroup(rank, size)).part(name) for rank in range(size)
        ]
        whole = checkpoint.take(name)
        taken = [checkpoint.take(name, part=part) for part in parts]
        assert torch.equal(whole, taken[0] if dim is None else torch.cat(taken, dim))
        if dim is not None and (matrix := checkpoint.take_packed(name, CPU)) is not None:
            packed = [checkpoint.take_packed(name, CPU, part) for part in parts]
            numbers = [m.numbers() for m in packed if m is not None]
            assert torch.equal(matrix.numbers(), torch.cat(numbers, dim))


def test_a_kv_head_may_be_on_several_ranks() -> None:
    spec = open_checkpoint("qwen3-0.6b", dummy=True).spec  # It has 8 KV heads of 128.
    parts = [
        Partition(spec, RankGroup(r, 16)).part("model.layers.0.self_attn.k_proj.weight")
        for r in range(16)
    ]
    assert [part.start // 128 for part in parts if part] == [r // 2 for r in range(16)]
    assert all(part.stop - part.start == 128 for part in parts if part)


def test_a_norm_of_all_heads_is_not_divided() -> None:
    spec = spec_from_config(TINY_CONFIGS["olmo2"], "olmo")
    with pytest.raises(ConfigError, match="olmo normalises all its heads together"):
        require_divisible(spec, 2, "olmo")


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused() -> None:
    spec = open_checkpoint("embedded").spec
    require_divisible(spec, 3, "embedded")
    with pytest.raises(ConfigError, match=r"9 heads, 3 KV heads .* set it to 1, 3"):
        require_divisible(spec, 2, "embedded")
