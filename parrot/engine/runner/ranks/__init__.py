"""A runner divided among ranks: processes of one host that are one unit.

Rank 0 is the engine's process, with the block pool, the scheduler and the sampler. The others run
what it tells them of each step. If one of them ends, all do."""

from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.processes import RankProcesses
from parrot.engine.runner.ranks.steps import RankStep
from parrot.engine.runner.ranks.unit import RankCopies, Seat, Unit, together

__all__ = ["MemoryLayout", "RankCopies", "RankProcesses", "RankStep", "Seat", "Unit", "together"]
