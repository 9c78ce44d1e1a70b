"""An engine on the device under random requests: nothing leaks, and requests do not affect each
other.

PARROT_GPU_OPERATIONS is the number of operations; 10,000 take 1 to 2 minutes. With few operations,
`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_random_operations.py` works
too."""

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import PENDING, LaunchedStep, StepPlan
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.utils.clock import MonotonicClock
from tests.support.random_world import World
from tests.support.tiny_model import make_tiny_model

SIZES = {"hidden_size": 64, "num_attention_heads": 4}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

NUM_BLOCKS = 40


def test_random_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy request, with or without penalties, has the tokens that it has alone."""
    config = BuiltinConfig.model_validate(
        {
            "model": str(make_tiny_model(tmp_path, overrides=SIZES)),
            "device": "cuda",
            "dtype": "float32",
            "scheduler": {"max_batch_size": 16, "max_num_batched_tokens": 128},
            "instance": {"num_kv_cache_blocks": NUM_BLOCKS, "block_size": 16, "max_seq_len": 400},
        }
    )
    runner, tokenizer, _ = load_runner(config)
    assert isinstance(runner, CudaRunner)
    launch, prompts_ahead, penalized_ahead = runner.launch, [], []

    def recording(plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if previous is not None and plan.num_tokens > len(plan.sequences):
            prompts_ahead.append(plan.num_tokens)
        for sequence in plan.sequences:
            spec = sequence.sample
            if spec and spec.sampling.adjusts_logits and sequence.token_ids[-1] == PENDING:
                penalized_ahead.append(spec.job_id)
        return launch(plan, previous)

    monkeypatch.setattr(runner, "launch", recording)
    core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
    world = World(core, random.Random(3))
    world.run(int(os.environ.get("PARROT_GPU_OPERATIONS", "2000")))
    assert core.runtime_info().num_free_blocks == NUM_BLOCKS
    assert len(world.greedy_answers) > world.num_operations // 50
    assert len(prompts_ahead) > world.num_operations // 50
    assert len(penalized_ahead) > world.num_operations // 50
    world.check_answers(runner, 40)
