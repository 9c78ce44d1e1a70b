"""A model on two GPUs gives the outputs of the same model on one GPU.

Each test runs in its own process, because ranks can share memory only once in a process."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import DeviceLost
from parrot.engine.engine_types import create_service
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.host.copies import GIB
from parrot.engine.runner.kv_cache import KVLayout
from parrot.engine.runner.load import load_rank, load_runner
from parrot.engine.runner.ranks import RankProcesses, processes, unit
from parrot.protocol.engine_api import GenerateRequest
from parrot.protocol.sampling import ResolvedSampling
from parrot.utils.clock import MonotonicClock
from tests.support import stopped_rank
from tests.support.processes import children
from tests.support.random_world import World
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device: two of them"),
]
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4},
}


def config(folder: Path, ranks: int, **instance: Any) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "device": "cuda",
            "scheduler": {"max_batch_size": 8, "max_num_batched_tokens": 256},
            "instance": {
                "num_kv_cache_blocks": 128,
                "host_kv_gb": 0,
                "tensor_parallel": ranks,
            }
            | instance,
        }
    )


def run_alone(test: str, folder: str) -> None:
    command = [sys.executable, "-m", __name__, test, folder]
    assert subprocess.run(command, timeout=500).returncode == 0


@contextmanager
def two_ranks(folder: Path, **instance: Any) -> Iterator[tuple[CudaRunner, RankProcesses]]:
    settings = config(folder, 2, **instance)
    processes = RankProcesses(settings)
    try:
        runner = load_rank(settings, processes).runner
        assert isinstance(runner, CudaRunner)
        try:
            yield runner, processes
        finally:
            runner.close()
    finally:
        processes.close()


def outputs(runner: CudaRunner) -> list[Any]:
    """Outputs of decodes in graphs, of prompts of several lengths, of forks, and of random
    sampling."""
    driver = Driver(runner)
    prompts = [[1, 2, 3], [7] * 30, [i * 7 % 250 for i in range(200)]]
    found: list[Any] = [driver.generate([driver.context(p) for p in prompts], 12, chunk=64)]
    parent = driver.context([i * 5 % 250 for i in range(150)])
    driver.step([(parent, 150)])
    children = [driver.fork(parent, length) for length in (150, 128, 70)]
    for i, child in enumerate(children):
        child.tokens += [100 + i]
    found.append(driver.generate(children, 8))
    drawn = ResolvedSampling(temperature=1.2, top_p=0.9, seed=3)
    found.append(driver.generate([driver.context(p) for p in prompts], 8, sampling=drawn))
    return found


@pytest.mark.parametrize("family", SIZES)
def test_tokens_equal_those_of_one_gpu(tmp_path: Path, family: str) -> None:
    make_tiny_model(tmp_path / "model", family, overrides=SIZES[family])
    run_alone("tokens", str(tmp_path / "model"))


def compare_tokens(folder: Path) -> None:
    alone = load_rank(config(folder, 1), None).runner
    assert isinstance(alone, CudaRunner)
    want = outputs(alone)
    with two_ranks(folder) as (runner, _):
        assert outputs(runner) == want
        # Do not keep the graphs in a variable: at the end, the ranks wait until they are deleted.
        assert runner.computer.graphs is not None
        assert runner.computer.graphs.num_replays > 0


def test_requests_with_steps_launched_ahead_have_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", overrides=SIZES["llama"])
    run_alone("requests", str(tmp_path / "model"))


async def compare_requests(folder: Path) -> None:
    async def answers(ranks: int) -> list[list[int]]:
        service = create_service(config(folder, ranks))
        await service.start()
        requests = [
            GenerateRequest.model_validate(
                {
                    "context_id": i,
                    "fills": [{"context_id": i, "token_ids": [5 + i] * (10 + 40 * i)}],
                    "sampling_config": {
                        "temperature": i % 2,
                        "seed": i,
                        "max_gen_length": 40,
                        "ignore_tokenizer_eos": True,
                    }
                    | ({"regex": "[a-z ]{40}"} if i == 3 else {}),
                }
            )
            for i in range(6)
        ]
        try:
            found = await asyncio.gather(*(service.generate(request) for request in requests))
            service.check_integrity()
            return [answer.generated_ids for answer in found]
        finally:
            await service.close()

    assert await answers(2) == await answers(1)


def test_outputs_with_a_host_tier_equal_those_of_one_gpu(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", overrides=SIZES["llama"])
    run_alone("host", str(tmp_path / "model"))


def compare_host_tier(folder: Path) -> None:
    """The GPUs have 30 blocks and the host 60, so KV is often evicted and loaded. Each greedy
    answer must equal the answer to the same prompt alone, on two GPUs and on one."""
    checkpoint = open_checkpoint(str(folder))
    layout = KVLayout.of(checkpoint.spec, 16, torch.float32)
    few = {"num_kv_cache_blocks": 30, "block_size": 16, "max_seq_len": 400}
    with two_ranks(folder, **few, host_kv_gb=60 * layout.block_bytes / GIB) as (runner, _):
        assert runner.info.num_host_blocks == 60
        language = Language.of(checkpoint.load_tokenizer())
        core = EngineCore(config(folder, 2), runner, language, MonotonicClock())
        assert core.host is not None
        tier = core.host.tier
        tier._prefill_s = lambda: None  # The tier always loads KV instead of computing it.
        world = World(core, random.Random(3), free_weight=0.4)
        world.run(int(os.environ.get("PARROT_GPU_OPERATIONS", "2000")))
        assert core.runtime_info().num_free_blocks == 30
        assert tier.totals.num_failed == 0
        assert tier.totals.num_stored > world.num_operations // 10
        assert tier.totals.num_loaded > world.num_operations // 50
        world.check_answers(runner, 40)
    alone = load_rank(config(folder, 1), None).runner
    world.check_answers(alone, 40)


def test_a_killed_rank_ends_the_unit(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", overrides=SIZES["llama"])
    run_alone("kill", str(tmp_path / "model"))


def kill_a_rank(folder: Path) -> None:
    with two_ranks(folder) as (runner, processes):
        driver = Driver(runner)
        driver.generate([driver.context([1, 2, 3])], 3)
        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(DeviceLost):
            driver.generate([driver.context([1, 2, 3])], 400)


@pytest.mark.parametrize("doing", ["compiling kernels of step 3", "capturing graphs of 4 rows"])
def test_a_rank_that_stops_ends_the_start(tmp_path: Path, doing: str) -> None:
    make_tiny_model(tmp_path / "model", "llama", overrides=SIZES["llama"])
    run_alone(doing, str(tmp_path / "model"))


def stop_a_rank(folder: Path, doing: str) -> None:
    os.environ |= {stopped_rank.HALTS_AT: doing, stopped_rank.HALTS_BY: "SIGSTOP"}
    processes._MODULE = stopped_rank.__name__
    unit.START_PATIENCE = timedelta(minutes=1)
    with pytest.raises(DeviceLost, match=f"rank 1 hangs: it has been {doing}.* for 60 s"):
        load_runner(config(folder, 2))
    assert not children(os.getpid())


def main(test: str, folder: Path) -> None:
    if test == "tokens":
        compare_tokens(folder)
    elif test == "requests":
        asyncio.run(compare_requests(folder))
    elif test == "host":
        compare_host_tier(folder)
    elif test == "kill":
        kill_a_rank(folder)
    else:
        stop_a_rank(folder, test)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
