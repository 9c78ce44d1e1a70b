"""Every model family on the device gives the tokens of transformers, with forks and contexts longer
than the window."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from parrot.engine.config import BuiltinConfig
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from tests.support.greedy import Greedy
from tests.support.runner_driver import Driver
from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 24
SIZES = {"hidden_size": 64, "num_attention_heads": 4}  # The heads have size 16.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": SIZES | {"use_qk_norm": True},
    "cohere2": SIZES,
    "gemma": SIZES,
    "gemma2": SIZES,
    "gemma3": SIZES,
    "gemma4": {},
    "ernie4_5": {},
    "glm4": {},
    "gpt2": {"n_embd": 64, "n_head": 4},
    "gpt_neox": SIZES,
    "granite": SIZES,
    "ministral": SIZES | {"head_dim": 16},
    "mistral": SIZES | {"sliding_window": 20},
    "olmo2": SIZES,
    "olmo3": SIZES,
    "phi3": {"hidden_size": 96, "num_attention_heads": 4},  # The heads of size 24 are padded to 32.
    "qwen2": SIZES | {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 1},
    "seed_oss": {},
    "smollm3": SIZES,
    "starcoder2": SIZES,
    "stablelm": {"hidden_size": 128, "num_attention_heads": 4},
}


def outputs(runner: ModelRunner | CudaRunner) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their outputs: at once, in chunks, and for forks in the middle of a prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in (3, 70, 130)]
    driver = Driver(runner)
    contexts = [driver.context(prompt) for prompt in prompts]
    found = driver.generate(contexts, NUM_TOKENS)
    forks = [driver.fork(contexts[2], length) for length in (128, 77)]
    for number, fork in enumerate(forks):
        fork.tokens += [number, 9]
    forked = [list(fork.tokens) for fork in forks]
    found += driver.generate(forks, NUM_TOKENS)
    found += driver.generate([driver.context(p) for p in prompts], NUM_TOKENS, chunk=33)
    return [*prompts, *forked, *prompts], found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    """The model is loaded with `load_runner`, as an engine does, in float32."""
    folder = make_tiny_model(tmp_path / "model", family, overrides=FAMILIES[family])
    config = {"model": str(folder), "device": "cuda", "dtype": "float32"}
    # The driver does not use window slots. `test_windows` does.
    instance = {"num_kv_cache_blocks": 64, "block_size": 64, "num_window_slots": 0}
    runner = load_runner(
        BuiltinConfig.model_validate(
            config | {"instance": instance | {"host_kv_gb": 0}, "scheduler": {"max_batch_size": 8}}
        )
    ).runner
    assert isinstance(runner, ModelRunner if family == "gemma4" else CudaRunner)
    Greedy(folder).check(*outputs(runner))


def test_all_families_are_tested_on_the_device() -> None:
    in_other_tests = {"llama", "qwen3", "opt"}  # `test_cuda_runner` tests these.
    assert FAMILIES.keys() | in_other_tests == TINY_CONFIGS.keys()
