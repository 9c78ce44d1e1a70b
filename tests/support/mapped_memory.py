"""Memory that processes share through mapped files, for kernels in Triton's interpreter."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.kernels.ranks import exchanges, kernels, memory
from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MemoryLayout, SymmetricMemory
from tests.support import quick_interpreter

# Fewer rows than the real 64 are sent as messages, because a row takes 10 ms in the interpreter.
FEW_ROWS = 6
_PAUSE_S = 0.002


@contextmanager
def for_the_interpreter() -> Iterator[None]:
    """Send at most FEW_ROWS rows as messages, and sleep in kernels that wait, because other ranks
    need the few cores."""
    end_if_asked = kernels._end_if_aborted

    def pause(*args: Any) -> None:
        time.sleep(_PAUSE_S)
        end_if_asked(*args)

    quick_interpreter.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_end_if_aborted", pause)
        for module in (exchanges, memory):
            patch.setattr(module, "MESSAGE_ROWS", FEW_ROWS)
        yield


def mapped_exchanges(folder: Path, rank: int, layout: MemoryLayout, turn: int = 0) -> Exchanges:
    """The exchanges of a rank, with a memory file for each rank in `folder`, which all ranks share.
    A new file is all zeros. `turn` is the number of previous turns."""
    parts = [
        torch.from_file(
            str(folder / f"memory-{other}"), shared=True, size=layout.num_bytes, dtype=torch.uint8
        )
        for other in range(layout.size)
    ]
    begins = [part.data_ptr() for part in parts]
    memory = SymmetricMemory.of(rank, layout, parts[rank], begins, keeps=parts)
    memory.turns.fill_(turn)
    return Exchanges(memory)


def lonely_exchanges(layout: MemoryLayout, device: torch.device) -> Exchanges:
    """The exchanges of rank 0 without a peer: its messages are lost, and nothing answers it."""
    parts = torch.zeros((layout.size, layout.num_bytes), dtype=torch.uint8, device=device)
    begins = [part.data_ptr() for part in parts]
    return Exchanges(SymmetricMemory.of(0, layout, parts[0], begins, keeps=parts))
