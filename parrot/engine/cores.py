"""Where an engine registers: ServeCore, its standbys, and others that share the engine."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from parrot.utils.config import ConfigModel

PositiveInt = Annotated[int, Field(ge=1)]
_FAILOVER_BEAT_S = 1.0
_SHARING_BEAT_S = 0.5  # a lease moves in three beats


class ServeCoreAddress(ConfigModel):
    host: str = "localhost"
    port: int = Field(9000, ge=1, le=65535)


class ShardCore(ServeCoreAddress):
    standbys: tuple[ServeCoreAddress, ...] = Field(
        (), strict=False, max_length=16, description="As `standby_cores`."
    )


class RegisteredConfig(ConfigModel):
    """The keys of an engine that have to do with whom it works for."""

    tasks_capacity: PositiveInt = Field(
        256, description="Completions that ServeCore may place here at once."
    )
    heartbeat_interval: float = Field(3.0, gt=0.0, description="In seconds.")
    serve_core: ServeCoreAddress = ServeCoreAddress()
    standby_cores: tuple[ServeCoreAddress, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Others that may serve in the place of `serve_core`, with the same journal: "
        "the engine is registered with the one that does (docs/standby.md), and its heartbeats are "
        "at most a second apart.",
    )
    shard_cores: tuple[ShardCore, ...] = Field(
        (),
        strict=False,
        max_length=63,
        description="Other ServeCores that the engine works for besides, each with sessions of its "
        "own (docs/shards.md): it is registered with all, divides its capacity among them, and its "
        "heartbeats are at most half a second apart.",
    )

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        if self.shard_cores:
            return min(self.heartbeat_interval, _SHARING_BEAT_S)
        if not self.standby_cores:
            return self.heartbeat_interval
        return min(self.heartbeat_interval, _FAILOVER_BEAT_S)

    @property
    def core_groups(self) -> list[list[ServeCoreAddress]]:
        """The ServeCores that it is registered with: each with its standbys."""
        others = [[core, *core.standbys] for core in self.shard_cores]
        return [[self.serve_core, *self.standby_cores], *others]

    @property
    def num_cores(self) -> int:
        """Number of ServeCores that share it."""
        return 1 + len(self.shard_cores)

    @model_validator(mode="after")
    def _is_enough_for_all(self) -> Self:
        if self.tasks_capacity < self.num_cores:
            raise ValueError(f"`tasks_capacity` must be {self.num_cores}: one for each ServeCore")
        addresses = [(core.host, core.port) for group in self.core_groups for core in group]
        if self.shard_cores and len(set(addresses)) < len(addresses):
            raise ValueError("`shard_cores`: two ServeCores have the same address")
        return self
