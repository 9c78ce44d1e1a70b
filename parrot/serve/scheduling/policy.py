"""The one place that knows which configuration key stands for which policy."""

from collections.abc import Callable

from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.scheduling.load import LoadIndex, QueuedBlocks, RunningPrefixes
from parrot.serve.scheduling.placement import Placer, PredictedSeconds
from parrot.serve.scheduling.queue import CriticalPath, OrderPolicy
from parrot.utils.clock import Clock

MakeOrder = Callable[[Clock], OrderPolicy]
MakePlacer = Callable[[LoadIndex, RunningPrefixes], Placer]


def order_maker(config: GlobalSchedulerConfig) -> MakeOrder:
    """Choose the configured order policy."""
    policy = config.policy if config.app_fifo else "fcfs"
    if policy == "critical_path":
        return CriticalPath
    if policy == "fcfs":
        return lambda clock: OrderPolicy()
    from parrot.serve.scheduling import baselines

    return baselines.AppFifo if policy == "app_fifo" else baselines.LeastAttainedService


def placer_maker(config: GlobalSchedulerConfig, index: PrefixIndex) -> MakePlacer:
    """Choose the configured placer. `index` has the cached prefixes of all engines."""
    if config.placement == "predicted":
        return lambda loads, running: PredictedSeconds(
            loads,
            running,
            QueuedBlocks(by_prefix=config.ctx_group, by_group=config.graph_group),
            index=index if config.ctx_aware else None,
            with_running=config.ctx_group,
        )
    from parrot.serve.scheduling import baselines

    is_turns = config.placement == "round_robin"
    return baselines.RoundRobin if is_turns else baselines.PrefixAware
