"""Two CUDA runners in Triton's interpreter, which a model is divided among, give what one gives.

The interpreter runs one kernel at a time, so each rank is a process; gloo is in NCCL's place, and
mapped files are in that of memory which devices share."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from parrot.engine.kernels.ranks.memory import MESSAGE_ROWS, MemoryLayout
from parrot.engine.models import decoder
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.layers import PlainLinear
from parrot.engine.models.parallel import Shard
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.runner.ranks.group import RankGroup
from parrot.engine.runner.ranks.link import Link
from parrot.engine.runner.ranks.steps import StepReader
from parrot.engine.runner.ranks.unit import Unit
from parrot.protocol.sampling import SamplingConfig
from parrot.testing.runner_driver import Driver
from tests.support.kernel_cases import SHARE_ALL
from tests.support.mapped_memory import mapped_exchanges
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(300),
]
CPU = torch.device("cpu")
LAYOUT = MemoryLayout.of(2, 64 * 4, 64)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 261}
SAMPLINGS = (
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=1.2, top_p=0.9, seed=3, logprobs=2),
    SamplingConfig(temperature=0.0, frequency_penalty=0.5),
)


def make_runner(folder: str, ranks: RankGroup | None, unit: Unit | None) -> CudaRunner:
    checkpoint = open_checkpoint(folder)
    options = CudaOptions(max_rows=4, max_tokens=96, gate=SHARE_ALL, use_graphs=False, upcast=True)
    shard = None if ranks is None else Shard(checkpoint.spec, ranks)
    with pytest.MonkeyPatch.context() as patch:  # the kernels read weights as they are
        patch.setattr(decoder, "make_linear", PlainLinear)
        model = load_decoder(checkpoint, torch.float32, CPU, shard=shard)
    return CudaRunner(model, 32, 16, options, unit)


def join(rank: int, store: Path) -> RankGroup:
    group = RankGroup(rank, 2)
    group.connect_by_file(str(store), CPU)
    group.exchanges = mapped_exchanges(store.parent, rank, LAYOUT)
    return group


def outputs(runner: CudaRunner) -> list[Any]:
    driver = Driver(runner)
    prompts = [[1, 2, 3], [i * 7 % 250 for i in range(20)]]
    found = [
        driver.generate([driver.context(p) for p in prompts], 3, sampling=sampling)
        for sampling in SAMPLINGS
    ]
    long = driver.context([i * 5 % 250 for i in range(MESSAGE_ROWS + 6)])
    return [*found, driver.generate([long], 2)]


@contextmanager
def divided(folder: Path, store: Path) -> Iterator[CudaRunner]:
    link, other = Link.pair()
    arguments = [str(folder), str(store), str(other.fileno())]
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments], pass_fds=[other.fileno()]
        )
    group = join(0, store)
    unit = Unit(group, [link], with_tables=False)
    try:
        yield make_runner(str(folder), group, unit)
    finally:
        unit.close()
        assert process.wait(60) == 0


def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", overrides=SIZES)
    want = outputs(make_runner(str(folder), None, None))
    with divided(folder, tmp_path / "store") as runner:
        assert json.dumps(outputs(runner)) == json.dumps(want)


def follow(folder: str, store: str, number: int) -> None:
    group, link, reader = join(1, Path(store)), Link(socket.socket(fileno=number)), StepReader()
    runner = make_runner(folder, group, None)
    try:
        while True:
            runner.compute(reader.step(np.frombuffer(link.receive(), dtype=np.int32)))
    except EOFError:
        link.close()


if __name__ == "__main__":
    follow(sys.argv[1], sys.argv[2], int(sys.argv[3]))
