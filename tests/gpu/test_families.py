"""Every family on the device gives the tokens of the CPU, with forks and past its windows."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from tests.support.runner_driver import Driver
from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 24
SIZES = {"hidden_size": 64, "num_attention_heads": 4}  # Heads of 16.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": SIZES | {"use_qk_norm": True},
    "cohere2": SIZES,
    "gemma": SIZES,
    "gemma2": SIZES,
    "gemma3": SIZES,
    "gemma4": {},
    "glm4": {},
    "gpt2": {"n_embd": 64, "n_head": 4},
    "gpt_neox": SIZES,
    "granite": SIZES,
    "mistral": SIZES | {"sliding_window": 20},
    "olmo2": SIZES,
    "phi3": {"hidden_size": 96, "num_attention_heads": 4},  # Heads of 24 are padded to 32.
    "qwen2": SIZES | {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 1},
    "smollm3": SIZES,
    "stablelm": {"hidden_size": 128, "num_attention_heads": 4},
}


def outputs(runner: ModelRunner | CudaRunner) -> list[list[int]]:
    """Of prompts at once and in chunks, and of forks in the middle of a prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in (3, 70, 130)]
    driver = Driver(runner)
    contexts = [driver.context(prompt) for prompt in prompts]
    found = driver.generate(contexts, NUM_TOKENS)
    forks = [driver.fork(contexts[2], length) for length in (128, 77)]
    for number, fork in enumerate(forks):
        fork.tokens += [number, 9]
    found += driver.generate(forks, NUM_TOKENS)
    return found + driver.generate([driver.context(p) for p in prompts], NUM_TOKENS, chunk=33)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu(tmp_path: Path, family: str) -> None:
    """The same model through `load_runner`, as an engine starts it, in float32."""
    folder = str(make_tiny_model(tmp_path / "model", family, overrides=FAMILIES[family]))
    whole = load_decoder(open_checkpoint(folder), torch.float32, torch.device("cpu"))
    config = {"model": folder, "device": "cuda", "dtype": "float32"}
    instance = {"num_kv_cache_blocks": 64, "block_size": 64, "host_kv_gb": 0}
    runner = load_runner(
        BuiltinConfig.model_validate(
            config | {"instance": instance, "scheduler": {"max_batch_size": 8}}
        )
    ).runner
    assert isinstance(runner, ModelRunner if family == "gemma4" else CudaRunner)
    assert outputs(runner) == outputs(ModelRunner(whole, 64, 64))


def test_all_families_are_tested_on_the_device() -> None:
    in_other_tests = {"llama", "qwen3", "opt"}  # `test_cuda_runner`
    assert FAMILIES.keys() | in_other_tests == TINY_CONFIGS.keys()
