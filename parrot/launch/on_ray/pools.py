"""The servers to run on Ray, the node resources of each, and the number of engines of a pool as a
function of its load. Pure computation without I/O."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, model_validator

from parrot.launch.configs import Entry, Server, ServerConfig, plan
from parrot.protocol.public import EngineStatus
from parrot.utils.config import ConfigError, ConfigModel, parse_config

MAX_ENGINES = 1024


class Scaling(ConfigModel):
    """When a pool of engines grows and shrinks. Durations are in seconds."""

    min_engines: int = Field(
        1, ge=1, le=MAX_ENGINES, description="The pool never has fewer engines."
    )
    max_engines: int | None = Field(
        None,
        ge=1,
        le=MAX_ENGINES,
        description="The pool never has more engines. null: as `min_engines`, without scaling.",
    )
    queue_per_engine: float = Field(
        8.0,
        gt=0,
        le=1e6,
        description="Add an engine for every this many waiting calls, averaged over `window`.",
    )
    high_use: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Add an engine when the average use over `window` reaches this share. Use is "
        "the KV memory that calls need or their number, whichever share is larger.",
    )
    low_use: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Remove an engine if the others would have stayed below this use over the "
        "whole `idle_window`, and no call waited.",
    )
    window: float = Field(30.0, ge=10, le=86400, description="Time to decide on growth.")
    idle_window: float = Field(300.0, ge=10, le=86400, description="Time to decide on shrinking.")

    @model_validator(mode="after")
    def _is_in_order(self) -> "Scaling":
        if self.most < self.min_engines:
            raise ValueError("`max_engines` must be no less than `min_engines`")
        if self.low_use >= self.high_use:
            raise ValueError(
                "`low_use` must be less than `high_use`, or the pool would grow and shrink in turns"
            )
        return self

    @property
    def most(self) -> int:
        return self.min_engines if self.max_engines is None else self.max_engines


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load of a pool at one time."""

    num_serving: int  # Engines.
    num_queued: float  # Calls that wait for an engine.
    use: float  # Used share of the pool's capacity, from 0 to 1.


def pool_load(engines: Iterable[EngineStatus]) -> PoolLoad:
    """The load of a pool with these serving engines."""
    serving = list(engines)
    return PoolLoad(
        len(serving),
        max((engine.num_queued for engine in serving), default=0),
        max(
            _part(sum(e.needed_tokens for e in serving), sum(e.tokens_capacity for e in serving)),
            _part(sum(e.num_running for e in serving), sum(e.tasks_capacity for e in serving)),
        ),
    )


class Autoscaler:
    """Decides how many engines a pool should have, from the loads since the last change.

    The pool grows only after a whole `window` in which all wanted engines served, and shrinks only
    after a whole `idle_window`. An unknown load restarts both windows. `low_use` applies to the
    pool without the removed engine, so a removal never causes the pool to grow again."""

    def __init__(self, config: Scaling) -> None:
        self._config = config
        self.wanted = config.min_engines
        self._since: float | None = None
        self._loads: deque[tuple[float, PoolLoad]] = deque()

    def observe(self, now: float, load: PoolLoad | None) -> int:
        """The wanted number of engines after this load (None: unknown). `now`, in seconds, must
        never decrease."""
        if load is None:
            self._forget()
            return self.wanted
        config = self._config
        if self._loads and now - self._loads[-1][0] > config.window:
            self._forget()  # The loads since the last observation are unknown.
        if self._since is None:
            self._since = now
        self._loads.append((now, load))
        kept_from = now - max(config.window, config.idle_window)
        while self._loads[0][0] < kept_from:
            self._loads.popleft()
        change = self._num_to_add(now) or -self._num_to_remove(now)
        wanted = min(max(self.wanted + change, config.min_engines), config.most)
        if wanted != self.wanted:
            self.wanted = wanted
            self._forget()
        return self.wanted

    def adopt(self, num_engines: int) -> None:
        """Continue with the number of engines that already run."""
        self.wanted = min(max(num_engines, self._config.min_engines), self._config.most)
        self._forget()

    def _forget(self) -> None:
        self._since = None
        self._loads.clear()

    def _window(self, now: float, window_s: float) -> list[PoolLoad]:
        """The loads of the last `window_s` seconds. Empty until the observations cover them."""
        if self._since is None or self._since > now - window_s:
            return []
        return [load for at, load in self._loads if at >= now - window_s]

    def _num_to_add(self, now: float) -> int:
        loads = self._window(now, self._config.window)
        if not loads or any(load.num_serving < self.wanted for load in loads):
            return 0
        queued = sum(load.num_queued for load in loads) / len(loads)
        use = sum(load.use for load in loads) / len(loads)
        more = int(queued // self._config.queue_per_engine)
        return min(max(more, int(use >= self._config.high_use)), self.wanted)

    def _num_to_remove(self, now: float) -> int:
        loads = self._window(now, self._config.idle_window)
        if not loads or self.wanted == 1:
            return 0
        fullest = max(load.use * load.num_serving / (self.wanted - 1) for load in loads)
        waited = any(load.num_queued for load in loads)
        return int(fullest <= self._config.low_use and not waited)


def engines_to_remove(
    names: Sequence[str], serving: dict[str, EngineStatus], num_engines: int
) -> list[str]:
    """The engines to remove so that `num_engines` of `names` remain. Engines that do not serve go
    first, then engines with the fewest running calls, then later names."""

    def worth(item: tuple[int, str]) -> tuple[bool, int, int]:
        number, name = item
        engine = serving.get(name)
        return engine is not None, engine.num_running if engine else 0, -number

    ranked = [name for _, name in sorted(enumerate(names), key=worth)]
    return ranked[: max(0, len(names) - num_engines)]


def _part(taken: int, total: int) -> float:
    return taken / total if total else 0.0


Amount = Annotated[float, Field(ge=0, le=1e6)]


class ServerPlace(ConfigModel):
    """Node resources of a server."""

    num_cpus: Amount = Field(1.0, description="CPUs of one server.")
    resources: dict[str, Amount] = Field(
        {}, max_length=64, description="Custom resources of Ray: a server runs where they are."
    )


class EnginePlace(ServerPlace):
    """Node resources of each engine of an entry, and the number of engines."""

    num_gpus: Amount | None = Field(
        None,
        description="GPUs of one engine. null: `instance.tensor_parallel`, and 0 for engines "
        "without a GPU.",
    )
    scaling: Scaling = Field(Scaling(), description="Number of engines, and when it changes.")


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources of one node, as Ray counts them."""

    num_cpus: float
    num_gpus: float
    resources: dict[str, float]

    def __str__(self) -> str:
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines with the same config. `engine` is their template and has the pool's name."""

    engine: Server
    needs: Needs
    scaling: Scaling

    @property
    def name(self) -> str:
        return self.engine.name

    def names(self) -> list[str]:
        """The names of all engines that the pool may have."""
        if self.scaling.most == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(self.scaling.most)]

    def server(self, name: str) -> Server:
        """The engine with this name."""
        return replace(self.engine, name=name, config={**self.engine.config, "engine_name": name})


@dataclass(frozen=True, slots=True)
class RayPlan:
    core: Server
    core_needs: Needs
    pools: tuple[Pool, ...]


def ray_plan(core: Entry, engines: Sequence[Entry]) -> RayPlan:
    """The servers of a launch file and their node resources. Raises `ConfigError`."""
    planned = plan(core.config, [engine.config for engine in engines])
    pools = []
    for entry, server in zip(engines, planned.engines, strict=True):
        place = parse_config(EnginePlace, entry.place, f"{entry.where}.ray")
        num_gpus = _num_gpus(entry, place)
        needs = Needs(place.num_cpus, num_gpus, place.resources)
        pools.append(Pool(server, needs, place.scaling))
    names = [planned.core.name, *(name for pool in pools for name in pool.names())]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two servers are named {min(twice)!r}; set `engine_name`")
    own = parse_config(ServerPlace, core.place, f"{core.where}.ray")
    return RayPlan(planned.core, Needs(own.num_cpus, 0.0, own.resources), tuple(pools))


def _num_gpus(entry: Entry, place: EnginePlace) -> float:
    """Number of GPUs of one engine. Raises `ConfigError` for a config with a GPU index, because
    Ray assigns the GPUs."""
    device = entry.config.get("device", "auto")
    if device.startswith("cuda:"):
        raise ConfigError(
            f"{entry.where}: `device` is {device!r}, but Ray assigns the GPUs: use `cuda`"
        )
    ranks = _ranks(entry.config)
    if entry.config.get("engine_type") not in ("builtin", "huggingface") or device == "cpu":
        return place.num_gpus or 0.0
    num_gpus = float(ranks) if place.num_gpus is None else place.num_gpus
    if num_gpus > 1 and not math.isclose(num_gpus, round(num_gpus)):
        raise ConfigError(
            f"{entry.where}.ray: `num_gpus` is {num_gpus:g}: use at most 1, or a whole number"
        )
    if ranks > max(num_gpus, 1):
        raise ConfigError(
            f"{entry.where}.ray: `num_gpus` is {num_gpus:g}, but `tensor_parallel` needs {ranks}"
        )
    if not num_gpus and device == "cuda":
        raise ConfigError(f"{entry.where}.ray: `num_gpus` is 0, but `device` is cuda")
    return num_gpus


def _ranks(config: ServerConfig) -> int:
    ranks: int = config.get("instance", {}).get("tensor_parallel", 1)
    return ranks
