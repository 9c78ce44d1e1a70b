"""Published configurations, in their old and new forms, give the right specs."""

import subprocess
import sys
from typing import Any

import pytest

from parrot.engine.models.families import spec_from_config
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.models.tensors import num_weights, tensor_plans


def spec_of(architecture: str, **config: Any) -> DecoderSpec:
    return spec_from_config({"architectures": [architecture], **config}, "published")


def test_gemma_3_4b_omits_defaults_and_nests_its_text_part() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of(
        "Gemma3ForConditionalGeneration",
        boi_token_index=255999,
        eos_token_id=[1, 106],
        text_config=text,
        vision_config={"hidden_size": 1152},
    )
    assert num_weights(spec) == pytest.approx(3.88e9, rel=1e-3)
    windows = [layer.attention.window for layer in spec.layers]
    assert windows[:7] == [1024, 1024, 1024, 1024, 1024, None, 1024]
    local, whole = spec.ropes
    assert (local.theta, local.kind) == (10000.0, "default")
    assert (whole.theta, whole.kind, whole.scaling["factor"]) == (1e6, "linear", 8.0)
    assert spec.attention.rule.scale == 256**-0.5
    assert spec.embed_scale == 2560**0.5
    sources = {plan.source for plan in tensor_plans(spec).values()}
    assert "model.language_model.layers.0.pre_feedforward_layernorm.weight" in sources
    assert [names.embed for names in spec.other_names] == ["language_model.model.embed_tokens"]


def test_phi_3_mini_128k_names_its_rope_scaling_su() -> None:
    factors = [1.0 + i / 100 for i in range(48)]
    spec = spec_of(
        "Phi3ForCausalLM",
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": factors, "short_factor": [1.0] * 48, "type": "su"},
        sliding_window=262144,
        vocab_size=32064,
    )
    [rope] = spec.ropes
    assert rope.scaling["factors"] == factors
    assert rope.amplitude == pytest.approx(1.1902380714238083)
    [short] = spec.for_length(4096).ropes
    assert short.scaling["factors"] == [1.0] * 48
    assert {layer.attention.window for layer in spec.layers} == {None}
    assert spec.padded().attention.head_dim == 128  # type: ignore[union-attr]


def test_qwen_2_5_with_yarn_and_disabled_windows() -> None:
    spec = spec_of(
        "Qwen2ForCausalLM",
        hidden_size=3584,
        intermediate_size=18944,
        max_position_embeddings=32768,
        max_window_layers=28,
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        rope_theta=1000000.0,
        sliding_window=131072,
        use_sliding_window=False,
        vocab_size=152064,
    )
    [rope] = spec.ropes
    assert rope.kind == "yarn"
    assert rope.amplitude == pytest.approx(1.1386294361)
    assert {layer.attention.window for layer in spec.layers} == {None}


def test_pythia_uses_old_names_of_rope_settings() -> None:
    spec = spec_of(
        "GPTNeoXForCausalLM",
        hidden_act="gelu",
        hidden_size=2048,
        intermediate_size=8192,
        layer_norm_eps=1e-05,
        max_position_embeddings=2048,
        num_attention_heads=8,
        num_hidden_layers=16,
        rotary_emb_base=10000,
        rotary_pct=0.25,
        use_parallel_residual=True,
        vocab_size=50304,
    )
    assert spec.ropes[0].rotated(spec.attention.head_dim) == 64
    assert num_weights(spec) == pytest.approx(1.011e9, rel=1e-3)


def test_command_r7b_uses_rope_only_in_windowed_layers() -> None:
    spec = spec_of(
        "Cohere2ForCausalLM",
        hidden_size=4096,
        intermediate_size=14336,
        logit_scale=0.25,
        max_position_embeddings=132096,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rope_theta=50000,
        sliding_window=4096,
        sliding_window_pattern=4,
        vocab_size=256000,
    )
    layers = [(layer.attention.window, layer.attention.rope) for layer in spec.layers]
    assert layers[:4] == [(4096, 0), (4096, 0), (4096, 0), (None, None)]
    assert spec.tie_embeddings


def test_a_family_that_is_not_loaded_is_not_imported() -> None:
    code = (
        "import sys; from parrot.engine.models.families import spec_from_config as read; "
        "read({'architectures': ['GPT2LMHeadModel'], 'vocab_size': 9, 'n_embd': 8, 'n_layer': 1, "
        "'n_head': 1}, 'x'); prefix = 'parrot.engine.models.families.'; "
        "print(sorted(n.removeprefix(prefix) for n in sys.modules if n.startswith(prefix)), "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['common',", "'gpt']", "False"]
