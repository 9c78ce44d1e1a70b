"""The one place that knows which configuration key stands for which policy."""

from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.context_index import PrefixIndex
from parrot.serve.scheduler.cost import RunningPrefixes
from parrot.serve.scheduler.order import AppFifo, Arrival, CriticalPath, NoApps
from parrot.serve.scheduler.placement import (
    ContextAware,
    ContextGroup,
    GraphGroup,
    LatencyBound,
    PlacementPolicy,
)
from parrot.utils.clock import Clock


def build_order(config: GlobalSchedulerConfig, clock: Clock) -> NoApps:
    inner = CriticalPath() if config.policy == "critical_path" else Arrival()
    return AppFifo(inner, clock) if config.app_fifo else NoApps(inner)


def build_placement(
    config: GlobalSchedulerConfig, index: PrefixIndex, running: RunningPrefixes
) -> list[PlacementPolicy]:
    policies: list[PlacementPolicy] = [LatencyBound()]
    if config.ctx_aware:
        policies.append(ContextAware(index))
    if config.ctx_group:
        policies.append(ContextGroup(running))
    if config.graph_group:
        policies.append(GraphGroup())
    return policies
