"""The huggingface engine's runner against transformers' own `generate`, on tiny random models."""

import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers

from parrot.engine.config import HuggingFaceConfig
from parrot.engine.core.steps import BlockCopy, SampleSpec, SequenceStep, StepPlan
from parrot.engine.huggingface import HuggingFaceRunner, load_runner
from parrot.protocol.errors import ModelNumerics
from parrot.protocol.sampling import ResolvedSampling
from parrot.utils.config import ConfigError

BLOCK_SIZE = 4
NUM_BLOCKS = 64
GREEDY = ResolvedSampling(temperature=0)
PROMPTS = [[5, 9, 30, 2, 77], [1], [44, 3, 8, 60, 12, 99, 31, 7, 23], [8, 8]]
COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GQA = {**COMMON, "num_key_value_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "qwen3": {**GQA, "head_dim": 16},
    "mistral": {**GQA, "sliding_window": 5, "head_dim": 8},
    "gemma2": {**GQA, "sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_neox": COMMON,
    "gpt2": {
        **{k: COMMON[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")},
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    },
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {**COMMON, "n_layer": 2, "n_head": 4},
    "phimoe": {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@cache
def tiny_model(kind: str) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **OWN[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # With larger weights, the most probable token changes from step to step.
            parameter.data.mul_(4)
    return model


def make_runner(model: Any) -> HuggingFaceRunner:
    return HuggingFaceRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_seq_len=64)


def expected(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


class Sequences:
    """Runs several contexts through a runner, each with its own blocks."""

    def __init__(self, runner: HuggingFaceRunner, prompts: Sequence[Sequence[int]]) -> None:
        self.runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        share = NUM_BLOCKS // (len(prompts) + 1)
        self.blocks = [list(range(i * share, (i + 1) * share)) for i in range(len(prompts))]

    def step(self, chunk: int = 1000) -> None:
        """Compute at most `chunk` tokens of each sequence. Sample after the last token."""
        steps = []
        for i, tokens in enumerate(self.tokens):
            end = min(len(tokens), self.done[i] + chunk)
            spec = SampleSpec(i, GREEDY, 0, 0) if end == len(tokens) else None
            piece = tokens[self.done[i] : end]
            steps.append(SequenceStep(i, piece, self.done[i], self.blocks[i], spec))
            self.done[i] = end
        result = self.runner.run(StepPlan(tuple(steps)))
        assert not result.errors
        for i, token in result.tokens.items():
            self.tokens[i].append(token)


@pytest.mark.parametrize("kind", OWN)
def test_greedy_output_equals_that_of_generate(kind: str) -> None:
    model = tiny_model(kind)
    runner = make_runner(model)
    want = [expected(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in want}) > 1, (
        "the test needs prompts with different outputs"
    )
    for chunk, num_steps in ((1000, 12), (2, 16)):
        together = Sequences(runner, PROMPTS)
        for _ in range(num_steps):
            together.step(chunk)
        for prompt, tokens, wanted in zip(PROMPTS, together.tokens, want, strict=True):
            assert tokens[len(prompt) : len(prompt) + 12] == wanted
    for prompt, wanted in zip(PROMPTS, want, strict=True):
        alone = Sequences(runner, [prompt])
        for _ in range(12):
            alone.step()
        assert alone.tokens[0][len(prompt) :] == wanted


def takes_past_key_values(
    self: Any, input_ids: Any, past_key_values: Any = None, **rest: Any
) -> Any:
    return self.original(input_ids, **{self.parameter: past_key_values}, **rest)


def takes_cache(self: Any, input_ids: Any, cache: Any = None, **rest: Any) -> Any:
    return self.original(input_ids, **{self.parameter: cache}, **rest)


@pytest.mark.parametrize("forward", [takes_past_key_values, takes_cache])
def test_the_cache_is_passed_under_the_name_that_forward_accepts(
    forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers names the parameter `past_key_values` until 5.23 and `cache` from 5.24 on."""
    model = tiny_model("llama")
    want = expected(model, PROMPTS[0], 6)
    accepted = inspect.signature(model.forward).parameters
    monkeypatch.setattr(model, "original", model.forward, raising=False)
    monkeypatch.setattr(
        model, "parameter", "cache" if "cache" in accepted else "past_key_values", raising=False
    )
    monkeypatch.setattr(model, "forward", MethodType(forward, model), raising=False)
    sequences = Sequences(make_runner(model), [PROMPTS[0]])
    for _ in range(6):
        sequences.step()
    assert sequences.tokens[0][len(PROMPTS[0]) :] == want


@pytest.mark.parametrize("kind", ["llama", "mistral", "bloom"])
def test_a_fork_shares_full_blocks_and_copies_the_last(kind: str) -> None:
    model = tiny_model(kind)
    parent = Sequences(make_runner(model), [PROMPTS[2]])
    for _ in range(4):
        parent.step()
    source, num_shared = parent.blocks[0], 6
    fork = Sequences(parent.runner, [[*parent.tokens[0][:num_shared], 50, 51]])
    fork.blocks = [[source[0], NUM_BLOCKS - 1, NUM_BLOCKS - 2, NUM_BLOCKS - 3]]
    parent.runner.run(StepPlan((), (BlockCopy(source[1], NUM_BLOCKS - 1, 2),)))
    prompt = list(fork.tokens[0])
    fork.done = [num_shared]
    for _ in range(6):
        fork.step()
        parent.step()
    assert fork.tokens[0][8:] == expected(model, prompt, 6)
    assert parent.tokens[0][9:] == expected(model, PROMPTS[2], 10)


def test_sampling_is_reproducible_and_independent_of_the_batch() -> None:
    runner = make_runner(tiny_model("llama"))
    config = ResolvedSampling(temperature=2.0, top_p=0.9)

    def sampled(rows: int) -> list[int]:
        steps = [
            SequenceStep(i, PROMPTS[0], 0, [2 * i, 2 * i + 1], SampleSpec(i, config, 40 + i, 3))
            for i in range(rows)
        ]
        tokens = runner.run(StepPlan(tuple(steps))).tokens
        return [tokens[i] for i in range(rows)]

    assert sampled(20)[:5] == sampled(5) == sampled(5)
    assert len(set(sampled(20))) > 1


def test_a_sequence_with_broken_logits_does_not_affect_the_others() -> None:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model("llama", **GQA)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.get_input_embeddings().weight.data[100] = float("nan")
    runner = make_runner(model)
    steps = [
        SequenceStep(i, tokens, 0, [i], SampleSpec(i, GREEDY, 0, 0))
        for i, tokens in enumerate([[5, 6], [100, 6], [7, 8]])
    ]
    result = runner.run(StepPlan(tuple(steps)))
    assert result.tokens.keys() == {0, 2}
    assert isinstance(result.errors[1], ModelNumerics)
    # This sequence uses the block that contained NaN.
    again = SequenceStep(3, [5], 0, [1], SampleSpec(3, GREEDY, 0, 0))
    longer = SequenceStep(0, [9], 2, [0], SampleSpec(0, GREEDY, 0, 0))
    assert runner.run(StepPlan((again, longer))).tokens.keys() == {0, 3}


def test_the_runner_reports_its_sizes() -> None:
    info = make_runner(tiny_model("llama")).info
    assert (info.num_blocks, info.block_size, info.vocab_size) == (NUM_BLOCKS, BLOCK_SIZE, 101)
    slots = NUM_BLOCKS * BLOCK_SIZE + 1
    assert info.cache_mem == pytest.approx(slots * 2 * 2 * 16 * 4 / 2**20)
    assert info.model_mem > 0


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "jamba"])
def test_models_with_recurrent_state_are_refused(kind: str) -> None:
    own = {"attn_layer_period": 2, "attn_layer_offset": 1} if kind == "jamba" else {}
    size = {**GQA, "attention_hidden_size": 32, **own}
    config = transformers.AutoConfig.for_model(kind, **size)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ConfigError, match="cannot be served by the huggingface engine"):
        make_runner(model)


# Loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with a tokenizer that has a token for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny_model("llama").save_pretrained(tmp_path)
    vocab = {chr(97 + i): i for i in range(26)} | {"<s>": 26}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded_with_its_tokenizer(folder: Path) -> None:
    config = HuggingFaceConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "instance": {"max_cached_tokens": 100, "max_seq_len": 40},
        }
    )
    runner, tokenizer, _ = load_runner(config)
    assert runner.info.num_blocks == 7
    assert runner.info.max_seq_len == 40
    assert tokenizer.special_ids.bos == 26
    sequences = Sequences(runner, [PROMPTS[0]])
    sequences.blocks = [[0, 1]]
    for _ in range(4):
        sequences.step()
    assert sequences.tokens[0][5:] == expected(tiny_model("llama"), PROMPTS[0], 4)


def test_missing_models_and_devices_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load"):
        load_runner(HuggingFaceConfig(model=str(tmp_path), device="cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            load_runner(HuggingFaceConfig(device="cuda"))


def test_code_of_a_models_repository_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", '
        '"AutoModelForCausalLM": "evil.M"}}'
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="cannot load"):
        load_runner(HuggingFaceConfig(model=str(tmp_path), device="cpu"))
