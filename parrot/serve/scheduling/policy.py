"""The one place that knows which configuration key stands for which policy."""

from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.scheduling.blocks import QueuedBlocks, RunningPrefixes
from parrot.serve.scheduling.load_index import LoadIndex
from parrot.serve.scheduling.order import AppFifo, CriticalPath, LeastAttainedService, OrderPolicy
from parrot.serve.scheduling.placement import GraphGroups, Placer, PredictedSeconds
from parrot.serve.scheduling.routers import PrefixAware, RoundRobin
from parrot.utils.clock import Clock


def build_order(config: GlobalSchedulerConfig, clock: Clock) -> OrderPolicy:
    policy = config.policy if config.app_fifo else "fcfs"
    match policy:
        case "critical_path":
            return CriticalPath(clock)
        case "las":
            return LeastAttainedService(clock)
        case "app_fifo":
            return AppFifo(clock)
        case "fcfs":
            return OrderPolicy()


def build_placer(
    config: GlobalSchedulerConfig, index: PrefixIndex, loads: LoadIndex, running: RunningPrefixes
) -> Placer:
    match config.placement:
        case "predicted":
            blocks = QueuedBlocks(by_prefix=config.ctx_group, by_group=config.graph_group)
            return PredictedSeconds(
                loads,
                running,
                blocks,
                index=index if config.ctx_aware else None,
                with_running=config.ctx_group,
                groups=GraphGroups() if config.graph_group else None,
            )
        case "round_robin":
            return RoundRobin(loads, running)
        case "prefix_aware":
            return PrefixAware(loads, running)
