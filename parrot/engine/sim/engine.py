"""The `sim` engine: the real core, scheduler and contexts over a runner that only takes time."""

from parrot.engine.config import SimConfig
from parrot.engine.core import EngineCore
from parrot.engine.driver import AsyncDriver
from parrot.engine.output import Language
from parrot.engine.plan import StepPlan
from parrot.engine.runner_service import RunnerService
from parrot.engine.sim.runner import SimRunner
from parrot.engine.sim.tokenizer import byte_tokenizer_response
from parrot.utils.clock import Clock, MonotonicClock


class SimService(RunnerService):
    """`slowdown` multiplies the time of every step that begins from now on."""

    def __init__(self, config: SimConfig, clock: Clock) -> None:
        self.slowdown = 1.0
        self._runner = SimRunner(config.instance)
        core = EngineCore(config, self._runner, Language.of(byte_tokenizer_response()), clock)
        super().__init__(config, AsyncDriver(core, clock, self._cost), warm_up=False)

    def _cost(self, plan: StepPlan) -> float:
        return self.slowdown * self._runner.cost(plan)


def create_sim_engine(config: SimConfig, clock: Clock | None = None) -> SimService:
    """On a virtual clock, many such engines simulate a cluster in one process, faster than real
    time (see `parrot.simulation`). Call it where an event loop runs."""
    return SimService(config, clock or MonotonicClock())
