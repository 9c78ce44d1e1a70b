"""Two CUDA runners that share one model, in Triton's interpreter, give the outputs of one runner.

The interpreter runs one kernel at a time, so each rank is a process. Gloo replaces NCCL, mapped
files replace memory that devices share, and all streams are the same stream."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from parrot.engine.core.steps import Transfer
from parrot.engine.kernels.ranks import exchanges, kernels
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.models import decoder
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.layers import PlainLinear
from parrot.engine.models.parallel import Partition
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.runner.host.cuda import CudaCopies
from parrot.engine.runner.kv_cache import KVCache
from parrot.engine.runner.ranks.group import Link, RankGroup
from parrot.engine.runner.ranks.steps import StepReader
from parrot.engine.runner.ranks.unit import Unit
from parrot.protocol.sampling import SamplingConfig
from tests.support.forked_modules import ForkedModule
from tests.support.immediate_streams import immediate_streams
from tests.support.kernel_cases import SHARE_ALL
from tests.support.mapped_memory import FEW_ROWS, for_the_interpreter, mapped_exchanges
from tests.support.runner_driver import Context, Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(300),
]
CPU, BLOCK_SIZE = torch.device("cpu"), 16
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 261}
CHUNK = FEW_ROWS + 6  # More rows than FEW_ROWS: sums read other ranks' memory.
LONG = 2 * BLOCK_SIZE + 1
SAMPLINGS = (
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=1.2, top_p=0.9, seed=3, logprobs=2),
    SamplingConfig(temperature=0.0, frequency_penalty=0.5),
)


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    with for_the_interpreter():
        yield


def make_runner(folder: str, ranks: RankGroup | None, unit: Unit | None) -> CudaRunner:
    checkpoint = open_checkpoint(folder)
    options = CudaOptions(
        max_rows=4,
        max_tokens=96,
        gate=SHARE_ALL,
        use_graphs=False,
        upcast=True,
        num_host_blocks=0 if ranks is None else 4,
    )
    shard = None if ranks is None else Partition(checkpoint.spec, ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "make_linear", PlainLinear)  # The kernels read plain weights.
        if ranks is not None:
            patch.setattr(KVCache, "host_copies", cuda_copies)
        model = load_decoder(checkpoint, torch.float32, CPU, shard=shard)
        return CudaRunner(model, 32, BLOCK_SIZE, options, unit)


def cuda_copies(cache: KVCache, num_slots: int, _: int = 0) -> CudaCopies:
    return CudaCopies(cache.block_tensors, BLOCK_SIZE, num_slots)


def join(rank: int, store: Path) -> RankGroup:
    group = RankGroup(rank, 2)
    group.connect_by_file(str(store), CPU)
    group.exchanges = mapped_exchanges(store.parent, rank, MemoryLayout.of(2, 64 * 4, 64))
    return group


def outputs(runner: CudaRunner) -> list[Any]:
    driver = Driver(runner)
    prompts = [[1, 2, 3], [i * 7 % 250 for i in range(20)]]
    found = [
        driver.generate([driver.context(p) for p in prompts], 3, sampling=sampling)
        for sampling in SAMPLINGS
    ]
    long = driver.context([i * 5 % 250 for i in range(LONG)])
    found.append(driver.generate([long], 2))
    if runner.info.num_host_blocks:
        store_and_load(driver, runner, long)
    return [*found, driver.generate([long], 3)]


def store_and_load(driver: Driver, runner: CudaRunner, context: Context) -> None:
    """Evict the context's first blocks, let another context use them, and load their KV into other
    blocks."""
    blocks, slots = context.blocks[:3], (3, 0, 1)
    runner.transfer([Transfer(1, True, tuple(blocks), slots)])
    assert [one.succeeded for one in runner.landed(wait=True)] == [True]
    driver._free += blocks
    other = driver.context([9] * 3 * BLOCK_SIZE)
    driver.step([(other, 3 * BLOCK_SIZE)])
    assert {*other.blocks} == {*blocks}
    context.blocks[:3] = [driver._free.pop() for _ in blocks]
    runner.transfer([Transfer(2, False, tuple(context.blocks[:3]), slots)])
    assert [one.succeeded for one in runner.landed(wait=True)] == [True]


def chunked(runner: CudaRunner) -> list[float]:
    """Log probabilities after a prompt of three steps. The first two steps choose no token."""
    driver = Driver(runner)
    context = driver.context([i * 5 % 250 for i in range(3 * CHUNK)])
    for _ in range(3):
        result = driver.step([(context, CHUNK)], SAMPLINGS[1])
    return list(result.scores[context.context_id].values)


@contextmanager
def divided(folder: Path, store: Path, *options: str) -> Iterator[CudaRunner]:
    link, other = Link.pair()
    arguments = [str(folder), str(store), str(other.fileno()), *options]
    with other:
        command = [sys.executable, "-m", __name__, *arguments]
        process = ForkedModule(command, pass_fds=[other.fileno()])
    group = join(0, store)
    unit = Unit(group, [link], with_tables=False)
    try:
        with immediate_streams():
            yield make_runner(str(folder), group, unit)
    finally:
        unit.close()
        assert process.wait(60) == 0


def test_tokens_equal_those_of_one_rank(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", overrides=SIZES)
    want = outputs(make_runner(str(folder), None, None))
    with divided(folder, tmp_path / "store") as runner:
        assert json.dumps(outputs(runner)) == json.dumps(want)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_partial_sum_stays_until_a_slow_rank_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """With one layer and no row that needs logits, the embeddings' sum is the last sum of a
    step."""
    sizes = SIZES | {"num_hidden_layers": layers}
    folder = make_tiny_model(tmp_path / "model", "llama", overrides=sizes)
    want = chunked(make_runner(str(folder), None, None))
    monkeypatch.setattr(exchanges, "MAX_PROGRAMS", 1)
    with divided(folder, tmp_path / "store", "slow") as runner:
        np.testing.assert_allclose(chunked(runner), want, atol=1e-5)


def read_late() -> None:
    """Delay the first sum on this rank: it reads the other rank's memory 3 s after the ranks have
    met. The sum has one program, so that no other program meets the ranks first."""
    meet, is_first = kernels._signal_and_wait, iter([True])

    def meet_and_wait(*args: Any) -> None:
        meet(*args)
        if next(is_first, False):
            time.sleep(timedelta(seconds=3).total_seconds())

    kernels._signal_and_wait = meet_and_wait
    exchanges.MAX_PROGRAMS = 1


def follow(folder: str, store: str, number: int) -> None:
    group, link, reader = join(1, Path(store)), Link(socket.socket(fileno=number)), StepReader()
    runner = make_runner(folder, group, None)
    try:
        while True:
            runner.compute(reader.step(np.frombuffer(link.receive(), dtype=np.int32)))
    except EOFError:
        link.close()


if __name__ == "__main__":
    if "slow" in sys.argv:
        read_late()
    with for_the_interpreter(), immediate_streams():
        follow(sys.argv[1], sys.argv[2], int(sys.argv[3]))
