"""One engine of a simulated cluster: its service, its app, and the client to it."""

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import HeartbeatRequest, RegisterRequest
from parrot.protocol.engine_client import EngineClient
from parrot.serve.core import ServeCore
from parrot.simulation.links import DistantTransport, fixed
from parrot.utils.clock import Clock


class SimEngine:
    """It is `rtt_s` away from ServeCore, but its heartbeats take no time."""

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
        """From its next step on, every step takes `factor` times what the cost model says."""
        self.service.slow_down(factor)

    async def kill(self) -> None:
        """End the engine as if its process died: all open and later requests fail with
        `Unavailable`."""
        self.is_alive = False
        await self.service.close()

    async def register(self, core: ServeCore) -> None:
        info = self.service.engine_info().model_copy(update={"incarnation": self.name})
        request = RegisterRequest(engine_config=info)
        self.engine_id = (await core.register_engine(request)).engine_id
        self.is_registered = True

    def beat(self, core: ServeCore) -> None:
        """Send a heartbeat. An engine that was only slow may not be registered any more then."""
        request = HeartbeatRequest(
            engine_id=self.engine_id,
            engine_name=self.name,
            runtime_info=self.service.runtime_info(),
        )
        self.is_registered = core.fleet.heartbeat(request).state != "unknown"

    async def come_back(self, core: ServeCore) -> None:
        """Register again, without what ServeCore has forgotten."""
        self._reorder.reset()
        await self.service.reset()
        await self.register(core)
