"""Models with window slots on the device, through the engine core.

Graphs, steps that are launched ahead, forks, prefix hits and preempted jobs give the tokens of
transformers."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import NO_PARENT, GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock
from tests.support.answer import Answer
from tests.support.greedy import Greedy
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NUM_TOKENS = 40
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": SIZES,
    "gemma2": SIZES,
    "gemma3": SIZES,
    "mistral": SIZES | {"sliding_window": 70},
    "qwen2": SIZES | {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 1},
}


class Engine:
    """A core with NaN in all slots, so that a read outside a window changes the tokens."""

    def __init__(self, folder: Path, block_size: int, num_slots: int, **instance: Any) -> None:
        config = BuiltinConfig.model_validate(
            {
                "model": str(folder),
                "device": "cuda",
                "dtype": "float32",
                "scheduler": {"max_batch_size": 8, "max_num_batched_tokens": 192},
                "instance": {
                    "num_kv_cache_blocks": 4096 // block_size,
                    "host_kv_gb": 0,
                    "num_window_slots": num_slots,
                    "block_size": block_size,
                }
                | instance,
            }
        )
        runner, tokenizer, _ = load_runner(config)
        assert isinstance(runner, CudaRunner)
        assert runner.info.window is not None
        self.runner = runner
        for tensor in runner._cache.slot_tensors:
            tensor.fill_(255 if tensor.dtype is torch.uint8 else torch.nan)
        self.core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
        self._num_requests = 0

    def outputs(self, pieces: list[tuple[list[int], int, int | None]]) -> list[list[int]]:
        """The outputs of prompts (tokens, parent, length of the parent) that arrive together."""
        sampling = SamplingConfig(
            temperature=0, max_gen_length=NUM_TOKENS, ignore_tokenizer_eos=True
        )
        answers = [Answer() for _ in pieces]
        for (tokens, parent, length), answer in zip(pieces, answers, strict=True):
            self._num_requests += 1
            piece = Piece(self._num_requests, array("i", tokens), parent, length)
            request = EngineRequest(self._num_requests, (piece,), sampling=sampling)
            self.core.requests.submit(request, answer)
        while self.core.step():
            for call, argument in self.core.requests.outbox.take():
                call(argument)
        self.core.check_integrity()
        found = [a.response for a in answers if isinstance(a.response, GenerateResponse)]
        assert len(found) == len(answers), [answer.error for answer in answers]
        return [response.generated_ids for response in found]


def roots(prompts: list[list[int]]) -> list[tuple[list[int], int, int | None]]:
    return [(prompt, NO_PARENT, None) for prompt in prompts]


@pytest.mark.parametrize(("block_size", "num_slots"), [(16, 26), (16, 90), (64, 12), (64, 40)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(
    tmp_path: Path, family: str, block_size: int, num_slots: int
) -> None:
    """With few slots, jobs are preempted and windows are computed again."""
    folder = make_tiny_model(tmp_path / "model", family, overrides=FAMILIES[family])
    engine, greedy = Engine(folder, block_size, num_slots), Greedy(folder)
    rng = random.Random(0)
    prefix = [rng.randrange(250) for _ in range(150)]
    prompts = [prefix + [rng.randrange(250) for _ in range(n)] for n in (1, 30, 90, 200)]
    first = engine.outputs(roots(prompts))
    greedy.check(prompts, first)
    assert engine.runner.computer.graphs is not None
    assert engine.runner.computer.graphs.num_replays > 0

    texts = [prompt + output for prompt, output in zip(prompts, first, strict=True)]
    forks = [(4, 230), (4, 100), (3, None), (2, 180)]
    wanted = [
        [*texts[parent - 1][:length], number] for number, (parent, length) in enumerate(forks)
    ]
    pieces = [([number], *fork) for number, fork in enumerate(forks)]
    greedy.check(wanted, engine.outputs(pieces))
    again = [[*text, 5, 6] for text in texts]
    greedy.check(again, engine.outputs(roots(again)))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("family", ["gemma3", "cohere2", "mistral"])
def test_windows_are_evicted_and_loaded(tmp_path: Path, family: str, block_size: int) -> None:
    """Two groups of contexts take turns. Blocks and slots are enough for one group only."""
    folder = make_tiny_model(tmp_path / "model", family, overrides=FAMILIES[family])
    sizes = {"num_kv_cache_blocks": 1024 // block_size, "host_kv_gb": 0.25}
    engine, greedy = (
        Engine(folder, block_size, 26 if block_size == 16 else 12, **sizes),
        Greedy(folder),
    )
    assert engine.runner.info.window is not None
    assert engine.runner.info.window.num_host_slots > 100
    rng = random.Random(1)
    texts = [[rng.randrange(250) for _ in range(200 + 3 * number)] for number in range(8)]
    for _ in range(3):
        outputs = engine.outputs(roots(texts[:4])) + engine.outputs(roots(texts[4:]))
        greedy.check(texts, outputs)
        texts = [[*text, *output, 7] for text, output in zip(texts, outputs, strict=True)]
    assert engine.core.runtime_info().prompt_tokens.host > 500
    engine.core.check_integrity()


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_quantised_slots_give_finite_tokens(tmp_path: Path, family: str) -> None:
    """Equal prompts have equal outputs, before and after their windows are evicted."""
    overrides = FAMILIES[family] | {"head_dim": 32}  # The smallest head size that supports e4m3.
    folder = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    engine = Engine(folder, 64, 12, kv_cache_dtype="fp8")
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(n)] for n in (70, 200, 300)]
    found = [engine.outputs(roots([prompt])) for prompt in (*prompts, *prompts)]
    assert found[:3] == found[3:]
