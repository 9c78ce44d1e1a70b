"""Fast paths are used only if they handle every field of a model's spec."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from parrot.engine.models.families import spec_from_config
from parrot.engine.models.fused import can_fuse
from parrot.engine.models.fused_sums import can_fuse_sums
from parrot.engine.models.spec import DecoderSpec, Norms, NormSpec, is_default
from tests.support.tiny_model import TINY_CONFIGS


def llama() -> DecoderSpec:
    return spec_from_config(TINY_CONFIGS["llama"], "tiny model")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_families_with_fused_kernels(family: str) -> None:
    assert can_fuse(spec_from_config(TINY_CONFIGS[family], "tiny model"))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"final_norm": False}),
        ("model", {"position_offset": 0}),
        ("model", {"embed_dim": 32}),
        ("model", {"embed_scale": 2.0}),
        ("model", {"logit_scale": 2.0}),
        ("model", {"logit_softcap": 30.0}),
        ("model", {"norm": NormSpec("layer")}),
        ("model", {"norm": NormSpec(bias=True)}),
        ("model", {"norm": NormSpec(gain_offset=1.0)}),
        ("layer", {"norms": Norms(attn_out=True)}),
        ("layer", {"parallel": True}),
        ("layer", {"residual_scale": 0.5}),
        ("layer", {"has_output_scale": True}),
        ("attention", {"qk_norm": "heads"}),
        ("attention", {"v_norm": True}),
        ("attention", {"v_is_k": True}),
        ("attention", {"qk_norm": "width"}),
        ("mlp", {"activation": "gelu"}),
        ("mlp", {"gated": False}),
    ],
)
def test_a_field_that_kernels_do_not_handle_disables_fusion(
    part: str, change: dict[str, Any]
) -> None:
    spec = llama()
    changed = {
        "model": lambda: replace(spec, **change),
        "layer": lambda: spec.with_layer_fields(**change),
        "attention": lambda: spec.with_attention(**change),
        "mlp": lambda: spec.with_mlp(**change),
    }[part]()
    assert can_fuse(spec)
    assert not can_fuse(changed)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "glm4", "granite", "olmo2"])
def test_families_with_fused_sums(family: str) -> None:
    spec = spec_from_config(TINY_CONFIGS[family], "tiny model")
    assert can_fuse_sums(spec)
    assert not can_fuse_sums(spec.with_layer_fields(parallel=True))
    assert not can_fuse_sums(spec.with_layer_fields(norms=Norms(after_sum=True)))
    assert not can_fuse_sums(spec.with_mlp(activation="gelu"))
    assert not can_fuse_sums(replace(spec, position_offset=0))


def test_fields_that_are_not_listed_must_have_their_default() -> None:
    attention = llama().attention
    sizes = ("num_heads", "num_kv_heads", "head_dim")
    assert is_default(attention, except_for=sizes)
    assert not is_default(replace(attention, window=8), except_for=sizes)
    assert is_default(replace(attention, window=8), except_for=(*sizes, "window"))
