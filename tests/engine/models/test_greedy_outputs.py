"""Greedy outputs of the engine core with every model family, compared with transformers, in
float32.

Contexts fork in the middle of prompts and of outputs, prefixes are found in the cache, and contexts
are several windows long."""

import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import Landed, StepPlan, StepResult
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.service import deliver
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from tests.support.greedy import Greedy
from tests.support.kernel_cases import SHARE_ALL
from tests.support.manual_clock import ManualClock
from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

NUM_TOKENS = 24
MANY_TOKENS = 40  # With outputs of 40 tokens, contexts must evict each other's blocks and slots.
FEW_SLOTS, MANY_SLOTS = 12, 60
# Number of tokens in the common prefix, and in the rest of each prompt.
PREFIX, OTHERS = 50, (1, 9, 30)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in TINY_CONFIGS}
MODELS |= {
    "mistral with a window": ("mistral", {"sliding_window": 20}),
    "mistral with a small window": ("mistral", {"sliding_window": 2}),
    "qwen2 with a window": (
        "qwen2",
        {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 1},
    ),
}


class CountingRunner(ModelRunner):
    """Counts the tokens that it computes. In virtual time, a token takes 1 ms and copies take no
    time."""

    num_tokens = 0

    def __init__(self, *args: Any, clock: ManualClock) -> None:
        super().__init__(*args)
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        self.num_tokens += plan.num_tokens
        self._clock.pass_time(plan.num_tokens * 1e-3)
        return super().run(plan)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        return [Landed(r.transfer_id, r.succeeded, 0.0) for r in super().landed(wait=wait)]


class ModelPair:
    """A tiny model in the engine core and in transformers."""

    def __init__(
        self, folder: Path, num_blocks: int = 120, num_host_blocks: int = 0, **options: int
    ) -> None:
        checkpoint = open_checkpoint(str(folder))
        decoder = load_decoder(checkpoint, torch.float32, torch.device("cpu"))
        chosen = CpuOptions(gate=SHARE_ALL, num_host_blocks=num_host_blocks, **options)
        clock = ManualClock()
        self.runner = CountingRunner(decoder, num_blocks, 16, chosen, clock=clock)
        language = Language.of(checkpoint.load_tokenizer())
        config = BuiltinConfig(scheduler={"max_draft_tokens": 0})  # Drafts would be counted.
        self.core = EngineCore(config, self.runner, language, clock)
        self.greedy = Greedy(folder)
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        """The core's outputs for prompts that arrive together."""
        sampling = SamplingConfig(
            temperature=0, max_gen_length=num_tokens, ignore_tokenizer_eos=True
        )
        outcomes: list[list[object]] = [[] for _ in prompts]
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            self._num_requests += 1
            piece = Piece(self._num_requests, array("i", prompt))
            request = EngineRequest(self._num_requests, (piece,), sampling=sampling)
            self.core.requests.submit(request, outcome.append)
        while self.core.step():
            deliver(self.core.requests.outbox.take())
        self.core.check_integrity()
        answers = [outcome for (outcome,) in outcomes if isinstance(outcome, GenerateResponse)]
        assert len(answers) == len(prompts), outcomes
        return [answer.generated_ids for answer in answers]


def num_cached_tokens(models: ModelPair, num_tokens: int) -> int:
    """Check the outputs of prompts, then the outputs of forks inside these prompts and outputs.
    Returns the number of the forks' tokens that came from the cache."""
    rng = random.Random(0)
    prefix = [rng.randrange(256) for _ in range(PREFIX)]
    prompts = [prefix + [rng.randrange(256) for _ in range(length)] for length in OTHERS]
    outputs = models.generate(prompts, num_tokens)
    models.greedy.check(prompts, outputs)

    before = models.runner.num_tokens
    forks = [
        [*prefix[:40], 7],
        prompts[0] + outputs[0][:18],
        [*prompts[0], *outputs[0][:9], 5],
        prompts[2] + outputs[2][:24],
    ]
    models.greedy.check(forks, models.generate(forks, num_tokens))
    num_all = sum(map(len, forks)) + len(forks) * (num_tokens - 1)
    return num_all - (models.runner.num_tokens - before)


ALL_CACHED = 32 + 64 + 48 + 96


@pytest.mark.parametrize(("family", "overrides"), MODELS.values(), ids=MODELS)
def test_outputs_equal_those_of_transformers(
    tmp_path: Path, family: str, overrides: Mapping[str, Any]
) -> None:
    models = ModelPair(make_tiny_model(tmp_path / "model", family, overrides=overrides))
    assert num_cached_tokens(models, NUM_TOKENS) == ALL_CACHED


WINDOWED = {
    name: (family, overrides)
    for name, (family, overrides) in MODELS.items()
    if family in ("cohere2", "gemma2", "gemma3", "gemma4", "ministral", "olmo3") or overrides
}


@pytest.mark.parametrize("num_slots", [FEW_SLOTS, MANY_SLOTS])
@pytest.mark.parametrize(("family", "overrides"), WINDOWED.values(), ids=WINDOWED)
def test_outputs_with_window_slots(
    tmp_path: Path, family: str, overrides: Mapping[str, Any], num_slots: int
) -> None:
    """With few slots, jobs are preempted and windows are computed again."""
    folder = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    models = ModelPair(folder, num_slots=num_slots)
    cached = num_cached_tokens(models, MANY_TOKENS if num_slots == FEW_SLOTS else NUM_TOKENS)
    assert cached < ALL_CACHED if num_slots == FEW_SLOTS else cached == ALL_CACHED


SLOTS = {"num_slots": 16, "num_host_slots": 40}


# Models with only windowed layers, and with other layers of the same or a different shape.
@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("gemma4", {}),
        ("mistral with a window", {}),
        ("gemma4", SLOTS),
        ("cohere2", SLOTS),
        ("mistral with a window", SLOTS),
    ],
)
def test_outputs_with_preemptions_and_a_host_tier(
    tmp_path: Path, name: str, slots: dict[str, int]
) -> None:
    """There are blocks for two of eight contexts, so KV is evicted, copied to the host and loaded
    again."""
    family, overrides = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    models = ModelPair(folder, num_blocks=20, num_host_blocks=60, **slots)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(70 + 9 * number)] for number in range(8)]
    outputs = models.generate(prompts, MANY_TOKENS)
    models.greedy.check(prompts, outputs)
    further = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    models.greedy.check(further, models.generate(further))
    assert models.core.runtime_info().prompt_tokens.host > 200
