"""One engine of a simulated cluster, with its service, its app and a client."""

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import HeartbeatRequest, RegisterRequest
from parrot.protocol.engine_client import EngineClient
from parrot.serve.core import ServeCore
from parrot.simulation.links import DistantTransport, fixed
from parrot.utils.clock import Clock


class SimEngine:
    """A simulated engine. Requests to it take `rtt_s` for a round trip. Heartbeats take no time."""

    def __init__(self, config: SimConfig, clock: Clock, rtt_s: float, *, leaps: bool) -> None:
        self.name = config.engine_name
        self.service = SimService(config, clock, leaps=leaps)
        self._reorder = ReorderBuffer(clock)
        app = create_app(self.service, self._reorder, config, self.name)
        self.client = EngineClient(DistantTransport(app, fixed(rtt_s)))
        self.engine_id = -1
        self.is_registered = False
        self.is_alive = True

    def slow_down(self, factor: float) -> None:
        """Multiply the duration of all steps from the next one by `factor`."""
        self.service.slow_down(factor)

    async def kill(self) -> None:
        """Simulate the death of the engine's process. All open and later requests fail with
        `Unavailable`."""
        self.is_alive = False
        await self.service.close()

    async def register(self, core: ServeCore) -> None:
        info = self.service.engine_info().model_copy(update={"incarnation": self.name})
        request = RegisterRequest(engine_config=info)
        self.engine_id = (await core.register_engine(request)).engine_id
        self.is_registered = True

    def beat(self, core: ServeCore) -> None:
        """Send a heartbeat. Sets `is_registered` to False if ServeCore has removed the engine, for
        example because it was slow."""
        request = HeartbeatRequest(
            engine_id=self.engine_id,
            engine_name=self.name,
            runtime_info=self.service.runtime_info(),
        )
        self.is_registered = core.fleet.heartbeat(request).state != "unknown"

    async def come_back(self, core: ServeCore) -> None:
        """Drop all contexts and register again."""
        self._reorder.reset()
        await self.service.reset()
        await self.register(core)
