"""The embedded model's greedy output is that of transformers, however the work is cut up."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from parrot.engine.config import BuiltinConfig
from parrot.engine.model_runner import ModelRunner, load_runner
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.testing.runner_driver import Context, Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 64
TEXTS = [
    "The capital of France is a city on the river Seine, and it is known for",
    "In mathematics, a prime number is a natural number greater than 1 that",
    "def fibonacci(n):\n    # Return the n-th number of the sequence\n    if n <",
    "Once upon a time, in a village at the foot of a mountain, there lived an",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "The recipe is simple: take two eggs, a cup of flour, and a pinch of salt. First,",
    "Photosynthesis is the process by which plants turn light, water and air into",
    "Dear Professor Smith,\n\nI am writing to recommend my student for the position of",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,",
    "The three branches of the government of the United States are the legislative,",
    "Q: What is the boiling point of water at sea level?\nA: It is 100 degrees. Q:",
]
PROMPT_LENGTH = 11  # prompts of one length are one batch without padding


@dataclass
class Golden:
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    config = BuiltinConfig.model_validate(
        {
            "model": "embedded",
            "dtype": "float32",
            "instance": {"num_kv_cache_blocks": 400, "num_threads": 1},
        }
    )
    return load_runner(config)[0]


@pytest.fixture(scope="module")
def golden() -> Golden:
    """transformers' `generate` on the weights that the engine dequantized."""
    checkpoint = open_checkpoint("embedded")
    tokenizer = Tokenizer.from_str(checkpoint.load_tokenizer().tokenizer_json)
    prompts = [tokenizer.encode(text).ids[:PROMPT_LENGTH] for text in TEXTS]
    twin = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    weights = {name: checkpoint.take(name) for name in checkpoint.shapes}
    twin.load_state_dict(weights, strict=False)
    twin.tie_weights()
    twin.eval()
    twin.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = twin.generate(torch.tensor(prompts), max_new_tokens=NUM_TOKENS, do_sample=False)
    return Golden(prompts, ids[:, PROMPT_LENGTH:].tolist())


def test_alone(runner: ModelRunner, golden: Golden) -> None:
    for prompt, want in zip(golden.prompts, golden.outputs, strict=True):
        driver = Driver(runner)
        assert driver.generate([driver.context(prompt)], NUM_TOKENS) == [want]


def test_in_a_batch_of_16(runner: ModelRunner, golden: Golden) -> None:
    driver = Driver(runner)
    chosen = [*range(12), 0, 3, 5, 7]
    contexts = [driver.context(golden.prompts[i]) for i in chosen]
    assert driver.generate(contexts, NUM_TOKENS) == [golden.outputs[i] for i in chosen]


def test_filled_in_chunks_of_7(runner: ModelRunner, golden: Golden) -> None:
    driver = Driver(runner)
    contexts = [driver.context(prompt) for prompt in golden.prompts]
    assert driver.generate(contexts, NUM_TOKENS, chunk=7) == golden.outputs


@pytest.mark.parametrize("cut", [lambda n: 2, lambda n: n // 2, lambda n: n - 1])
def test_forked_from_a_shared_context(
    runner: ModelRunner, golden: Golden, cut: Callable[[int], int]
) -> None:
    """Two forks of each context, one of them taken while the parent goes on generating."""
    driver = Driver(runner)
    pairs: list[tuple[Context, Context]] = []
    for prompt in golden.prompts[::3]:
        parent = driver.context(prompt)
        driver.step([(parent, len(prompt))])
        pairs.append((driver.fork(parent, cut(len(prompt))), driver.fork(parent, cut(len(prompt)))))
    for (first, second), prompt in zip(pairs, golden.prompts[::3], strict=True):
        first.tokens, second.tokens = list(prompt), list(prompt)
    contexts = [context for pair in pairs for context in pair]
    want = [output for output in golden.outputs[::3] for _ in range(2)]
    assert driver.generate(contexts, NUM_TOKENS) == want


def test_a_long_shared_prefix_is_read_once_and_changes_nothing(
    runner: ModelRunner, golden: Golden
) -> None:
    """A prefix of 1,000 tokens, then forks that decode together: with and without sharing."""
    rng = random.Random(1)
    prefix = [token for _ in range(100) for token in rng.choice(golden.prompts)[:10]][:1000]
    outputs = []
    for gate in (1, 10**9):
        runner._attention._min_saved_tokens = gate
        driver = Driver(runner)
        parent = driver.context(prefix)
        driver.step([(parent, len(prefix))])
        before = runner.shared_tokens_saved
        children = [driver.fork(parent, len(prefix)) for _ in range(4)]
        for child, prompt in zip(children, golden.prompts, strict=False):
            child.tokens += prompt
        outputs.append(driver.generate(children, 24))
        assert (runner.shared_tokens_saved - before > 20 * 3 * 900) == (gate == 1)
    assert outputs[0] == outputs[1]


def test_after_a_preemption(runner: ModelRunner, golden: Golden) -> None:
    """Half of the contexts lose their KV in the middle and are computed again from their tokens."""
    driver = Driver(runner)
    contexts = [driver.context(prompt) for prompt in golden.prompts[:6]]
    first = driver.generate(contexts, 30)
    for context in contexts[::2]:
        driver.release(context)
    rest = driver.generate(contexts, NUM_TOKENS - 30, chunk=20)
    assert [a + b for a, b in zip(first, rest, strict=True)] == golden.outputs[:6]
