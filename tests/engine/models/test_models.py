"""Random tiny models of every architecture against the same models in transformers, in float32."""

import copy
import functools
import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from parrot.engine.core.steps import PoolSpec
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.families import ARCHITECTURES, spec_from_config
from parrot.engine.models.parallel import Partition
from parrot.engine.models.rope import inverse_frequencies
from parrot.engine.models.spec import RopeSpec
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.runner.ranks.group import RankGroup
from parrot.utils.config import ConfigError
from tests.support.kernel_cases import SHARE_ALL
from tests.support.runner_driver import Context, Driver
from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.0}
PACKED_OF_8_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
}
PHI_ROPE = {
    "type": "longrope",
    "long_factor": [1.0, 2.5, 3.0, 5.0, 6.0, 9.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in TINY_CONFIGS),
    ("llama", {"rope_scaling": LLAMA3_ROPE}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5000.0}}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"sliding_window": 20}),
    ("mistral", {"sliding_window": 1}),
    ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 20, "mlp_bias": True}),
    ("phi3", {"rope_scaling": PHI_ROPE, "partial_rotary_factor": 0.75, "hidden_size": 96}),
    ("olmo2", {"num_key_value_heads": 6, "attention_bias": True}),
    ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    ("gemma4", {"attention_k_eq_v": False}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 32}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("qwen2", {"rope_scaling": YARN_ROPE}),
    (
        "llama",
        {"rope_scaling": YARN_ROPE | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1}},
    ),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("opt", {"activation_function": "gelu", "enable_bias": False}),
]


class LogitsRunner(ModelRunner):
    """Keeps the logits of all rows of the last step."""

    def __init__(self, shared: Decoder) -> None:
        model = copy.copy(shared)
        super().__init__(model, 256, 4, CpuOptions(gate=SHARE_ALL))
        self.last: torch.Tensor | None = None
        forward = model.forward

        def recording(*args: Any) -> torch.Tensor:
            *inputs, rows = args
            hidden = forward(*inputs)
            self.last = model.logits(hidden)
            if rows is None:
                return hidden
            wanted = forward(*inputs, rows)
            torch.testing.assert_close(wanted, hidden[rows], rtol=1e-4, atol=1e-4)
            return wanted

        model.forward = recording  # type: ignore[method-assign]


def decoder_of(folder: Path) -> Decoder:
    return load_decoder(open_checkpoint(str(folder)), torch.float32, CPU)


def build(folder: Path) -> tuple[Decoder, torch.nn.Module]:
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return decoder_of(folder), twin


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The model with this index in `VARIANTS`, in the engine and in transformers."""

    @functools.cache
    def of(index: int) -> tuple[Decoder, torch.nn.Module]:
        family, overrides = VARIANTS[index]
        folder = tmp_path_factory.mktemp(family) / "model"
        return build(make_tiny_model(folder, family, overrides=overrides))

    return of


all_variants = pytest.mark.parametrize(
    "index", range(len(VARIANTS)), ids=[f"{f}-{i}" for i, (f, _) in enumerate(VARIANTS)]
)


def twin_logits(twin: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = twin(torch.tensor([tokens])).logits[0]
    return logits


@all_variants
def test_logits_equal_those_of_transformers(variant: Callable[[int], Any], index: int) -> None:
    """Steps mix decodes with fills in odd chunks. One context is a fork of another."""
    model, twin = variant(index)
    driver = Driver(LogitsRunner(model))
    rng = random.Random(0)
    contexts = [driver.context([rng.randrange(256) for _ in range(n)]) for n in (23, 5, 90, 1)]
    want = {c.context_id: twin_logits(twin, c.tokens) for c in contexts}
    while any(c.wanted for c in contexts):
        work = [(c, min(c.wanted, rng.choice([1, 1, 3, 20]))) for c in contexts if c.wanted]
        check_step(driver, work, want)
    child = driver.fork(contexts[2], 57)
    child.tokens += [rng.randrange(256) for _ in range(9)]
    want[child.context_id] = twin_logits(twin, child.tokens)
    check_step(driver, [(child, 9)], want)


def check_step(
    driver: Driver, work: list[tuple[Context, int]], want: Mapping[int, torch.Tensor]
) -> None:
    starts = [context.done for context, _ in work]
    driver.step(work)
    assert isinstance(driver.runner, LogitsRunner)
    rows = driver.runner.last
    assert rows is not None
    row = 0
    for (context, count), start in zip(work, starts, strict=True):
        expected = want[context.context_id][start : start + count]
        torch.testing.assert_close(rows[row : row + count], expected, rtol=1e-4, atol=1e-4)
        row += count


@all_variants
def test_pooled_hidden_states_equal_those_of_transformers(
    variant: Callable[[int], Any], index: int
) -> None:
    """Some rows of each sequence are pooled, in steps with other sequences that sample."""
    model, twin = variant(index)
    driver = Driver(ModelRunner(model, 256, 4, CpuOptions(gate=SHARE_ALL)))
    rng = random.Random(0)
    contexts = [driver.context([rng.randrange(256) for _ in range(n)]) for n in (23, 5, 90, 1)]
    states = {c.context_id: twin_states(twin, c.tokens) for c in contexts}
    while work := [(c, min(c.wanted, 20)) for c in contexts if c.wanted]:
        spans = {
            c.context_id: PoolSpec(
                c.context_id, at := rng.randrange(count), rng.randint(at + 1, count)
            )
            for c, count in work
            if c is not contexts[0]
        }
        starts = {c.context_id: c.done for c, _ in work}
        result = driver.step(work, read=spans)
        assert result.read.keys() == spans.keys()
        for context_id, (_, first, stop) in spans.items():
            start = starts[context_id]
            rows = states[context_id][start + first : start + stop]
            found = np.frombuffer(result.read[context_id].unit() or b"", dtype="<f4")
            want = torch.nn.functional.normalize(rows.sum(0), dim=0)
            torch.testing.assert_close(torch.tensor(found), want, rtol=1e-4, atol=1e-5)


def twin_states(twin: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = twin(torch.tensor([tokens]), output_hidden_states=True)
    states: torch.Tensor = output.hidden_states[-1][0]
    return states


def test_every_architecture_has_a_tiny_model() -> None:
    tiny = {c["architectures"][0] for c in TINY_CONFIGS.values()}
    assert tiny | set(WITH_IMAGES) == set(ARCHITECTURES)


def test_forks_that_share_a_context_have_the_logits_of_separate_contexts(tmp_path: Path) -> None:
    """Three forks of one context run in one step. The step reads the shared KV once."""
    model, twin = build(make_tiny_model(tmp_path / "model", "llama"))
    runner = LogitsRunner(model)
    driver = Driver(runner)
    parent = driver.context(list(range(100)))
    driver.step([(parent, 100)])
    children = [driver.fork(parent, length) for length in (96, 50, 71)]
    for i, child in enumerate(children):
        child.tokens += [200 + i, 7]
    want = {c.context_id: twin_logits(twin, c.tokens) for c in children}
    check_step(driver, [(c, 1) for c in children], want)
    check_step(driver, [(c, 1) for c in children], want)
    assert runner.planner.num_shared_tokens > 100


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "llama",
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM'.* no recurrent layers; use .*huggingface.* runs .*Llama",
        ),
        ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, "it has no mixtures of experts; use"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: 8"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block"),
        ("llama", {"architectures": ["NewForCausalLM"]}, "builtin engine; use .*vLLM"),
        ("llama", {"architectures": None}, "architecture '.none.'"),
        ("llama", {"rope_scaling": {"rope_type": "axial"}}, "'axial' is not supported"),
        ("phi3", {"rope_scaling": PHI_ROPE}, "must have 4 numbers"),
        ("llama", {"hidden_act": "relu2"}, "'relu2'"),
        ("mistral", {"sliding_window": 0}, "`sliding_window` is 0"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "`layer_types` must be a list of 2"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "'bitsandbytes' are not supported.*GGUF",
        ),
        ("llama", {"quantization_config": {"quant_method": "compressed-tensors"}}, "None' are not"),
        ("llama", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 8}}, "`bits` 8 are not"),
        (
            "llama",
            {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
            "'awq' with `version` 'gemv' are not supported; the engine reads gemm",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}},
            "`checkpoint_format` 'marlin'",
        ),
        ("llama", {"quantization_config": PACKED_OF_8_BITS}, "`num_bits` 8 are not"),
        ("llama", {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 2}, "5 heads"),
        ("llama", {"hidden_size": "wide"}, "invalid literal"),
        ("opt", {"activation_function": "tanh"}, "'tanh'"),
        ("opt", {"layer_norm_elementwise_affine": False}, "elementwise"),
    ],
)
def test_models_that_cannot_run_exactly_are_refused(
    family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec_from_config(TINY_CONFIGS[family] | change, "somewhere")
    assert str(caught.value).startswith("somewhere: ")


def test_a_missing_key_is_named_in_the_error() -> None:
    config = {k: v for k, v in TINY_CONFIGS["llama"].items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match="no 'hidden_size'"):
        spec_from_config(config, "somewhere")


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("mistral", {"sliding_window": 128}, [128, 128]),
        # The model has 512 positions, so the window covers all.
        ("mistral", {"sliding_window": 4096}, [None, None]),
        ("qwen2", {"sliding_window": 128}, [None, None]),
        (
            "qwen2",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
            [None, 128],
        ),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, [None, 20]),
    ],
)
def test_the_layers_with_windows(
    family: str, change: dict[str, Any], windows: list[int | None]
) -> None:
    spec = spec_from_config(TINY_CONFIGS[family] | change, "x")
    assert [layer.attention.window for layer in spec.layers] == windows


WITH_IMAGES = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Mistral3ForConditionalGeneration": "mistral",
}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(("architecture", "family"), WITH_IMAGES.items())
def test_the_language_model_of_a_model_with_images(
    tmp_path: Path, architecture: str, family: str, prefix: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", family)
    want = LogitsRunner(decoder_of(folder))
    path = folder / "model.safetensors"
    tensors = {
        f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in load_file(path).items()
    }
    if prefix.startswith("language_model.") and "lm_head.weight" in tensors:
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file({**tensors, "vision_tower.weight": torch.zeros(3)}, path)
    text = {k: v for k, v in TINY_CONFIGS[family].items() if k != "architectures"}
    nested = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    nested["tie_word_embeddings"] = text["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(nested))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.load_tokenizer().vocab_size == text["vocab_size"]
    decoder = load_decoder(checkpoint, torch.float32, CPU)
    tokens = list(range(40))
    logits = []
    for runner in (want, LogitsRunner(decoder)):
        driver = Driver(runner)
        driver.step([(driver.context(tokens), len(tokens))])
        logits.append(runner.last)
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("phi3", {"hidden_size": 72}),
        ("stablelm", {"hidden_size": 72, "partial_rotary_factor": 0.5}),
        ("cohere", {"hidden_size": 72, "num_attention_heads": 6}),
        ("gpt2", {"n_embd": 72}),
        ("gpt_neox", {"hidden_size": 72, "rotary_pct": 0.5}),
        ("llama", {"hidden_size": 72, "attention_bias": True}),
    ],
)
def test_padded_heads_do_not_change_the_logits(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """Heads of size 12 are stored as heads of size 16, alone and divided among ranks."""
    folder = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    checkpoint = open_checkpoint(str(folder)).padded()
    assert checkpoint is not None
    assert checkpoint.spec.attention.head_dim == 16
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    driver = Driver(LogitsRunner(load_decoder(checkpoint, torch.float32, CPU)))
    context = driver.context(list(range(60)))
    want = {context.context_id: twin_logits(twin, context.tokens)}
    check_step(driver, [(context, 50)], want)
    check_step(driver, [(context, 10)], want)
    for name in checkpoint.plans:
        whole = checkpoint.take(name)
        parts = [Partition(checkpoint.spec, RankGroup(rank, 2)).part(name) for rank in range(2)]
        if parts[0] is not None and "embed" not in name and "lm_head" not in name:
            taken = [checkpoint.take(name, part=part) for part in parts]
            assert torch.equal(whole, torch.cat(taken, parts[0].dim)), name


def test_heads_with_norms_are_not_padded() -> None:
    assert spec_from_config(TINY_CONFIGS["qwen3"], "x").padded() is None


@pytest.mark.parametrize("original", [16, 256])
def test_the_frequencies_of_longrope_depend_on_the_longest_context(
    tmp_path: Path, original: int
) -> None:
    """The original length is either shorter or longer than the longest context. In both cases, the
    logits equal transformers' logits."""
    overrides = {
        "rope_scaling": PHI_ROPE,
        "partial_rotary_factor": 0.75,
        "hidden_size": 96,
        "original_max_position_embeddings": original,
        "sliding_window": None,
    }
    folder = make_tiny_model(tmp_path / "model", "phi3", overrides=overrides)
    checkpoint = open_checkpoint(str(folder)).for_length(100)
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    driver = Driver(LogitsRunner(load_decoder(checkpoint, torch.float32, CPU)))
    context = driver.context(list(range(90)))
    check_step(driver, [(context, 90)], {context.context_id: twin_logits(twin, context.tokens)})


def test_rope_factors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeSpec(10000.0), 8)
    scaled = inverse_frequencies(RopeSpec(10000.0, "factors", {"factors": [1, 2, 4, 8]}), 8)
    torch.testing.assert_close(plain / scaled, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert math.isclose(plain[1].item(), 10000 ** (-2 / 8), rel_tol=1e-6)
