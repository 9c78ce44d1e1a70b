"""A whole cluster in one event loop: the real ServeCore with `sim` engines, without sockets."""

from functools import cached_property
from types import TracebackType
from typing import Any, Self

from parrot.engine.config import SimConfig
from parrot.observe.recorder import Recorder
from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.trace import TraceSink
from parrot.protocol.transport import App
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.tasks import Sandbox
from parrot.server.app import create_app
from parrot.simulation.engine import SimEngine
from parrot.simulation.links import LAN_RTT_S, DistantTransport, Latency, lan
from parrot.simulation.loop import LoopClock
from parrot.simulation.natives import BlockingSandbox
from parrot.utils.tasks import TaskSet

PATIENT = CoreConfig(
    engine_heartbeat_timeout=1e9,
    session_life_span=1e9,
    max_sessions_num=2**31 - 1,
    max_engines_num=2**31 - 1,
)
"""A config in which sessions and engines do not expire, so that only requests cause events."""

_MAX_HEARTBEAT_TIMEOUT_S = (
    1e6  # Seconds: with a shorter heartbeat timeout, the engines send heartbeats.
)
_BEATS_PER_TIMEOUT = 3  # Heartbeats per heartbeat timeout.


class SimCluster:
    """A simulated cluster. Use it as an async context manager in `run_virtual`. On any other event
    loop it runs in real time.

        async def main():
            async with SimCluster(4) as cluster:
                client = cluster.client(wan(seed=1))
                session = await client.create_session()
                ...
        run_virtual(main())

    `engine`: config of the engines. `core`: config of ServeCore, default `PATIENT`. `sandbox`: runs
    native functions, default a `BlockingSandbox`. `trace`: receives all events of programs. With a
    heartbeat timeout below 1e6 s, one task sends the heartbeats of all live engines. `leaps` False:
    each engine step is a separate event, which is slower and has the same result. Use it on loops
    other than `VirtualLoop`."""

    def __init__(
        self,
        num_engines: int = 0,
        *,
        engine: SimConfig | None = None,
        core: CoreConfig | None = None,
        engine_rtt_s: float = LAN_RTT_S,
        sandbox: Sandbox | None = None,
        trace: TraceSink | None = None,
        leaps: bool = True,
    ) -> None:
        self.clock = LoopClock()
        self.engines: dict[str, SimEngine] = {}
        self._num_engines = num_engines
        self._engine_config = engine or SimConfig()
        self._rtt_s = engine_rtt_s
        self._leaps = leaps
        config = core or PATIENT
        self.core = ServeCore(
            config,
            clock=self.clock,
            dispatcher=self.make_dispatcher(config),
            sandbox=sandbox or BlockingSandbox(),
            sinks=() if trace is None else (Recorder(trace, self.clock).sink,),
        )
        self._clients: list[ServeClient] = []
        self._tasks = TaskSet()
        self._num_named = 0

    def make_dispatcher(self, config: CoreConfig) -> Dispatcher:
        """Create the dispatcher. Override this method to test another one."""
        return Dispatcher(config, self.clock, self.connect)

    def connect(self, info: EngineInfo) -> EngineClient:
        return self.engines[info.engine_name].client

    async def __aenter__(self) -> Self:
        for _ in range(self._num_engines):
            await self.add_engine()
        if self.core.config.engine_heartbeat_timeout < _MAX_HEARTBEAT_TIMEOUT_S:
            self._tasks.spawn(self._beat(), name="heartbeats")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._tasks.close()
        for client in self._clients:
            await client.close()
        await self.core.close()
        for engine in self.engines.values():
            await engine.service.close()

    @cached_property
    def app(self) -> App:
        """ServeCore's app, created on first use because that is slow."""
        return create_app(self.core)

    @property
    def _app(self) -> App:  # The former name of `app`.
        return self.app

    def client(self, latency: Latency | None = None) -> ServeClient:
        """A client with this network latency (default: LAN)."""
        client = ServeClient(DistantTransport(self.app, latency or lan()))
        self._clients.append(client)
        return client

    async def add_engine(self, config: SimConfig | None = None, **changes: Any) -> SimEngine:
        """Start and register an engine. `config`: default the cluster's `engine`. `changes`: keys
        to override. The name is `engine<n>` unless `changes` has `engine_name`."""
        name = f"engine{self._num_named}"
        self._num_named += 1
        base = config or self._engine_config
        own = base.model_copy(update={"engine_name": name} | changes)
        engine = self.engines[own.engine_name] = SimEngine(
            own, self.clock, self._rtt_s, leaps=self._leaps
        )
        await engine.service.start()
        await engine.register(self.core)
        return engine

    def check_integrity(self) -> None:
        """Check all counters of ServeCore and of the live engines. Call it only while no engine
        step is running, preferably when the cluster is idle."""
        self.core.check_integrity()
        for engine in self.engines.values():
            if engine.is_alive:
                engine.service.check_integrity()

    async def _beat(self) -> None:
        while True:
            await self.clock.sleep(self.core.config.engine_heartbeat_timeout / _BEATS_PER_TIMEOUT)
            for engine in list(self.engines.values()):
                if engine.is_alive and engine.is_registered:
                    engine.beat(self.core)
                    if not engine.is_registered:
                        name = f"{engine.name} comes back"
                        self._tasks.spawn(engine.come_back(self.core), name=name)
