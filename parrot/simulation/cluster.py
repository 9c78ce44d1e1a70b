"""A whole cluster in one event loop: the real ServeCore over `sim` engines, without sockets."""

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
"""ServeCore without expiry or heartbeats: nothing happens that nobody asked for."""

_BEATS = 1e6  # heartbeat timeouts up to this are meant, so the engines beat
_BEATS_PER_TIMEOUT = 3


class SimCluster:
    """Use as an async context manager, in `run_virtual` (any loop will do, in real time):

        async def main():
            async with SimCluster(4) as cluster:
                client = cluster.client(wan(seed=1))
                session = await client.create_session()
                ...
        run_virtual(main())

    `engine`: what engines are made from; `core`: default `PATIENT`; `sandbox`: where native
    functions run, default a `BlockingSandbox`; `trace`: is told of all that programs do. With a
    heartbeat timeout of less than 1e6 s the engines that are alive send heartbeats (one task for
    all). Without `leaps` every step of an engine is an event of its own: the same, but slower; on
    other loops than a `VirtualLoop` that is right."""

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
        """Make what places calls. Override it to try something else."""
        return Dispatcher(config, self.clock, self.connect)

    def connect(self, info: EngineInfo) -> EngineClient:
        return self.engines[info.engine_name].client

    async def __aenter__(self) -> Self:
        for _ in range(self._num_engines):
            await self.add_engine()
        if self.core.config.engine_heartbeat_timeout < _BEATS:
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
        """ServeCore's, made when it is first asked for: that takes a moment."""
        return create_app(self.core)

    @property
    def _app(self) -> App:  # as `app` was called once
        return self.app

    def client(self, latency: Latency | None = None) -> ServeClient:
        """A program `latency` away; default a LAN."""
        client = ServeClient(DistantTransport(self.app, latency or lan()))
        self._clients.append(client)
        return client

    async def add_engine(self, config: SimConfig | None = None, **changes: Any) -> SimEngine:
        """Start and register one more. `config`: default the cluster's; `changes`: its keys that
        differ. Its name is `engine<n>` unless `changes` names it."""
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
        """Recount every book of ServeCore and of the engines that are alive. Only while no step is
        under way, so best when all is idle."""
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
