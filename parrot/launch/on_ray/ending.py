"""The end of a service on a Ray cluster, whatever of it is left."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, remove_placement_group

from parrot.cluster import ClusterError
from parrot.launch.on_ray.runtime import existing_groups, existing_servers
from parrot.launch.plan import CORE_NAME

SUPERVISOR = "supervisor"
ANSWER_S = 60.0  # what asking a supervisor may take
_PLACED_S = 20.0  # for a server's actor to answer, if it has a place
_MARGIN_S = 30.0  # beyond the time that a server may take to end
_FOLLOWS_S = 15.0  # for a launcher that waits elsewhere to notice that its servers have ended
_PAUSE_S = 0.25


def end_service(namespace: str) -> list[str]:
    """End all that a launch has begun in this namespace, after its calls: also what nobody
    supervises any more. Returns the names of what there was. Raises `ClusterError` if there was
    nothing, or something is left."""
    found = existing_servers(namespace)
    groups = existing_groups(namespace)
    if not (found or groups):
        raise ClusterError(f"there is no service named {namespace.removeprefix('parrot-')!r}")
    if SUPERVISOR in found:
        _ask_supervisor(namespace)
    _end_servers(existing_servers(namespace), namespace)
    for name in existing_groups(namespace):
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))
    if left := _still_there(namespace, ANSWER_S):
        raise ClusterError(f"still there: {', '.join(left)}")
    return sorted({*found, *(group.rpartition("/")[2] for group in groups)})


def _ask_supervisor(namespace: str) -> None:
    """Let the supervisor end its servers, and see to it that it is gone itself."""
    try:
        actor = ray.get_actor(SUPERVISOR, namespace)
    except ValueError:  # it has gone
        return
    with suppress(RayError):  # it has ended, or died while it ended the others
        patience_s = ray.get(actor.stop_s.remote(), timeout=ANSWER_S)
        ray.get(actor.stop.remote(), timeout=patience_s + ANSWER_S)
    ray.kill(actor, no_restart=True)


def _end_servers(names: Sequence[str], namespace: str) -> None:
    """End servers without their supervisor, engines first."""
    engines = [name for name in names if name != CORE_NAME]
    for group in (engines, [name for name in names if name == CORE_NAME]):
        _ask_to_stop(_actors(group, namespace))
    for actor in _actors(_still_there(namespace, _FOLLOWS_S) if names else (), namespace):
        ray.kill(actor, no_restart=True)


def _ask_to_stop(actors: Sequence[Any]) -> None:
    """Return when the servers of all actors that have a place have ended, or their time is over."""
    if not actors:
        return
    asked = {actor.stop_s.remote(): actor for actor in actors}
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PLACED_S)
    ending, longest_s = [], 0.0
    for answer in answers:
        with suppress(RayError):
            longest_s = max(longest_s, ray.get(answer, timeout=_PLACED_S))
            ending.append(asked[answer].stop.remote())
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=longest_s + _MARGIN_S)


def _actors(names: Sequence[str], namespace: str) -> list[Any]:
    found = []
    for name in names:
        with suppress(ValueError):  # it has gone
            found.append(ray.get_actor(name, namespace))
    return found


def _still_there(namespace: str, timeout_s: float) -> list[str]:
    """The servers that are there after the timeout; none as soon as none is."""
    deadline = time.monotonic() + timeout_s
    while (left := existing_servers(namespace)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return left
