"""The `sim` engine: the real core, scheduler and contexts over a runner that only takes time."""

from parrot.engine.config import SimConfig
from parrot.engine.core import EngineCore
from parrot.engine.driver import AsyncDriver
from parrot.engine.output import Language
from parrot.engine.runner_service import RunnerService
from parrot.engine.sim.runner import SimRunner
from parrot.engine.sim.tokenizer import byte_tokenizer_response
from parrot.utils.clock import Clock, MonotonicClock


def create_sim_engine(config: SimConfig, clock: Clock | None = None) -> RunnerService:
    """On a `ManualClock`, many such engines simulate a cluster in one process, faster than real
    time. Call it where an event loop runs."""
    clock = clock or MonotonicClock()
    runner = SimRunner(config.instance)
    core = EngineCore(config, runner, Language.of(byte_tokenizer_response()), clock)
    return RunnerService(config, AsyncDriver(core, clock, runner.cost), warm_up=False)
