"""All workloads, by name."""

from benchmark.apps.workloads.loops import BestOfN, Rag, RefineLoop, ToolPause
from benchmark.apps.workloads.mix import JobMix
from benchmark.apps.workloads.shared_prompts import Copilot, FanoutCold, Gpts, Load256, Roots4
from benchmark.apps.workloads.traffic import ChainBackground, Mixed
from parrot.cli.bench.plan import Workload
from parrot.cli.bench.workloads import Chain, ChainMany, MapReduce, MultiAgent

WORKLOADS: dict[str, type[Workload]] = {
    kind.NAME: kind
    for kind in (
        Chain,
        ChainBackground,
        ChainMany,
        MapReduce,
        Copilot,
        Gpts,
        MultiAgent,
        Mixed,
        RefineLoop,
        BestOfN,
        Rag,
        ToolPause,
        FanoutCold,
        Roots4,
        Load256,
        JobMix,
    )
}
