"""Memory that processes share through mapped files, for kernels in Triton's interpreter."""

from pathlib import Path

import torch

from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MemoryLayout, SymmetricMemory


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
