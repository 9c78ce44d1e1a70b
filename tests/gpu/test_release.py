"""Releases a rank whose device queue is full of waiting kernels."""

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MemoryLayout
from tests.support.mapped_memory import lonely_exchanges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, ROWS, LAUNCHES = 4096, (1, 40, 300), 6000


def test_a_full_queue_of_launches_is_released() -> None:
    """The test has its own process, because waiting kernels keep a process from exiting."""
    done = subprocess.run([sys.executable, "-m", __name__], timeout=150, check=False)
    assert done.returncode == 0


class Sums:
    """Launches sums and broadcasts in sequence. `count` is the number of launched sums."""

    def __init__(self, exchanges: Exchanges, device: torch.device) -> None:
        self.count = 0
        self._exchanges, self._device = exchanges, device
        self._residuals = [
            torch.zeros((rows, WIDTH), device=device, dtype=torch.bfloat16) for rows in ROWS
        ]
        self._word = torch.zeros(4, device=device, dtype=torch.int32)

    def launch(self, count: int) -> None:
        torch.cuda.set_device(self._device)
        for self.count in range(1, count + 1):
            residual = self._residuals[self.count % len(ROWS)]
            part = self._exchanges.slot(self.count % 2, 1, residual)
            assert part is not None
            self._exchanges.sum_and_norm(part, residual, residual[0], 1e-5)
            if self.count % 10 == 0:
                self._exchanges.broadcast(self._word)


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    exchanges = lonely_exchanges(MemoryLayout.of(2, 2 * WIDTH, max(ROWS)), device)
    sums = Sums(exchanges, device)
    exchanges.release()
    sums.launch(10)  # Compile the kernels.
    torch.cuda.synchronize()
    exchanges._asked[0] = 0
    exchanges._memory.own[:8].zero_()  # Clear the release, which the kernels have received.
    thread = threading.Thread(target=sums.launch, args=(LAUNCHES,), daemon=True)
    thread.start()
    before = -1
    while sums.count > before:
        before = sums.count
        time.sleep(2)
    assert 0 < sums.count < LAUNCHES, "the queue is not full"
    began = time.monotonic()
    exchanges.release()
    released = time.monotonic()
    thread.join(60)
    assert not thread.is_alive(), "the thread still waits"
    torch.cuda.synchronize()
    sys.stderr.write(
        f"{before} launches until the queue was full; "
        f"released in {1e6 * (released - began):.0f} us, "
        f"all {LAUNCHES} done {time.monotonic() - released:.2f} s after\n"
    )


if __name__ == "__main__":
    main()
