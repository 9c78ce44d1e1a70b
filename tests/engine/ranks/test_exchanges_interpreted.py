"""Three ranks exchange data through each other's memory, in Triton's interpreter. Each rank is a
process."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.ranks.memory import MemoryLayout
from tests.support.exchange_rounds import run_ranks, run_rounds
from tests.support.forked_modules import ForkedModule
from tests.support.mapped_memory import (
    FEW_ROWS,
    for_the_interpreter,
    lonely_exchanges,
    mapped_exchanges,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(120),
]
SIZE, WIDTH, MAX_ROWS = 3, 36, FEW_ROWS + 4
CASES = ((torch.float32, 0), (torch.bfloat16, 2**31 - 2))


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    with for_the_interpreter():
        yield


def test_sums_and_exchanges_are_right_whichever_rank_is_late(tmp_path: Path) -> None:
    """The second case starts shortly before turn 2**31, as after a day of decodes."""
    run_ranks(__name__, SIZE, str(tmp_path), start=ForkedModule)


def test_a_rank_without_a_peer_is_released_without_using_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's queue may be full of waiting kernels, so the release must not use a CUDA
    stream."""
    exchanges = lonely_exchanges(MemoryLayout(2, WIDTH * 4, WIDTH * 4 * 128), torch.device("cpu"))
    has_ended = threading.Event()

    def wait_in_all_kernels() -> None:
        for rows in (2, MAX_ROWS):
            residual = torch.zeros((rows, WIDTH))
            part = exchanges.slot(0, 1, residual)
            assert part is not None
            exchanges.sum_and_norm(part, residual, residual[0], 1e-5)
        exchanges.broadcast(torch.zeros(4, dtype=torch.int32))
        has_ended.set()

    threading.Thread(target=wait_in_all_kernels, daemon=True).start()
    assert not has_ended.wait(0.5), "the kernels did not wait for the other rank"
    monkeypatch.setattr(
        torch.cuda, "stream", Mock(side_effect=AssertionError("a stream may block"))
    )
    exchanges.release()
    assert has_ended.wait(60)


def main(folder: Path, rank: int) -> None:
    for dtype, turn in CASES:
        place = folder / str(dtype)
        place.mkdir(exist_ok=True)
        layout = MemoryLayout(SIZE, WIDTH * dtype.itemsize, WIDTH * dtype.itemsize * 128)
        exchanges = mapped_exchanges(place, rank, layout, turn)
        run_rounds(exchanges, rank, SIZE, 4, (WIDTH, MAX_ROWS), torch.device("cpu"), dtype)


if __name__ == "__main__":
    with for_the_interpreter():
        main(Path(sys.argv[1]), int(sys.argv[2]))
