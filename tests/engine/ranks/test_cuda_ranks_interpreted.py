"""The CUDA runner of a rank other than rank 0, in Triton's interpreter, follows rank 0's messages.

The interpreter runs one kernel at a time, so the two runners run one after the other. Rank 0 runs
first, alone, with the whole model. Then the other rank runs with the same model and the recorded
messages of rank 0."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.core.steps import PENDING, SampleSpec, ScoreSpec, SequenceStep, StepPlan
from parrot.engine.models import decoder
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.layers import PlainLinear
from parrot.engine.models.parallel import Ranks
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.runner.ranks.steps import StepReader
from parrot.engine.runner.ranks.unit import Unit
from tests.support.kernel_cases import SHARE_ALL
from tests.support.runner_driver import GREEDY, Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(300),
]
BLOCKS, SIZE = 32, 16
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}


class Alone:
    """`Ranks` with one member. A rank above 0 receives what rank 0 has broadcast before."""

    size = 1
    exchanges = None

    def __init__(self, rank: int, broadcasts: list[torch.Tensor]) -> None:
        self.rank = 0
        self._broadcasts = broadcasts
        self._receives = rank > 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        if self._receives:
            x.copy_(self._broadcasts.pop(0))
        else:
            self._broadcasts.append(x.clone())


class Recorded(Unit):
    """A unit that records its messages."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None), [], with_tables=False)
        self.messages: list[Any] = []

    def send(self, step: Any) -> None:
        self.messages.append(self._writer.message(step))


@pytest.fixture
def make(tmp_path: Path) -> Callable[[int, Unit | None], CudaRunner]:
    path = make_tiny_model(tmp_path / "model", "llama", overrides=SIZES)
    checkpoint, broadcasts = open_checkpoint(str(path)), cast("list[torch.Tensor]", [])

    def runner(rank: int, unit: Unit | None) -> CudaRunner:
        options = CudaOptions(
            max_rows=4, max_tokens=64, gate=SHARE_ALL, use_graphs=False, upcast=True
        )
        ranks: Ranks = Alone(rank, broadcasts)
        with pytest.MonkeyPatch.context() as patch:  # The kernels read plain weights.
            patch.setattr(decoder, "make_linear", PlainLinear)
            take = functools.partial(checkpoint.take, device=torch.device("cpu"))
            model = Decoder(checkpoint.spec, take, torch.float32, torch.device("cpu"), ranks=ranks)
        return CudaRunner(model, BLOCKS, SIZE, options, unit)

    return runner


def test_another_rank_computes_the_same_kv(
    make: Callable[[int, Unit | None], CudaRunner],
) -> None:
    """Covers prompts, a fork, hidden states that are read, and a step that is launched before the
    previous step has finished."""
    unit = Recorded()
    first, other = make(0, unit), make(1, None)
    driver = Driver(first)
    parent = driver.context([i * 7 % 250 for i in range(20)])
    driver.step([(parent, 20)])
    child = driver.fork(parent, 18)
    child.tokens += [100]
    read = driver.context([5, 6, 7, 8])
    driver.step([(child, 1), (read, 4)], read={read.context_id: ScoreSpec(9, 1, (7, 8), 2)})
    launch_two_steps(first, child.context_id, child.tokens, child.blocks)
    reader = StepReader()
    for message in unit.messages:
        other.compute(reader.step(message))
    for own, theirs in zip(other._cache.block_tensors, first._cache.block_tensors, strict=True):
        assert theirs.any()
        torch.testing.assert_close(own[:, :, :, :BLOCKS], theirs[:, :, :, :BLOCKS])


def launch_two_steps(
    runner: CudaRunner, context_id: int, tokens: list[int], blocks: list[int]
) -> None:
    def plan(token: int, position: int) -> StepPlan:
        spec = SampleSpec(1, GREEDY, 0, position + 1)
        return StepPlan((SequenceStep(context_id, [token], position, blocks, spec),))

    end = len(tokens)
    running = runner.launch(plan(7, end), None)
    after = runner.launch(plan(PENDING, end + 1), running)
    assert running is not None
    assert after is not None
    assert running.wait().tokens.keys() == after.wait().tokens.keys()
