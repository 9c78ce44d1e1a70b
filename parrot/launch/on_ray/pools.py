"""Which servers are to run on Ray, and what each takes of a node."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from parrot.launch.configs import Entry
from parrot.launch.plan import Config, Server, plan
from parrot.launch.scaling import Scaling
from parrot.utils.config import ConfigError, ConfigModel, parse_config

Amount = Annotated[float, Field(ge=0, le=1e6)]


class Place(ConfigModel):
    """The needs of a server, which its node gives."""

    num_cpus: Amount = 1.0
    resources: dict[str, Amount] = Field(
        {}, max_length=64, description="Custom resources of Ray: a server runs where they are."
    )


class EnginePlace(Place):
    """The needs of each engine of a pool, and their number."""

    num_gpus: Amount | None = Field(
        None,
        description="null: as many as `instance.tensor_parallel`; none for devices without, and "
        "for engines that run no model themselves.",
    )
    scaling: Scaling = Scaling()


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
    """Engines of one config; `engine` is named as the pool."""

    engine: Server
    needs: Needs
    scaling: Scaling

    @property
    def name(self) -> str:
        return self.engine.name

    def names(self) -> list[str]:
        """The names of all engines that there may be."""
        if self.scaling.most == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(self.scaling.most)]

    def server(self, name: str) -> Server:
        """The engine of this name."""
        return replace(self.engine, name=name, config={**self.engine.config, "engine_name": name})


@dataclass(frozen=True, slots=True)
class RayPlan:
    core: Server
    core_needs: Needs
    pools: tuple[Pool, ...]


def ray_plan(core: Entry, engines: Sequence[Entry]) -> RayPlan:
    """The servers of a launch file and their needs. Raises `ConfigError`."""
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
    own = parse_config(Place, core.place, f"{core.where}.ray")
    return RayPlan(planned.core, Needs(own.num_cpus, 0.0, own.resources), tuple(pools))


def _num_gpus(entry: Entry, place: EnginePlace) -> float:
    """GPUs of one engine. Ray says which: a config that names one is refused."""
    device = entry.config.get("device", "auto")
    if device.startswith("cuda:"):
        raise ConfigError(f"{entry.where}: `device`: Ray chooses; say `cuda`, not {device!r}")
    ranks = _ranks(entry.config)
    if entry.config.get("engine_type") not in ("builtin", "huggingface") or device == "cpu":
        return place.num_gpus or 0.0
    num_gpus = float(ranks) if place.num_gpus is None else place.num_gpus
    if num_gpus > 1 and not math.isclose(num_gpus, round(num_gpus)):
        raise ConfigError(f"{entry.where}.ray: `num_gpus`: a part of a GPU, or whole ones")
    if ranks > max(num_gpus, 1):
        raise ConfigError(
            f"{entry.where}.ray: `num_gpus`: {num_gpus:g} are too few for `tensor_parallel` {ranks}"
        )
    if not num_gpus and device == "cuda":
        raise ConfigError(f"{entry.where}.ray: `num_gpus`: `device` cuda needs one")
    return num_gpus


def _ranks(config: Config) -> int:
    ranks: int = config.get("instance", {}).get("tensor_parallel", 1)
    return ranks
