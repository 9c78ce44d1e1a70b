"""Tensor parallelism: the processes of one host that run a model together, called ranks.

Rank 0 is the engine's process, with the block pool, the scheduler and the sampler. The other ranks
run the steps that rank 0 sends. If one rank exits, all ranks exit."""

from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.processes import RankProcesses
from parrot.engine.runner.ranks.steps import RankStep
from parrot.engine.runner.ranks.unit import RankCopies, RankMember, Unit, together

__all__ = [
    "MemoryLayout",
    "RankCopies",
    "RankMember",
    "RankProcesses",
    "RankStep",
    "Unit",
    "together",
]
