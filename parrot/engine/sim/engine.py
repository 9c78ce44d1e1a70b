"""The `sim` engine: the real core, scheduler and contexts over a runner that only takes time."""

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.runner_service import RunnerService
from parrot.engine.sim.driver import SimDriver
from parrot.engine.sim.runner import SimRunner
from parrot.engine.sim.tokenizer import byte_tokenizer_response
from parrot.protocol.engine_api import RuntimeInfo, StepCosts
from parrot.utils.clock import Clock, MonotonicClock


class SimService(RunnerService):
    """See `SimDriver` for `leaps`."""

    def __init__(self, config: SimConfig, clock: Clock, *, leaps: bool = False) -> None:
        runner = SimRunner(config.instance)
        core = EngineCore(config, runner, Language.of(byte_tokenizer_response()), clock)
        driver = SimDriver(core, clock, runner, leaps=leaps)
        super().__init__(config, driver, warm_up=False)
        self._sim_driver = driver
        self._slowness = 1.0

    def slow_down(self, factor: float) -> None:
        """From its next step on, every step takes `factor` times what it costs."""
        self._sim_driver.slow_down(factor)
        self._slowness = factor

    def runtime_info(self) -> RuntimeInfo:
        """Steps that run together are interrupted, so that the next look sees those that ended."""
        self._sim_driver.interrupt()
        info = super().runtime_info()
        if info.costs is None:  # not started yet
            return info
        costs = {name: self._slowness * cost for name, cost in info.costs.model_dump().items()}
        return info.model_copy(update={"costs": StepCosts(**costs)})


def create_sim_engine(config: SimConfig, clock: Clock | None = None) -> SimService:
    """On a virtual clock, many such engines simulate a cluster in one process, faster than real
    time (see `parrot.simulation`). Call it where an event loop runs."""
    return SimService(config, clock or MonotonicClock())
