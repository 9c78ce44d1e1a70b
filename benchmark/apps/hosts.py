"""The servers of a run: launched on this machine, or simulated on virtual time."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.apps.backends import (
    CountedBackend,
    DelayedNetwork,
    parrot_backend,
)
from benchmark.apps.metrics import Run
from benchmark.apps.settings import Setting
from benchmark.serve.baselines import NAMES, cluster_with
from benchmark.simulated import changed, core_config
from parrot.cluster import Cluster
from parrot.cluster.cluster import CORE
from parrot.engine.config import SimConfig, parse_engine_config
from parrot.launch.configs import read_configs
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.public import ReadyResponse
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.server_config import kept_token
from parrot.simulation import SimCluster, fixed, run_virtual

QUEUE_SIZE = 100_000  # Large enough for a whole workload.
HEARTBEAT_S = 0.5  # Short, so that engines soon find a restarted ServeCore.
METRICS_BYTES = 16 << 20
START_TIMEOUT_S = 600.0

Measure = Callable[[CountedBackend], Awaitable[Run]]
Config = dict[str, Any]


class Host(ABC):
    """Starts the servers of a run. `forgets`: the servers keep no caches between runs. Otherwise
    each setting needs its own texts, or it would hit caches of the previous setting."""

    forgets = False

    def __init__(self, network: str) -> None:
        self._network = network

    @abstractmethod
    def tokenizer_json(self) -> str:
        """The tokenizer of the served model."""

    @abstractmethod
    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        """`seed` determines the network's delays."""

    @abstractmethod
    def describe(self) -> Config:
        """The servers' configurations, for the report."""


class ClusterHost(Host):
    """ServeCore and engines on this machine. Engines start once. ServeCore restarts before each
    run, with its setting's features. Engines then forget contexts, but keep their prefix caches."""

    def __init__(
        self, network: str, paths: Sequence[Path], num_engines: int | None, log_dir: Path | None
    ) -> None:
        """The caller starts and stops `cluster`."""
        super().__init__(network)
        core, engines = read_configs(paths, {})
        if num_engines is not None:
            engines = [dict(engines[i % len(engines)]) for i in range(num_engines)]
        for engine in engines:
            engine.pop("port", None)
            engine.pop("engine_name", None)
            engine["heartbeat_interval"] = HEARTBEAT_S
        core.pop("port", None)
        self._usual = {"max_queue_size": QUEUE_SIZE} | core.get("global_scheduler", {})
        core["global_scheduler"] = self._features = self._usual
        self._configs = engines
        self._is_used = False
        self.cluster = Cluster(core, engines, log_dir=log_dir, ready_timeout_s=START_TIMEOUT_S)

    def tokenizer_json(self) -> str:
        return asyncio.run(self._tokenizer_json())

    async def _tokenizer_json(self) -> str:
        async with self._http(self.cluster.core_url) as http:
            ready = ReadyResponse.model_validate(await http.request("GET", "/ready"))
        engine = ready.engines[0]
        client = EngineClient(self._http(f"http://{engine.host}:{engine.port}"))
        try:
            return (await client.tokenizer()).tokenizer_json
        finally:
            await client.close()

    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        self._renew(setting)
        return asyncio.run(self._run(setting, measure, seed))

    def describe(self) -> Config:
        return {"engines": self._configs}

    async def _run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        url, network = self.cluster.core_url, DelayedNetwork(self._network, seed)

        async def scrape() -> str:
            async with self._http(url) as http:
                return await http.text("/metrics", limit=METRICS_BYTES, timeout_s=10.0)

        client = ServeClient(HttpClient(url))
        backend = parrot_backend(client, scrape, network, whole_graph=setting.whole_graph)
        try:
            return await measure(backend)
        finally:
            await backend.close()

    def _http(self, url: str) -> HttpClient:
        return HttpClient(url, bearer_token=kept_token(state_dir=None))

    def _renew(self, setting: Setting) -> None:
        """Restart ServeCore with the setting's features, unless it is unused and has them."""
        features = self._usual | dict(setting.overrides)
        if self._is_used or features != self._features:
            self.cluster.configs[CORE]["global_scheduler"] = self._features = features
            self.cluster.restart(CORE)
            self.cluster.wait_ready()
        self._is_used = True


class SimHost(Host):
    """The real ServeCore over `sim` engines, on virtual time."""

    forgets = True

    def __init__(self, network: str, path: Path | None, num_engines: int) -> None:
        super().__init__(network)
        self._config = _sim_config(path)
        self._num_engines = num_engines

    def tokenizer_json(self) -> str:
        async def ask() -> str:
            async with SimCluster(1, engine=self._config) as cluster:
                (engine,) = cluster.engines.values()
                return (await engine.client.tokenizer()).tokenizer_json

        return run_virtual(ask())

    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        return run_virtual(self._run(setting, measure, seed))

    def describe(self) -> Config:
        return {"engines": self._num_engines, "engine": self._config.model_dump(mode="json")}

    async def _run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        baselines = [value for _, value in setting.overrides if value in NAMES]
        own = {name: value for name, value in setting.overrides if value not in NAMES}
        core = core_config(**({"max_queue_size": QUEUE_SIZE} | own))
        engine = changed(self._config, **dict(setting.engine))
        make = cluster_with(*baselines)
        async with make(self._num_engines, engine=engine, core=core) as cluster:
            network = DelayedNetwork(self._network, seed, asyncio.sleep)

            async def scrape_core() -> str:
                return b"".join(cluster.core.metrics()).decode()

            client = cluster.client(fixed(0.0))
            backend = parrot_backend(client, scrape_core, network, whole_graph=setting.whole_graph)
            return await measure(backend)


def _sim_config(path: Path | None) -> SimConfig:
    payload: Mapping[str, Any] = {"engine_type": "sim"}
    if path is not None:
        _, (payload, *_) = read_configs([path], {})
    config = parse_engine_config(payload, str(path or "sim"))
    if not isinstance(config, SimConfig):
        raise ValueError(f"{path} is not the config of a sim engine")
    return config
