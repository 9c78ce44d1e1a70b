"""Memory that processes share through mapped files, for kernels in Triton's interpreter."""

from pathlib import Path

import torch

from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MAX_PROGRAMS, MemoryLayout, SymmetricMemory


def mapped_exchanges(folder: Path, rank: int, layout: MemoryLayout, turn: int = 0) -> Exchanges:
    """A file for each rank, in a folder that all ranks use; a new one is all zeros. `turn`: as if
    there had been so many."""
    parts = [
        torch.from_file(
            str(folder / f"memory-{other}"), shared=True, size=layout.num_bytes, dtype=torch.uint8
        )
        for other in range(layout.size)
    ]
    return Exchanges(
        SymmetricMemory(
            rank=rank,
            layout=layout,
            own=parts[rank],
            addresses=torch.tensor([part.data_ptr() for part in parts]),
            turns=torch.full((MAX_PROGRAMS,), turn, dtype=torch.int64),
            keeps=parts,
        )
    )
