"""What three ranks do through each other's memory, in Triton's interpreter: each is a process."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.ranks.memory import MemoryLayout
from tests.support.exchange_rounds import run_ranks, run_rounds
from tests.support.mapped_memory import mapped_exchanges

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(120),
]
SIZE, WIDTH, MAX_ROWS = 3, 36, 70
CASES = ((torch.float32, 0), (torch.bfloat16, 2**31 - 2))


def test_sums_and_exchanges_are_right_whoever_is_late(tmp_path: Path) -> None:
    """Also after a day of decodes, when a turn has more than 31 bits."""
    run_ranks(__name__, SIZE, str(tmp_path))


def main(folder: Path, rank: int) -> None:
    for dtype, turn in CASES:
        place = folder / str(dtype)
        place.mkdir(exist_ok=True)
        layout = MemoryLayout(SIZE, WIDTH * dtype.itemsize, WIDTH * dtype.itemsize * 128)
        exchanges = mapped_exchanges(place, rank, layout, turn)
        run_rounds(exchanges, rank, SIZE, 4, (WIDTH, MAX_ROWS), torch.device("cpu"), dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
