"""The embedded model's greedy output equals transformers', however its tokens are split into
steps."""

import functools
import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from parrot.engine.attention.torch_attention import cpu_gate
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import StepPlan, StepResult, StepRunner
from parrot.engine.cpu.forward import CompiledLayers
from parrot.engine.cpu.native import start_loading
from parrot.engine.models.checkpoint import Checkpoint, load_decoder, open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.service import deliver
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock
from tests.support.runner_driver import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 7
TEXTS = [
    "The capital of France is a city on the river Seine, and it is known for",
    "In mathematics, a prime number is a natural number greater than 1 that",
    "def fibonacci(n):\n    # Return the n-th number of the sequence\n    if n <",
    "Once upon a time, in a village at the foot of a mountain, there lived an",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
]
PROMPT_LENGTH = 11  # Prompts of one length form a batch without padding.


@dataclass
class Golden:
    prompts: list[list[int]]
    outputs: list[list[int]]
    logits: torch.Tensor  # Shape: [prompts, tokens, vocab].


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("embedded")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Decoder:
    return load_decoder(checkpoint, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def runner(model: Decoder) -> ModelRunner:
    """A runner with compiled kernels from the first step."""
    kernels = start_loading("float32")
    assert kernels is not None
    kernels.result()
    return ModelRunner(
        model,
        200,
        16,
        CpuOptions(gate=cpu_gate(torch.float32)),
        make_layers=partial(CompiledLayers, kernels),
    )


@pytest.fixture(scope="module", params=["torch", "compiled"])
def any_runner(model: Decoder, request: pytest.FixtureRequest) -> ModelRunner:
    if request.param == "torch":
        return ModelRunner(model, 200, 16, CpuOptions(gate=cpu_gate(torch.float32)))
    runner: ModelRunner = request.getfixturevalue("runner")
    return runner


@pytest.fixture(scope="module")
def golden(checkpoint: Checkpoint) -> Golden:
    """The output of transformers' `generate` with the weights that the engine dequantized."""
    tokenizer = Tokenizer.from_str(checkpoint.load_tokenizer().tokenizer_json)
    prompts = [tokenizer.encode(text).ids[:PROMPT_LENGTH] for text in TEXTS]
    weights = {name: checkpoint.take(name) for name in checkpoint.plans}
    twin = transformers.LlamaForCausalLM.from_pretrained(
        None, config=transformers.LlamaConfig(**checkpoint.config), state_dict=weights
    ).eval()
    twin.generation_config.eos_token_id = None
    with torch.inference_mode():
        made = twin.generate(
            torch.tensor(prompts),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(made.logits, dim=1).float()
    return Golden(prompts, made.sequences[:, PROMPT_LENGTH:].tolist(), logits)


def test_outputs_of_single_prompts(any_runner: ModelRunner, golden: Golden) -> None:
    for prompt, want in zip(golden.prompts[:1], golden.outputs, strict=False):
        driver = Driver(any_runner)
        assert driver.generate([driver.context(prompt)], NUM_TOKENS) == [want]


def test_outputs_in_a_batch_of_16(any_runner: ModelRunner, golden: Golden) -> None:
    driver = Driver(any_runner)
    chosen = [*range(6), *range(6), 0, 3, 5, 1]
    contexts = [driver.context(golden.prompts[i]) for i in chosen]
    assert driver.generate(contexts, NUM_TOKENS) == [golden.outputs[i] for i in chosen]


def test_outputs_of_prompts_in_chunks_of_7(any_runner: ModelRunner, golden: Golden) -> None:
    driver = Driver(any_runner)
    contexts = [driver.context(prompt) for prompt in golden.prompts]
    assert driver.generate(contexts, NUM_TOKENS, chunk=7) == golden.outputs


def test_outputs_of_forks(any_runner: ModelRunner, golden: Golden) -> None:
    """A fork of each prompt's context: after 2 tokens, in the middle, or before the last token."""
    driver = Driver(any_runner)
    contexts = []
    lengths = itertools.cycle((2, PROMPT_LENGTH // 2, PROMPT_LENGTH - 1))
    for prompt, length in zip(golden.prompts, lengths, strict=False):
        parent = driver.context(prompt)
        driver.step([(parent, len(prompt))])
        fork = driver.fork(parent, length)
        fork.tokens = list(prompt)
        contexts.append(fork)
    assert driver.generate(contexts, NUM_TOKENS) == golden.outputs


def test_a_long_shared_prefix_is_read_once_with_the_same_outputs(
    model: Decoder, golden: Golden
) -> None:
    """Forks of a prefix of 320 tokens decode together, with and without shared reads."""
    rng = random.Random(1)
    prefix = [token for _ in range(32) for token in rng.choice(golden.prompts)[:10]]
    outputs = []
    for gate in (cpu_gate(torch.float32), None):
        runner = ModelRunner(model, 60, 16, CpuOptions(gate=gate))
        driver = Driver(runner)
        parent = driver.context(prefix)
        driver.step([(parent, len(prefix))])
        children = [driver.fork(parent, len(prefix)) for _ in range(4)]
        for child, prompt in zip(children, golden.prompts, strict=False):
            child.tokens += prompt
        outputs.append(driver.generate(children, 4))
        assert (runner.planner.num_shared_tokens >= 4 * 3 * 320) == (gate is not None)
    assert outputs[0] == outputs[1]


def test_outputs_after_a_preemption(any_runner: ModelRunner, golden: Golden) -> None:
    """Half of the contexts lose their KV after 4 tokens. The runner computes it again from their
    tokens."""
    driver = Driver(any_runner)
    contexts = [driver.context(prompt) for prompt in golden.prompts]
    first = driver.generate(contexts, 4)
    for context in contexts[::2]:
        driver.release(context)
    rest = driver.generate(contexts, NUM_TOKENS - 4, chunk=13)
    assert [a + b for a, b in zip(first, rest, strict=True)] == golden.outputs


class CountingRunner:
    """Counts the tokens that the runner computes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.info = runner.info
        self.num_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_tokens += plan.num_tokens
        return self._runner.run(plan)


@functools.cache
def language() -> Language:
    return Language.of(open_checkpoint("embedded").load_tokenizer())


def answers_of(
    runner: StepRunner,
    requests: Sequence[tuple[list[int], SamplingConfig]],
    resumed: Sequence[Sequence[int]] = (),
    **config: int,
) -> list[GenerateResponse]:
    """The answers of an engine core to prompts that arrive together. `resumed` has the first tokens
    of each output; each prompt ends with them."""
    core = EngineCore(BuiltinConfig(**config), runner, language(), MonotonicClock())
    outcomes: list[list[object]] = [[] for _ in requests]
    for i, (prompt, sampling) in enumerate(requests):
        piece = Piece(i, array("i", prompt))
        first = resumed[i] if resumed else ()
        wanted = EngineRequest(i, (piece,), sampling=sampling, resumed_ids=first)
        core.requests.submit(wanted, outcomes[i].append)
    while core.step():
        deliver(core.requests.outbox.take())
    core.check_integrity()
    answers = [outcome for (outcome,) in outcomes if isinstance(outcome, GenerateResponse)]
    assert len(answers) == len(requests), outcomes
    return answers


RESUMED_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.3, "stop_str": "xyz"},
    {"temperature": 1.2, "top_p": 0.9, "seed": 5, "frequency_penalty": 2.0},
]


def test_an_output_that_started_on_another_engine_continues_identically(
    runner: ModelRunner, golden: Golden
) -> None:
    tokenizer = language().tokenizer
    prompt = golden.prompts[0]
    samplings = [
        SamplingConfig(max_gen_length=NUM_TOKENS, ignore_tokenizer_eos=True, **fields)
        for fields in RESUMED_FIELDS
    ]
    whole = answers_of(runner, [(prompt, sampling) for sampling in samplings])
    for num_first in (1, 4):
        first = [answer.generated_ids[:num_first] for answer in whole]
        rest = {"max_gen_length": NUM_TOKENS - num_first}
        requests = [
            (prompt + ids, sampling.model_copy(update=rest))
            for ids, sampling in zip(first, samplings, strict=True)
        ]
        answers = answers_of(runner, requests, first)
        for ids, answer, want in zip(first, answers, whole, strict=True):
            assert ids + answer.generated_ids == want.generated_ids
            assert tokenizer.decode(ids) + answer.generated_text == want.generated_text


def complete(
    runner: StepRunner, requests: Sequence[tuple[list[int], SamplingConfig]], **config: int
) -> list[list[int]]:
    return [answer.generated_ids for answer in answers_of(runner, requests, **config)]


def test_outputs_after_preemptions_by_the_engine_core(runner: ModelRunner, golden: Golden) -> None:
    """The pool holds half of the contexts, so the core must preempt some for the others to
    finish."""
    counting = CountingRunner(runner)
    num_tokens = NUM_TOKENS
    capacity = 3 * (PROMPT_LENGTH + num_tokens)
    sampling = SamplingConfig(temperature=0, max_gen_length=num_tokens, ignore_tokenizer_eos=True)
    requests = [(prompt, sampling) for prompt in golden.prompts]
    want = [output[:num_tokens] for output in golden.outputs]
    assert complete(counting, requests, tokens_capacity=capacity) == want
    num_needed = len(golden.prompts) * (PROMPT_LENGTH + num_tokens - 1)
    assert counting.num_tokens > num_needed + 20, "no context was preempted"


@pytest.mark.parametrize("config", [{}, {"fill_chunk_size": 4}, {"tokens_capacity": 64}])
def test_log_probabilities(runner: ModelRunner, golden: Golden, config: dict[str, int]) -> None:
    """In one step and in chunks, and for tokens whose KV was evicted and computed again."""
    sampling = SamplingConfig(
        temperature=0, max_gen_length=NUM_TOKENS, ignore_tokenizer_eos=True, logprobs=5
    )
    answers = answers_of(runner, [(prompt, sampling) for prompt in golden.prompts], **config)
    want = torch.log_softmax(golden.logits, dim=-1)
    for i, answer in enumerate(answers):
        assert answer.generated_ids == golden.outputs[i]
        assert answer.logprobs is not None
        ids = torch.tensor(answer.logprobs.ids).view(NUM_TOKENS, 6).long()
        values = torch.tensor(answer.logprobs.values).view(NUM_TOKENS, 6)
        assert ids[:, 0].tolist() == ids[:, 1].tolist() == answer.generated_ids
        assert torch.allclose(values, want[i].gather(1, ids), atol=1e-3)
        assert torch.allclose(values[:, 1:], want[i].topk(5, dim=-1).values, atol=1e-3)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(
    runner: ModelRunner, golden: Golden
) -> None:
    def seeded(seed: int) -> SamplingConfig:
        return SamplingConfig(seed=seed, temperature=0.9, top_p=0.95, max_gen_length=5)

    requests = [(prompt, seeded(i)) for i, prompt in enumerate(golden.prompts)]
    together = complete(runner, requests)
    assert [complete(runner, [request])[0] for request in requests[::3]] == together[::3]
    prompt = golden.prompts[0]
    assert (
        len({tuple(ids) for ids in complete(runner, [(prompt, seeded(i)) for i in range(4)])}) > 2
    )
