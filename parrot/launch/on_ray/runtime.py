"""Calls to Ray: actors, placement groups and their names."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from parrot.launch.configs import Server
from parrot.launch.on_ray.actor import Address, ServerActor, ServerStatus
from parrot.launch.on_ray.pools import Needs

_END_MARGIN_S = 30.0  # Seconds beyond a server's own stop time after which its actor is killed.
_GET_S = 10.0  # Seconds to fetch a result that Ray reports as ready.


@dataclass(slots=True)
class _Remote:
    """An actor and its last request."""

    server: Server
    needs: Needs
    actor: Any
    group: PlacementGroup | None
    pending: Any = None  # Ray's reference to the pending answer.
    has_answered: bool = False
    problem: str = ""  # The actor's last error.
    kill_at: float | None = None  # Monotonic time when the actor is killed. None: not retired.


class RayRuntime:
    """Runs each server in its own actor. Ray restarts the actor on another node when its node dies.

    An engine with several GPUs has a placement group: all its GPUs are on one node and remain
    reserved while it restarts. With `is_detached`, servers outlive the process that starts them."""

    def __init__(self, namespace: str, *, is_detached: bool) -> None:
        self._namespace = namespace
        self._lifetime: Literal["detached"] | None = "detached" if is_detached else None
        self._remotes: dict[str, _Remote] = {}

    @property
    def names(self) -> Collection[str]:
        return self._remotes.keys()

    def start(self, server: Server, needs: Needs) -> None:
        group = self._group(server.name, needs) if needs.num_gpus > 1 else None
        self._remotes[server.name] = _Remote(
            server, needs, self._actor(server, needs, group), group
        )

    def retire(self, name: str) -> None:
        remote = self._remotes[name]
        if not remote.has_answered:  # The actor has never started its server.
            self._remove(name)
            return
        remote.pending = remote.actor.stop.remote()
        remote.kill_at = time.monotonic() + remote.server.stop_s + _END_MARGIN_S

    def poll(self, core: Address | None, timeout_s: float) -> dict[str, ServerStatus]:
        asked = {}
        for name, remote in self._remotes.items():
            if remote.pending is None:
                remote.pending = remote.actor.follow.remote(core)
            asked[remote.pending] = name
        if not asked:
            return {}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        statuses = {}
        for ref in done:
            if (status := self._answer(asked[ref], ref)) is not None:
                statuses[asked[ref]] = status
        now = time.monotonic()
        for name, remote in list(self._remotes.items()):
            if remote.kill_at is not None and now > remote.kill_at:
                self._remove(name)
        return statuses

    def problem(self, name: str) -> str:
        remote = self._remotes[name]
        return remote.problem or f"waits for a node with {remote.needs}"

    def _answer(self, name: str, ref: Any) -> ServerStatus | None:
        remote = self._remotes[name]
        remote.pending = None
        try:
            status: ServerStatus | None = ray.get(ref, timeout=_GET_S)
        except (RayError, GetTimeoutError) as error:
            remote.problem = str(error)
            status = None
            if isinstance(error, ActorDiedError) and remote.kill_at is None:
                remote.actor = self._actor(remote.server, remote.needs, remote.group)
        else:
            remote.has_answered = True
        if remote.kill_at is not None:  # The server has stopped, or its node has died.
            self._remove(name)
            return None
        return status

    def _actor(self, server: Server, needs: Needs, group: PlacementGroup | None) -> Any:
        options: dict[str, Any] = {
            "name": server.name,
            "namespace": self._namespace,
            "get_if_exists": True,
            "lifetime": self._lifetime,
            "max_restarts": -1,
            "num_cpus": needs.num_cpus,
            "num_gpus": needs.num_gpus,
            "resources": {name: amount for name, amount in needs.resources.items() if amount},
        }
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            )
        kind = ray.remote(ServerActor).options(**options)
        return kind.remote(server, hides_gpus=not needs.num_gpus)

    def _group(self, name: str, needs: Needs) -> PlacementGroup:
        full_name = f"{self._namespace}/{name}"
        try:
            return get_placement_group(full_name)
        except ValueError:  # No such group exists.
            amounts = {"CPU": needs.num_cpus, "GPU": needs.num_gpus, **needs.resources}
            bundle = {kind: amount for kind, amount in amounts.items() if amount}
            return placement_group(
                [bundle], strategy="STRICT_PACK", name=full_name, lifetime=self._lifetime
            )

    def _remove(self, name: str) -> None:
        remote = self._remotes.pop(name)
        ray.kill(remote.actor, no_restart=True)
        if remote.group is not None:
            remove_placement_group(remote.group)


def existing_servers(namespace: str) -> list[str]:
    """The names of all actors in a namespace."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == namespace]


def existing_groups(namespace: str) -> list[str]:
    """The full names of the placement groups of a namespace's engines."""
    groups = ray.util.placement_group_table().values()
    names = [group["name"] for group in groups if group["state"] != "REMOVED"]
    return [name for name in names if name.rpartition("/")[0] == namespace]
