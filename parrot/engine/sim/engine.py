"""The `sim` engine: the real core, scheduler and contexts over a runner that only takes time."""

from collections.abc import Mapping

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.runner_service import RunnerService
from parrot.engine.sim.driver import SimDriver
from parrot.engine.sim.runner import SimRunner, byte_tokenizer_response
from parrot.protocol.engine_api import RuntimeInfo, StepCosts
from parrot.utils.clock import Clock, MonotonicClock


class SimService(RunnerService):
    """Many on one virtual clock simulate a cluster in one process, faster than real time (see
    `parrot.simulation`). Make it where an event loop runs. See `SimDriver` for `leaps`."""

    def __init__(
        self, config: SimConfig, clock: Clock | None = None, *, leaps: bool = False
    ) -> None:
        clock = clock or MonotonicClock()
        runner = SimRunner(config.instance, clock)
        core = EngineCore(config, runner, Language.of(byte_tokenizer_response()), clock)
        self._sim_driver = SimDriver(core, clock, runner, leaps=leaps)
        super().__init__(config, self._sim_driver, warm_up=False)

    def slow_down(self, factor: float) -> None:
        """From its next step on, every step takes `factor` times what it costs."""
        self._sim_driver.slow_down(factor)

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """Steps that run together are interrupted, so that the next look sees those that ended."""
        self._sim_driver.interrupt()
        info = super().runtime_info(told)
        if info.costs is None:  # not started yet
            return info
        slowdown = self._sim_driver.slowdown
        costs = {name: slowdown * cost for name, cost in info.costs.model_dump().items()}
        return info.model_copy(update={"costs": StepCosts(**costs)})
