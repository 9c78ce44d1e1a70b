"""Where the servers are: running somewhere, launched here, or simulated on virtual time."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from benchmark.apps.backends import (
    CountedBackend,
    DelayedNetwork,
    openai_backend,
    parrot_backend,
    scrape,
)
from benchmark.apps.metrics import Run
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
from parrot.serve.config import GlobalSchedulerConfig
from parrot.simulation import SimCluster, fixed, run_virtual
from parrot.utils.addresses import is_loopback

ENGINE = "engine."
STYLES = ("parrot", "requests", "openai")

# What "off" means where a feature is a choice of rules: the first of these that there is.
_PLAIN = ("fcfs", "lru", "off", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison. `overrides`: keys of ServeCore's `global_scheduler`; over simulated
    engines `policy` and `placement` may name baselines. `engine`: keys of simulated engines'
    configs, with dots. `base_url`: a server that is not launched here."""

    name: str
    style: str
    overrides: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()
    base_url: str | None = None


def features() -> dict[str, Any]:
    """Each switchable feature with the value that switches it off."""
    found: dict[str, Any] = {}
    for name, field in GlobalSchedulerConfig.model_fields.items():
        if field.annotation is bool:
            found[name] = False
        elif get_origin(field.annotation) is Literal:
            choices = get_args(field.annotation)
            plain = next((value for value in _PLAIN if value in choices), None)
            if plain is not None:
                found[name] = plain
    return found


def parse_setting(text: str) -> Setting:
    """`STYLE[:WHAT]`. WHAT of `parrot` and `requests`: with commas, `on`, `all-off`, changes:
    `-policy` (off), `policy=fcfs`, `engine.tasks_capacity=8`. WHAT of `openai` is a URL.
    Raises `ValueError`."""
    style, _, what = text.partition(":")
    if style not in STYLES:
        raise ValueError(f"{text!r}: the style must be one of {', '.join(STYLES)}")
    if what.startswith(("http://", "https://")):
        return Setting(text, style, base_url=what)
    parts = [part for part in what.split(",") if not part.startswith(ENGINE)]
    engine = [
        part.removeprefix(ENGINE).partition("=") for part in what.split(",") if part not in parts
    ]
    return Setting(
        text,
        style,
        tuple(_overrides(text, parts).items()),
        tuple((name, _value(value)) for name, _, value in engine),
    )


def _overrides(text: str, parts: Sequence[str]) -> dict[str, Any]:
    known = features()
    overrides: dict[str, Any] = {}
    for part in parts:
        name, has_value, value = part.removeprefix("-").partition("=")
        if part == "all-off":
            overrides |= known
        elif part == "-placement":
            overrides["placement"] = "round_robin"
        elif part.startswith("-") and name in known:
            overrides[name] = known[name]
        elif has_value and name in GlobalSchedulerConfig.model_fields:
            overrides[name] = _value(value)
        elif part not in ("", "on"):
            raise ValueError(f"{text!r}: unknown part {part!r}; features: {', '.join(known)}")
    own = {name: value for name, value in overrides.items() if value not in NAMES}
    GlobalSchedulerConfig.model_validate(own)
    return overrides


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


QUEUE_SIZE = 100_000  # a whole workload may be queued
HEARTBEAT_S = 0.5  # so that engines soon find a restarted ServeCore
START_TIMEOUT_S = 600.0

Measure = Callable[[CountedBackend], Awaitable[Run]]
Config = dict[str, Any]


class Host(ABC):
    """`forgets`: a run's servers have no memory of earlier runs. Where they have, every run needs
    texts of its own: a warm cache would be an unfair advantage."""

    forgets = False

    def __init__(self, network: str) -> None:
        self._network = network

    @abstractmethod
    def tokenizer_json(self) -> str | None:
        """Of the model that is served; None: the host cannot tell."""

    @abstractmethod
    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        """`seed`: of the network's delays."""

    @abstractmethod
    def describe(self) -> Config:
        """The servers' configurations, for the report."""


class ServerHost(Host):
    """Servers that somebody else started. What they have in memory stays there."""

    def __init__(self, network: str, base_url: str, api_key: str | None, model: str | None) -> None:
        super().__init__(network)
        self._base_url = base_url
        self._api_key = api_key
        self._model = model

    def tokenizer_json(self) -> str | None:
        return asyncio.run(engine_tokenizer(self._base_url))

    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        url = setting.base_url or self._base_url
        return asyncio.run(self._run(setting, url, measure, seed))

    def describe(self) -> Config:
        return {"base_url": self._base_url}

    async def _run(self, setting: Setting, url: str, measure: Measure, seed: int) -> Run:
        backend = await self._connect(setting, url, DelayedNetwork(self._network, seed))
        try:
            return await measure(backend)
        finally:
            await backend.close()

    async def _connect(self, setting: Setting, url: str, network: DelayedNetwork) -> CountedBackend:
        if setting.style == "openai":
            return await openai_backend(url, network, self._model, self._api_key)
        client = ServeClient(HttpClient(url))
        metrics = scrape(url, own_token(url))
        return parrot_backend(client, metrics, network, whole_graph=setting.style == "parrot")


class ClusterHost(ServerHost):
    """ServeCore and engines on this machine. Engines are started once; ServeCore starts anew for
    each run, with its setting's features. Engines forget contexts by that, but not what they cache
    by content."""

    def __init__(
        self, network: str, paths: Sequence[Path], num_engines: int | None, log_dir: Path | None
    ) -> None:
        """Whoever uses it starts and stops its `cluster`."""
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
        super().__init__(network, self.cluster.core_url, None, None)

    def run(self, setting: Setting, measure: Measure, seed: int) -> Run:
        if setting.base_url is None:
            self._renew(setting)
        return super().run(setting, measure, seed)

    def describe(self) -> Config:
        return {"engines": self._configs}

    def _renew(self, setting: Setting) -> None:
        """A ServeCore with these features that has run nothing yet."""
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

    def tokenizer_json(self) -> str | None:
        async def ask() -> str | None:
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
            backend = parrot_backend(
                client, scrape_core, network, whole_graph=setting.style == "parrot"
            )
            return await measure(backend)


def own_token(url: str) -> str | None:
    """This user's cluster token for a server on this machine; elsewhere it would be given away."""
    return kept_token(state_dir=None) if is_loopback(urlsplit(url).hostname or "") else None


async def engine_tokenizer(base_url: str) -> str | None:
    """From the first engine of a ServeCore of this user; None if this is no ServeCore."""
    token = own_token(base_url)
    async with HttpClient(base_url, bearer_token=token) as http:
        try:
            ready = ReadyResponse.model_validate(await http.request("GET", "/ready"))
        except Exception:  # noqa: BLE001 - another kind of server: whatever it answers
            return None
    if not ready.engines:
        return None
    engine = ready.engines[0]
    url = f"http://{engine.host}:{engine.port}"
    client = EngineClient(HttpClient(url, bearer_token=token))
    try:
        return (await client.tokenizer()).tokenizer_json
    finally:
        await client.close()


def _sim_config(path: Path | None) -> SimConfig:
    payload: Mapping[str, Any] = {"engine_type": "sim"}
    if path is not None:
        _, (payload, *_) = read_configs([path], {})
    config = parse_engine_config(payload, str(path or "sim"))
    if not isinstance(config, SimConfig):
        raise ValueError(f"{path} is not the config of a sim engine")
    return config
