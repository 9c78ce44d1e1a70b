"""A real model with a host tier serves random requests, alone and divided among processes. KV that
is loaded must equal the KV that was evicted."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import Landed, Transfer
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.host.copies import GIB
from parrot.engine.runner.kv_cache import KVLayout
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.ranks import processes
from tests.support import forked_modules
from tests.support.manual_clock import ManualClock
from tests.support.random_world import World
from tests.support.tiny_model import make_tiny_model

import torch  # isort: skip

pytestmark = pytest.mark.timeout(600)

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 30, 60, 16
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


class Unreliable:
    """Reports transfers late, and one of ten as failed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._landed = runner.landed
        self._late: list[Landed] = []
        self._rng = random.Random(5)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        for report in self._landed(wait=False):
            failed = Landed(report.transfer_id, False, 0.0)
            self._late.append(failed if self._rng.random() < 0.1 else report)
        count = max(self._rng.randint(0, 4), int(wait))
        over, self._late = self._late[:count], self._late[count:]
        return over


def make_core(tmp_path: Path, ranks: int) -> tuple[EngineCore, ModelRunner]:
    folder = str(make_tiny_model(tmp_path, overrides=SIZES))
    layout = KVLayout.of(open_checkpoint(folder).spec, BLOCK_SIZE, torch.float32)
    config = BuiltinConfig.model_validate(
        {
            "model": folder,
            "device": "cpu",
            "dtype": "float32",
            "scheduler": {"max_batch_size": 16, "max_num_batched_tokens": 128},
            "instance": {
                "num_kv_cache_blocks": NUM_BLOCKS,
                "host_kv_gb": NUM_HOST_BLOCKS * layout.block_bytes / GIB,
                "block_size": BLOCK_SIZE,
                "max_seq_len": 400,
                "num_threads": 1,
                "tensor_parallel": ranks,
            },
        }
    )
    runner, tokenizer, _ = load_runner(config)
    assert isinstance(runner, ModelRunner)
    assert runner.info.num_host_blocks == NUM_HOST_BLOCKS
    return EngineCore(config, runner, Language.of(tokenizer), ManualClock()), runner


def whole_runner(tmp_path: Path) -> ModelRunner:
    """A runner that is not divided."""
    model = load_decoder(open_checkpoint(str(tmp_path)), torch.float32, torch.device("cpu"))
    return ModelRunner(model, NUM_BLOCKS, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("ranks", "num_operations"),
    [(1, 400), pytest.param(3, 100, marks=pytest.mark.slow)],
)
def test_random_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, num_operations: int
) -> None:
    monkeypatch.setattr(processes, "subprocess", forked_modules.instead_of_subprocess())
    core, runner = make_core(tmp_path, ranks)
    assert runner.info.num_ranks == ranks
    monkeypatch.setattr(runner, "landed", Unreliable(runner).landed)
    transfers_started: list[Transfer] = []
    transfer = runner.transfer

    def recording(transfers: Sequence[Transfer]) -> None:
        transfers_started.extend(transfers)
        transfer(transfers)

    monkeypatch.setattr(runner, "transfer", recording)
    world = World(core, random.Random(5), free_weight=0.4)
    world.run(int(os.environ.get("PARROT_OPERATIONS", num_operations)))
    info = core.runtime_info()
    assert info.num_free_blocks == NUM_BLOCKS
    assert sum(t.to_host for t in transfers_started) > world.num_operations // 20
    assert sum(not t.to_host for t in transfers_started) > world.num_operations // 50
    runner.close()
    world.check_answers(whole_runner(tmp_path), 20)
