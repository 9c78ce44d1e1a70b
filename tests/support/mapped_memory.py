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

FEW_ROWS = 6  # which are sent as messages, in place of 64: the interpreter takes 10 ms for a row
_PAUSE_S = 0.002


@contextmanager
def for_the_interpreter() -> Iterator[None]:
    """Fewer rows make a message, and who waits for another rank leaves the few cores to it."""
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
    """A file for each rank, in a folder that all ranks use; a new one is all zeros. `turn`: as if
    there had been so many."""
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
    """Those of rank 0, whose messages to others go nowhere, and whom nobody answers."""
    parts = torch.zeros((layout.size, layout.num_bytes), dtype=torch.uint8, device=device)
    begins = [part.data_ptr() for part in parts]
    return Exchanges(SymmetricMemory.of(0, layout, parts[0], begins, keeps=parts))
